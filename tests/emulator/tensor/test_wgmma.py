# SPDX-License-Identifier: Apache-2.0
"""wgmma.mma_async: descriptors in every swizzle mode and both majors, fragments, the queue."""

import ctypes

import pytest
import torch
from support.tensor_probe import (
    DTYPES,
    ELEMENTS,
    call,
    library,
    map_of,
    pack,
    random_elements,
    swizzle,
    tile,
    u64,
)

MODES = {0: 0, 1: 3, 2: 2, 3: 1}  # swizzle (log2 of 16-byte chunks) -> the descriptor's number


def descriptor(start, leading, stride, mode):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[mode] << 62


def canonical(matrix, mode, major, start, shared):
    """Puts an operand (rows x k) into shared memory as the PTX manual's canonical layout; returns
    the descriptor. Blocks lie one after another, with a gap."""
    rows, k = matrix.shape
    size = matrix.element_size()
    each, wide = 16 // size, 1 << mode  # T, and chunks of a pattern's row
    row, step = torch.meshgrid(torch.arange(rows), torch.arange(k), indexing="ij")
    if major == "k":
        if mode == 0:
            leading, stride = 256, 512  # k's halves; groups of 8 rows
            offset = row % 8 * 16 + row // 8 * stride + step // each * leading
        else:
            leading, stride = 16, 8 * 16 * wide + 1024
            offset = row % 8 * 16 * wide + row // 8 * stride + step // each * 16
        offset += step % each * size
    else:
        if mode == 0:
            stride, leading = 128, rows // each * 128 + 128
            offset = row // each * stride + step % 8 * 16 + step // 8 * leading
        else:
            stride = 8 * 16 * wide + 1024
            leading = k // 8 * stride
            offset = row // each % wide * 16 + row // (each * wide) * leading
            offset += step % 8 * 16 * wide + step // 8 * stride
        offset += row % each * size
    places = swizzle(start + offset, mode)
    source = matrix.contiguous().view(torch.uint8).view(rows, k, size)
    for byte in range(size):
        shared[places + byte] = source[:, :, byte]
    return descriptor(start, leading, stride, mode)


