# SPDX-License-Identifier: Apache-2.0
"""Operators that C++ calls without Python, on the emulator: the stack that torch passes, outputs,
launch and written arguments; and the calls that go on to Python."""

import contextlib
import ctypes
import os
import sys
import threading

import pytest
import torch
from support import emulated_module
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

assert "tiercel" not in sys.modules, "the module is replaced before tiercel is imported"
_C = sys.modules["tiercel._C"] = emulated_module.load()

from support import stable_dispatch

import tiercel
from tiercel.core import native
from tiercel.core.dispatch import operators

pytestmark = pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = [
    *("rms_norm", "rms_norm.out", "add_rms_norm", "layer_norm", "silu", "silu_and_mul"),
    *("silu_and_mul.out", "gelu", "rotary_embedding", "rotary_embedding_"),
]

driver = ctypes.CDLL(os.environ["TIERCEL_LIBCUDA"])


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The operators for the CPU, whose tensors stand for a GPU's; kernels may touch all memory."""
    driver.emulator_register.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)
    driver.emulator_register(4096, 1 << 47, b"all")
    for name in NAMES:
        op = operators[name]
        below, autograd = op.eager_calls[2], op.eager_calls[1]
        native.register(name, op.overload, op.argument_names, below, autograd, emulated=True)
        assert name not in native.through_python


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@contextlib.contextmanager
def ready():
    _C.set_native_device(0, True)
    try:
        yield
    finally:
        _C.set_native_device(0, False)


class NoPython(Exception):
    """Python was called."""


@contextlib.contextmanager
def no_python():
    """Fails calls that go on to Python."""

    def refuse(*args):
        raise NoPython

    before = {name: operators[name].backends["ref"] for name in NAMES}
    try:
        for name in NAMES:
            reference = before[name]
            operators[name].backends["ref"] = type(reference)(
                "ref", refuse, reference.description, reference.language
            )
        yield
    finally:
        for name, reference in before.items():
            operators[name].backends["ref"] = reference


def overload(name):
    return operators[name].overload


def natively(name, *args, **named):
    """The results of a call that must not need Python."""
    with ready(), no_python():
        return stable_dispatch.call(overload(name), *args, **named)


def in_python(name, *args, **named):
    """What reaches the Python function: the reference, on the CPU."""
    return stable_dispatch.call(overload(name), *args, **named)


def near(got, expected):
    got, expected = (t if isinstance(t, tuple) else (t,) for t in (got, expected))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_what_is_checked_here_can_fail():
    with pytest.raises(RuntimeError), no_python():
        in_python("rms_norm", torch.ones(4, 8))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(5, 64), (64,), (2, 3, 40), (3, 4099)])
def test_norms(dtype, shape):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    for name, args in [
        ("rms_norm", (x,)),
        ("rms_norm", (x, weight)),
        ("rms_norm", (x, weight, bias, 0.5)),
        ("layer_norm", (x, weight.float(), bias.float())),
        ("add_rms_norm", (x, residual, weight)),
    ]:
        near(natively(name, *args), in_python(name, *args))
        near(natively(name, *args, backend="sm90"), in_python(name, *args))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_activations(dtype):
    x, up = torch.randn(6, 48).to(dtype), torch.randn(6, 48).to(dtype)
    for name, args in [
        ("silu", (x,)),
        ("silu_and_mul", (x, None)),  # packed: half as many columns
        ("silu_and_mul", (x, up)),
        ("gelu", (x, "none")),
        ("gelu", (x, "tanh")),
    ]:
        near(natively(name, *args), in_python(name, *args))


def test_a_dtype_that_a_given_argument_decides():
    x, scale = torch.randn(6, 48).to(BF16), torch.tensor([0.5])
    got, expected = natively("silu", x, scale), in_python("silu", x, scale)
    assert got.dtype == expected.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.13, atol=1e-2)


def test_written_results_have_a_new_version():
    x, weight, out = torch.randn(4, 32), torch.randn(32), torch.empty(4, 32)
    assert natively("rms_norm.out", x, weight, out=out) is None
    near(out, in_python("rms_norm", x, weight))
    assert out._version == 1 and x._version == 0
    gate, result = torch.randn(4, 32), torch.empty(4, 32).detach()
    natively("silu_and_mul.out", gate, x, out=result)
    near(result, in_python("silu_and_mul", gate, x))
    assert result._version == 1


def test_arguments_that_are_written():
    """Rotary embedding in place, and into a cache of pages: optional tensors, bools, versions."""
    q, k = torch.randn(3, 4, 64).to(BF16), torch.randn(3, 2, 64).to(BF16)
    cos_sin, positions = torch.randn(16, 64), torch.tensor([1, 5, 2])
    expected = in_python("rotary_embedding", positions, q, k, cos_sin)
    near(natively("rotary_embedding", positions, q, k, cos_sin), expected)
    natively("rotary_embedding_", positions, q, k, cos_sin)
    near((q, k), expected)
    assert (q._version, k._version, cos_sin._version) == (1, 1, 0)


def test_a_call_from_a_thread_that_has_no_gil():
    x, found = torch.randn(4, 32), []

    def work():
        with torch.no_grad():
            found.append(stable_dispatch.call(overload("rms_norm"), x))

    with ready(), no_python():
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert len(found) == 4
    for one in found:
        near(one, in_python("rms_norm", x))


