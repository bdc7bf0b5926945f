# SPDX-License-Identifier: Apache-2.0
"""mma.sync, ldmatrix, stmatrix and movmatrix: every fragment by its layout in the PTX manual."""

import pytest
import torch
from support.tensor_probe import DTYPES, ELEMENTS, call, pack, random_elements

LANES = torch.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4


def fragments(element, k):
    """Rows and columns of a's elements, rows and columns of b's: lists of (32,) tensors, in the
    order of the registers."""
    each = 32 // (8 * DTYPES[element].itemsize)
    half = 4 * each  # columns that four lanes hold in one register
    a, b = [], []
    for i in range(16 * k // 32):
        lower = (i // each) % 2 == 1
        right = i >= 2 * each
        a.append((GROUP + 8 * lower, MEMBER * each + i % each + half * right))
    for i in range(8 * k // 32):
        b.append((MEMBER * each + i % each + half * (i >= each), GROUP))
    return a, b


def registers(matrix, places, count=4):
    values = torch.stack([matrix[rows, columns] for rows, columns in places])
    each = 4 // matrix.dtype.itemsize
    words = pack(values.reshape(-1, each, 32).transpose(1, 2)).reshape(-1, 32)
    return torch.cat([words, words.new_zeros(count - len(words), 32)])


CASES = [
    (element, k, sums)
    for element, ks, all_sums in (
        ("f16", (8, 16), ("f32", "f16")),
        ("bf16", (8, 16), ("f32",)),
        ("tf32", (4, 8), ("f32",)),
        ("e4m3", (16, 32), ("f32", "f16")),
        ("e5m2", (16, 32), ("f32",)),
        ("s8", (16, 32), ("s32",)),
        ("u8", (32,), ("s32",)),
    )
    for k in ks
    for sums in all_sums
]


@pytest.mark.parametrize(("element", "k", "sums"), CASES)
def test_mma_sync(element, k, sums):
    a, a64 = random_elements(element, (16, k), 1)
    b, b64 = random_elements(element, (k, 8), 2)
    c, c64 = random_elements(sums, (16, 8), 3)
    a_places, b_places = fragments(element, k)
    c_places = [(GROUP + 8 * (i // 2), MEMBER * 2 + i % 2) for i in range(4)]
    d = torch.zeros(4, 32, dtype=torch.int32)
    types = [ELEMENTS.index(name) for name in (element, element, sums, sums)]
    arguments = [registers(a, a_places), registers(b, b_places), registers(c, c_places), d]
    call("probe_mma_sync", k, *types, *arguments)
    assert torch.equal(d, registers((c64 + a64 @ b64).to(DTYPES[sums]), c_places))


def test_mma_sync_that_does_not_exist():
    words = torch.zeros(4, 32, dtype=torch.int32)
    for k, a, b, c in (
        (32, "f16", "f16", "f32"),
        (16, "f16", "bf16", "f32"),
        (16, "bf16", "bf16", "f16"),
        (16, "s8", "s8", "f32"),
    ):
        types = [ELEMENTS.index(name) for name in (a, b, c, c)]
        with pytest.raises(ValueError, match="is not emulated"):
            call("probe_mma_sync", k, *types, words, words, words, words)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_shared_memory(count, transposed):
    pitch = 48  # bytes from row to row
    matrices = torch.randint(-(2**15), 2**15, (count, 8, 8), dtype=torch.int16)
    shared = torch.zeros(count * 8 * pitch, dtype=torch.uint8)
    rows = shared.view(count, 8, pitch)
    rows[:, :, :16] = matrices.view(torch.uint8).view(count, 8, 16)
    addresses = torch.full((32,), 2**31 - 1, dtype=torch.int32)  # the others are not looked at
    addresses[: 8 * count] = torch.arange(8 * count).int() * pitch
    source = matrices.transpose(1, 2) if transposed else matrices
    pairs = torch.stack([source[:, GROUP, 2 * MEMBER], source[:, GROUP, 2 * MEMBER + 1]], -1)
    want = pack(pairs)

    words = torch.zeros(4, 32, dtype=torch.int32)
    call("probe_matrix", 0, shared, len(shared), addresses, count, transposed, words)
    assert torch.equal(words[:count], want)
    assert not words[count:].any()
    before = shared.clone()
    shared.zero_()
    call("probe_matrix", 1, shared, len(shared), addresses, count, transposed, words)
    assert torch.equal(shared, before)


def test_movmatrix():
    matrix = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    words = torch.zeros(4, 32, dtype=torch.int32)
    words[0] = pack(torch.stack([matrix[GROUP, 2 * MEMBER], matrix[GROUP, 2 * MEMBER + 1]], -1))
    call("probe_matrix", 2, words, 0, words, 1, 0, words)
    turned = matrix.T
    want = pack(torch.stack([turned[GROUP, 2 * MEMBER], turned[GROUP, 2 * MEMBER + 1]], -1))
    assert torch.equal(words[1], want)


def test_a_row_that_is_not_aligned_or_not_there():
    shared = torch.zeros(256, dtype=torch.uint8)
    words = torch.zeros(4, 32, dtype=torch.int32)
    addresses = torch.arange(32, dtype=torch.int32) * 16
    with pytest.raises(ValueError, match="outside"):
        call("probe_matrix", 0, shared, len(shared), addresses, 4, 0, words)
    addresses[1] += 8
    with pytest.raises(ValueError, match="0x18 of lane 1 is no multiple of 16"):
        call("probe_matrix", 0, shared, len(shared), addresses, 1, 0, words)