def a_fragment(matrix):
    """(warp, register, lane) words of a 64 x k operand, by the PTX manual's figure."""
    each = 4 // matrix.element_size()
    lane = torch.arange(32)
    words = torch.zeros(4, 4, 32, dtype=torch.int32)
    for warp in range(4):
        for r in range(4):
            row = 16 * warp + lane // 4 + 8 * (r % 2)
            column = (lane % 4 + 4 * (r // 2)) * each
            pieces = [matrix[row, column + e] for e in range(each)]
            words[warp, r] = pack(torch.stack(pieces, -1))
    return words


def multiply(n, k, a_type, b_type, d_type, shared, a, b, words=None, accumulate=0, start=None, **o):
    names = ("a_transposed", "b_transposed", "negate_a", "negate_b", "short_adder")
    flags = [int(o.get(name, False)) for name in names]
    types = [ELEMENTS.index(name) for name in (a_type, b_type, d_type)]
    shape = (ctypes.c_int * 11)(n, k, *types, int(words is not None), *flags)
    d = torch.zeros(64, n) if start is None else start.clone()
    words = torch.zeros(4, 4, 32, dtype=torch.int32) if words is None else words
    arguments = (u64(a), u64(b), words, accumulate, d)
    call("probe_wgmma", shape, shared, shared.numel(), *arguments)
    return d


@pytest.mark.parametrize("major_b", ["k", "mn"])
@pytest.mark.parametrize("major_a", ["k", "mn"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_descriptors(mode, major_a, major_b):
    shared = torch.randint(0, 255, (65536,), dtype=torch.uint8)
    for element in ("bf16", "f16"):
        a, a64 = random_elements(element, (64, 16), 1)
        b, b64 = random_elements(element, (128, 16), 2)
        at_a = canonical(a, mode, major_a, 1024, shared)
        at_b = canonical(b, mode, major_b, 32768, shared)
        options = {"a_transposed": major_a == "mn", "b_transposed": major_b == "mn"}
        d = multiply(128, 16, element, element, "f32", shared, at_a, at_b, **options)
        assert torch.equal(d.double(), a64 @ b64.T)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("element", ["tf32", "e4m3", "e5m2", "s8", "u8"])
def test_other_types(element, mode):
    k = 32 // DTYPES[element].itemsize
    sums = "s32" if element in ("s8", "u8") else "f32"
    shared = torch.zeros(65536, dtype=torch.uint8)
    a, a64 = random_elements(element, (64, k), 1)
    b, b64 = random_elements(element, (24, k), 2)
    start, start64 = random_elements(sums, (64, 24), 3)
    at_a = canonical(a, mode, "k", 1024, shared)
    at_b = canonical(b, mode, "k", 32768, shared)
    start = start.view(torch.float32)
    for words in (None, a_fragment(a)):
        types = (element, element, sums)
        d = multiply(24, k, *types, shared, at_a, at_b, words, accumulate=1, start=start)
        got = d.view(torch.int32).double() if sums == "s32" else d.double()
        assert torch.equal(got, start64 + a64 @ b64.T)


def test_scales_and_half_sums():
    shared = torch.zeros(65536, dtype=torch.uint8)
    a, a64 = random_elements("f16", (64, 16), 1)
    b, b64 = random_elements("f16", (8, 16), 2)
    at_a = canonical(a, 3, "k", 1024, shared)
    at_b = canonical(b, 3, "k", 32768, shared)
    start = torch.full((64, 8), 2048.0)
    types = ("f16", "f16", "f32")
    d = multiply(8, 16, *types, shared, at_a, at_b, accumulate=1, start=start, negate_b=True)
    assert torch.equal(d.double(), 2048 - a64 @ b64.T)
    d = multiply(8, 16, *types, shared, at_a, at_b, start=start, negate_a=True, negate_b=True)
    assert torch.equal(d.double(), a64 @ b64.T)
    d = multiply(8, 16, "f16", "f16", "f16", shared, at_a, at_b, accumulate=1, start=start)
    assert torch.equal(d, (2048 + a64 @ b64.T).half().float())


@pytest.mark.parametrize("step", range(4))
def test_tiles_of_the_copy_engine(step):
    """As kernels do it: 64 columns in a 128-byte swizzle, 16 of them a step. Of a and b along k,
    the descriptor's start moves by 32 bytes; of v, whose rows are k, by 16 rows."""
    shared = torch.zeros(65536, dtype=torch.uint8)
    tensor = torch.randint(-4, 5, (192, 64)).bfloat16()
    tile(-1, map_of(tensor, (64, 64), 3), (0, 0), shared, 1024, tensor)
    tile(-1, map_of(tensor, (64, 64), 3), (64, 0), shared, 16384, tensor)
    columns = slice(16 * step, 16 * step + 16)
    at_a = descriptor(1024 + 32 * step, 16, 1024, 3)
    at_b = descriptor(16384 + 32 * step, 16, 1024, 3)
    d = multiply(64, 16, "bf16", "bf16", "f32", shared, at_a, at_b)
    assert torch.equal(d, tensor[:64, columns].float() @ tensor[64:128, columns].float().T)

    at_v = descriptor(16384 + 2048 * step, 8192, 1024, 3)
    d = multiply(64, 16, "bf16", "bf16", "f32", shared, at_a, at_v, b_transposed=True)
    v = tensor[64:128][columns].float()
    assert torch.equal(d, tensor[:64, columns].float() @ v)


def test_short_adder():
    """Sums of 8-bit products lose what is 13 bits below the largest; an option."""
    shared = torch.zeros(65536, dtype=torch.uint8)
    a, b = torch.zeros(64, 32), torch.zeros(8, 32)
    a[0, 0], b[0, 0] = 256.0, 1.0
    a[0, 1], b[0, 1] = 2**-5, 1.0  # 13 bits below: kept
    a[0, 2], b[0, 2] = 2**-6, 1.0  # 14: lost
    a[1, 0], a[1, 1] = -2.0, 2**-9
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    at_a = canonical(a8, 3, "k", 1024, shared)
    at_b = canonical(b8, 3, "k", 32768, shared)
    types = ("e4m3", "e4m3", "f32")
    exact = multiply(8, 32, *types, shared, at_a, at_b)
    assert exact[0, 0] == 256 + 2**-5 + 2**-6
    cut = multiply(8, 32, *types, shared, at_a, at_b, short_adder=True)
    assert cut[0, 0] == 256 + 2**-5
    assert cut[1, 0] == -2 + 2**-9
    assert not cut[2:].any()


def test_shapes_that_do_not_exist():
    shared = torch.zeros(1024, dtype=torch.uint8)
    for n, k, types, options in (
        (12, 16, ("bf16", "bf16", "f32"), {}),
        (264, 16, ("bf16", "bf16", "f32"), {}),
        (8, 8, ("bf16", "bf16", "f32"), {}),
        (8, 16, ("bf16", "f16", "f32"), {}),
        (8, 16, ("bf16", "bf16", "f16"), {}),
        (8, 32, ("e4m3", "e4m3", "f32"), {"b_transposed": True}),
        (40, 32, ("s8", "s8", "s32"), {}),
    ):
        with pytest.raises(ValueError, match="is not emulated"):
            multiply(n, k, *types, shared, 0, 0, **options)


@pytest.mark.parametrize("lazy", [0, 1])
class TestQueue:
    """Warp 1's rows, m64n16k16; `d` are its registers."""

    def start(self, lazy):
        self.shared = torch.zeros(65536, dtype=torch.uint8)
        self.a, self.a64 = random_elements("bf16", (64, 16), 1)
        self.b, self.b64 = random_elements("bf16", (16, 16), 2)
        self.at_a = canonical(self.a, 3, "k", 1024, self.shared)
        self.at_b = canonical(self.b, 3, "k", 32768, self.shared)
        self.product = (self.a64 @ self.b64.T)[16:32]
        self.d = torch.zeros(8, 32, dtype=torch.int32)
        library.probe_queue.restype = ctypes.c_void_p
        arguments = (ctypes.c_void_p(self.shared.data_ptr()), self.shared.numel(), 1, lazy)
        self.queue = ctypes.c_void_p(library.probe_queue(*arguments))

    def issue(self, words=None, accumulate=1):
        pointer = ctypes.c_void_p(None) if words is None else words
        operands = (u64(self.at_a), u64(self.at_b), pointer, accumulate, self.d)
        call("probe_queue_issue", self.queue, 16, ELEMENTS.index("bf16"), *operands)

    def commit(self):
        call("probe_queue_commit", self.queue)

    def wait(self, groups=0):
        call("probe_queue_wait", self.queue, groups)

    def values(self):
        out = torch.zeros(16, 16)
        call("probe_unpack_d", self.d, 16, out)
        return out.double()

    def test_groups(self, lazy):
        self.start(lazy)
        self.issue(accumulate=0)
        self.issue()
        self.commit()
        assert self.values().isnan().all()  # under way: nothing to read
        self.wait(1)
        assert self.values().isnan().all()
        self.issue()
        self.commit()
        self.wait(1)  # the first group is done, its sums are still in use
        assert self.values().isnan().all()
        self.wait()
        assert torch.equal(self.values(), 3 * self.product)
        self.issue()
        self.commit()
        self.wait()
        assert torch.equal(self.values(), 4 * self.product)
        library.probe_queue_delete(self.queue)

    def test_operands_that_change(self, lazy):
        self.start(lazy)
        words = a_fragment(self.a)[1].contiguous()
        self.issue(words)
        self.commit()
        self.shared[32768:] = 0  # a tile that is overwritten before the wait
        self.wait()
        want = 0 * self.product if lazy else self.product
        assert torch.equal(self.values(), want)
        self.issue(words)
        self.commit()
        words[2, 5] += 1
        with pytest.raises(ValueError, match="operand a's register 2 changed before wait_group"):
            self.wait()
        library.probe_queue_delete(self.queue)

    def test_accumulators_that_are_touched(self, lazy):
        self.start(lazy)
        self.issue()
        self.commit()
        self.d[3, 7] = 0
        with pytest.raises(ValueError, match="accumulator 3 was written before wait_group"):
            self.wait()
        library.probe_queue_delete(self.queue)