# -- calls that are left to Python -----------------------------------------------------------------


def refused(name, *args, **named):
    """Whether a call that the kernels could take goes on to Python."""
    with ready(), no_python():
        try:
            stable_dispatch.call(overload(name), *args, **named)
        except RuntimeError:
            return True
    return False


def test_calls_with_gradients():
    x = torch.randn(4, 32, requires_grad=True)
    assert not refused("rms_norm", x)
    with torch.enable_grad():
        assert refused("rms_norm", x)
        with ready():
            out = stable_dispatch.call(overload("rms_norm"), x)
        assert out.requires_grad
        out.sum().backward()
    assert x.grad is not None


def test_the_choice_of_a_backend():
    x = torch.randn(4, 32)
    assert refused("rms_norm", x, backend="ref") and not refused("rms_norm", x, backend="sm90")
    with tiercel.backends.use_backend("ref"):
        assert refused("rms_norm", x)
    assert not refused("rms_norm", x)


def test_modes_see_their_calls():
    x, seen = torch.randn(4, 32), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with ready(), Mode():
        stable_dispatch.call(overload("rms_norm"), x)
        assert seen == [overload("rms_norm")]
        torch.ops.tiercel.rms_norm(x)
    assert seen.count(overload("rms_norm")) == 2


def test_negated_and_odd_tensors():
    z = torch.randn(4, 32, dtype=torch.complex64).conj().imag
    assert z.is_neg() and refused("silu", z)
    with ready():
        near(stable_dispatch.call(overload("silu"), z), in_python("silu", z.clone()))
    assert refused("silu", torch.randn(4, 32)[:, :24])  # Python makes it contiguous
    assert refused("rms_norm", torch.randn(4, 32).to_sparse())
    assert refused("rms_norm", torch.randn(0, 32))  # has no memory, as a fake tensor
    assert refused("rms_norm", torch.randn(4, 32), torch.randn(7))


@pytest.mark.parametrize("rows", [0, 4])
def test_fake_and_meta_tensors(rows):
    with ready(), FakeTensorMode() as mode:
        x = torch.empty(rows, 32)
        for out in (stable_dispatch.call(overload("rms_norm"), x), torch.ops.tiercel.rms_norm(x)):
            assert isinstance(out, FakeTensor) and out.shape == (rows, 32)
        assert out.fake_mode is mode
    with ready():
        assert isinstance(stable_dispatch.call(overload("rms_norm"), x), FakeTensor)
        x = torch.empty(rows, 32, device="meta")
        for out in (stable_dispatch.call(overload("rms_norm"), x), torch.ops.tiercel.rms_norm(x)):
            assert out.is_meta and out.shape == (rows, 32)


class Block(torch.nn.Module):
    def forward(self, x, weight, residual):
        y, residual = tiercel.rms_norm(x, weight, residual=residual)
        return tiercel.silu_and_mul(y, residual)


def of_block(rows):
    return torch.randn(rows, 32), torch.randn(32), torch.randn(rows, 32)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_graphs_of_any_size(grad):
    torch._dynamo.reset()
    compiled = torch.compile(Block(), backend="aot_eager", dynamic=True, fullgraph=True)
    with ready(), torch.set_grad_enabled(grad):
        for rows in (4, 7):
            values = of_block(rows)
            values[1].requires_grad_(grad)
            got, expected = compiled(*values), Block()(*values)
            near(got, expected)
            if grad:
                grads = [torch.autograd.grad(t.sum(), values[1])[0] for t in (got, expected)]
                torch.testing.assert_close(*grads)


def test_exported_programs():
    rows = torch.export.Dim("rows", min=2)
    with ready():
        program = torch.export.export(
            Block(), of_block(4), dynamic_shapes=({0: rows}, None, {0: rows})
        )
        values = of_block(9)
        near(program.module()(*values), Block()(*values))


def test_a_device_that_is_not_ready():
    with no_python(), pytest.raises(RuntimeError):
        stable_dispatch.call(overload("rms_norm"), torch.randn(4, 32))


@pytest.mark.parametrize("grad", [False, True])
def test_errors_keep_their_type(grad):
    """C++ carries no Python exception; a call from Python gets it all the same."""
    x = torch.randn(4, 32, requires_grad=grad)
    with ready(), torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match=r"^rms_norm: `weight` must have shape"):
            torch.ops.tiercel.rms_norm(x, torch.randn(7))
        with pytest.raises(ValueError, match="has no backend 'none'"):
            torch.ops.tiercel.rms_norm(x, backend="none")
        with pytest.raises(RuntimeError, match="failed"):
            stable_dispatch.call(overload("rms_norm"), x, torch.randn(7))
        # What C++ saw before is not what Python gets later.
        with pytest.raises(TypeError, match="dtype"):
            torch.ops.tiercel.rms_norm(x, torch.randn(32).long())


def test_memory_is_freed():
    x, weight = torch.randn(64, 1024), torch.randn(1024)
    text = "sm90"

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(count):
        for _ in range(count):
            natively("rms_norm", x[:1], weight, backend=text)
            with ready():
                in_python("rms_norm", x, weight, backend="ref")

    calls(20)
    before = resident()
    calls(200)
    assert resident() - before < 16 << 20  # 200 results of the reference alone are 50 MB
