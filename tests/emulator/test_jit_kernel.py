# SPDX-License-Identifier: Apache-2.0
"""tiercel._C.JitKernel, which launches kernels that were compiled on the user's machine."""

import pytest
import torch
from support.dlpack_tensor import as_cuda
from support.emulator import kernels, registered
from support.ptx import driver

# out[i] = in[i] + the number that is the third parameter
PTX = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 out, .param .u64 in, .param .u32 number) {
.reg .b32 %r<4>; .reg .b64 %rd<6>;
griddepcontrol.wait;
ld.param.u64 %rd0, [out]; ld.param.u64 %rd1, [in]; ld.param.u32 %r0, [number];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd0, %rd2; add.s64 %rd4, %rd1, %rd2;
ld.global.u32 %r2, [%rd4]; add.u32 %r2, %r2, %r0; st.global.u32 [%rd3], %r2;
ret;
}
"""
LABELS = ("argument 1", "argument 2", "argument 3")
ONE = (1, 1, 1)


@pytest.fixture(scope="module")
def add(tmp_path_factory):
    path = tmp_path_factory.mktemp("ptx") / "add.ptx"
    path.write_text(PTX)
    assert driver.emulator_load(str(path).encode()) == 0
    return kernels.JitKernel(bytes(64), "add", "kernel add", [(0, 8), (8, 8), (16, 4)], 0)


def launch(kernel, *arguments, grid=ONE, block=(32, 1, 1), labels=LABELS, smem=0):
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    shown = tuple(as_cuda(x, x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments)
    with registered(*tensors):
        kernel.launch(grid, block, ONE, smem, False, labels, shown)


class Index:
    """An integer that is no int, as NumPy's are."""

    def __index__(self) -> int:
        return 32


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


@pytest.mark.parametrize("threads", [32, Index()])
def test_tensors_and_numbers_arrive(add, threads):
    x = torch.arange(32, dtype=torch.int32)
    out = torch.zeros_like(x)
    launch(add, out, x, number(7), block=(threads, 1, 1))
    assert torch.equal(out, x + 7)


def test_no_block_is_no_launch(add):
    x, out = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    launch(add, out, x, number(7), grid=(0, 1, 1))
    assert not out.any()


def test_names_of_the_arguments(add):
    add.load(device=0)
    x, out = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with registered(x, out):
        add.launch(
            grid=ONE,
            block=(32, 1, 1),
            cluster=ONE,
            dynamic_smem=0,
            dependent=True,
            labels=LABELS,
            arguments=(as_cuda(out, out.data_ptr()), as_cuda(x, x.data_ptr()), number(1)),
        )
    assert (out == 2).all()


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        ("oi", {}, TypeError, "kernel add: takes 3 arguments, got 2"),
        ("oin", {"labels": LABELS[:2]}, TypeError, "kernel add: takes 3 arguments, got 3"),
        ("oio", {}, ValueError, "kernel add: `argument 3` has 4 bytes and takes no tensor"),
        ("onn", {}, ValueError, "kernel add: `argument 2` must have 8 bytes, got 4"),
        ("otn", {}, ValueError, "kernel add: `argument 2` is no tensor map"),
        ("ppn", {}, ValueError, "kernel add: one argument must be a tensor, whose device and"),
        ("o?n", {}, TypeError, "argument 2"),
        ("oin", {"grid": (-1, 1, 1)}, RuntimeError, "an integer from 0 to 4294967295"),
        ("oin", {"block": (1 << 32, 1, 1)}, RuntimeError, "an integer from 0 to 4294967295"),
        ("oin", {"grid": [1, 1, 1]}, TypeError, "tuple"),
        ("oin", {"smem": 1.5}, TypeError, "an integer from 0 to 4294967295"),
    ],
)
def test_what_is_refused(add, arguments, named, error, text):
    kinds = {
        "o": torch.zeros(32, dtype=torch.int32),
        "i": torch.ones(32, dtype=torch.int32),
        "n": number(7),
        "p": bytes(8),
        "t": (None, (), 0, 0),
        "?": 7,
    }
    with pytest.raises(error, match=text):
        launch(add, *(kinds[kind] for kind in arguments), **named)
    assert not kinds["o"].any()


def test_what_is_no_kernel():
    for wrong in ("no bytes", bytes(64)):
        with pytest.raises(TypeError):
            kernels.JitKernel(wrong, "add", "kernel add", [(0, 8, 8)], 0)
    with pytest.raises(TypeError):
        kernels.JitKernel(bytes(64), "add", "kernel add", [(0, 8)], -1)


def test_symbols():
    assert kernels.demangle("_Z5twicePfi") == "twice(float*, int)"
    assert kernels.demangle("twice") == "twice"
    with pytest.raises(TypeError):
        kernels.demangle(b"twice")
