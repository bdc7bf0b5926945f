# SPDX-License-Identifier: Apache-2.0
"""Tensor maps and the copy engine: boxes of 1 to 5 dimensions, edges, swizzles, reductions."""

import itertools

import pytest
import torch
from support.tensor_probe import TYPES, Map, map_of, swizzle, tile


def expected_box(tensor, box, coordinates, fill=0):
    """What a box holds, element by element."""
    out = torch.full(box, fill, dtype=tensor.dtype)
    for index in itertools.product(*[range(size) for size in box]):
        place = tuple(c + i for c, i in zip(coordinates, index, strict=True))
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            out[index] = tensor[place]
    return out


def swizzled_bytes(box, offset, mode):
    """Where the bytes of a box lie."""
    places = offset + torch.arange(box.numel() * box.element_size())
    return swizzle(places, mode)


BOXES = [
    ((37,), (16,), (30,)),
    ((5, 24), (3, 8), (3, 20)),
    ((5, 24), (3, 8), (-2, -5)),
    ((2, 5, 24), (2, 3, 8), (1, 3, 8)),
    ((2, 2, 5, 24), (1, 2, 2, 8), (1, -1, 4, 17)),
    ((2, 2, 2, 5, 16), (2, 1, 2, 2, 8), (1, 1, 1, 4, 8)),
    ((5, 24), (3, 8), (40, 40)),
    ((5, 24), (3, 8), (-9, 0)),
]


@pytest.mark.parametrize(("shape", "box", "coordinates"), BOXES)
def test_boxes(shape, box, coordinates):
    tensor = torch.randn(shape).half()
    shared = torch.zeros(4096, dtype=torch.uint8)
    tensor_map = map_of(tensor, box)
    tile(-1, tensor_map, coordinates, shared, 128, tensor)
    want = expected_box(tensor, box, coordinates)
    got = shared[128 : 128 + want.nbytes].view(torch.float16).view(box)
    assert torch.equal(got, want)
    assert not shared[128 + want.nbytes :].any()

    # Back to where it came from: only what lies in the tensor.
    copy = torch.full_like(tensor, 7)
    tile(0, map_of(copy, box), coordinates, shared, 128, copy)
    inside = expected_box(torch.ones(shape), box, coordinates).bool()
    again = expected_box(copy, box, coordinates)
    assert torch.equal(again[inside], want[inside])
    assert (copy != 7).sum() == inside.sum()


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("offset", [0, 1024, 1152, 1664])
def test_swizzles(mode, offset):
    rows, columns = 20, (16 << mode) // 2 if mode else 64
    tensor = torch.randn(40, 80).bfloat16()
    shared = torch.zeros(8192, dtype=torch.uint8)
    tile(-1, map_of(tensor, (rows, columns), mode), (24, 8), shared, offset, tensor)
    want = expected_box(tensor, (rows, columns), (24, 8))
    places = swizzled_bytes(want, offset, mode)
    assert torch.equal(shared[places].view(torch.bfloat16).view(rows, columns), want)
    if mode == 3 and offset % 1024 == 0:  # by the figure: chunk c of row r is at c ^ r % 8
        row, chunk = 5, 2
        at = offset + row * 128 + (chunk ^ row) * 16
        piece = shared[at : at + 16].view(torch.bfloat16)
        assert torch.equal(piece, want[row, chunk * 8 : chunk * 8 + 8])
    copy = torch.zeros_like(tensor)
    tile(0, map_of(copy, (rows, columns), mode), (24, 8), shared, offset, copy)
    inside = slice(24, 40), slice(8, min(8 + columns, 80))
    assert torch.equal(copy[inside], tensor[inside])


def test_strides_steps_and_fill():
    storage = torch.randn(8, 6, 32)
    tensor = storage.transpose(0, 1)[1:5]  # outer strides in any order
    shared = torch.zeros(4096, dtype=torch.uint8)
    tile(-1, map_of(tensor, (2, 3, 8)), (3, 6, 4), shared, 0, tensor)
    want = expected_box(tensor, (2, 3, 8), (3, 6, 4))
    assert torch.equal(shared[: want.nbytes].view(torch.float32).view(2, 3, 8), want)

    tile(-1, map_of(tensor, (2, 6, 8), steps=[1, 2, 1]), (0, 1, 0), shared, 0, tensor)
    assert torch.equal(shared[:192].view(torch.float32).view(2, 3, 8), tensor[:2, 1:7:2, :8])

    tile(-1, map_of(tensor, (1, 1, 8), fill=1), (0, 0, 28), shared, 0, tensor)
    got = shared[:32].view(torch.float32)
    assert torch.equal(got[:4], tensor[0, 0, 28:])
    assert got[4:].isnan().all()


def test_a_map_that_begins_before_the_memory():
    """Nothing can be loaded through it, as on a GPU, though all rows of the box are there; stores
    work."""
    tensor = torch.randn(6, 16)
    early = Map(tensor.data_ptr() - 4 * 64, torch.float32, (16, 10), (64,), (8, 2))
    shared = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="global memory"):
        tile(-1, early, (4, 0), shared, 0, tensor)
    tile(0, early, (4, 0), shared, 0, tensor)
    assert not tensor[:2, :8].any() and tensor[2:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_reductions(dtype):
    tensor = torch.randint(-9, 9, (6, 16)).to(dtype)
    for reduction, combine in ((1, torch.add), (2, torch.minimum), (3, torch.maximum)):
        if dtype == torch.float32 and reduction > 1:
            continue
        box = torch.randint(-9, 9, (4, 8)).to(dtype)
        shared = box.clone().view(torch.uint8).view(-1)
        result = tensor.clone()
        tile(reduction, map_of(result, (4, 8)), (3, 12), shared, 0, result)
        want = tensor.clone()
        want[3:, 12:] = combine(want[3:, 12:], box[:3, :4])
        assert torch.equal(result, want)


GOOD = {
    "base": 1 << 20,
    "dtype": 9,
    "sizes": (64, 8),
    "strides": (128,),
    "box": (64, 8),
    "mode": 3,
}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"base": (1 << 20) + 8}, "globalAddress is 1048584, expected a multiple of 16"),
        ({"base": 0}, "globalAddress is 0"),
        ({"strides": (120,)}, r"globalStrides\[0\] is 120, expected a multiple of 16"),
        ({"strides": (2**40,)}, "below 2"),
        ({"sizes": (64, 0)}, r"globalDim\[1\] is 0"),
        ({"sizes": (64, 2**32 + 1)}, r"globalDim\[1\] is 4294967297, expected 1 to 2\^32"),
        ({"box": (64, 257)}, r"boxDim\[1\] is 257, expected 1 to 256"),
        ({"box": (64, 0)}, r"boxDim\[1\] is 0"),
        ({"box": (4, 8), "mode": 0}, r"boxDim\[0\] has 8 bytes, expected a multiple of 16"),
        ({"box": (72, 8)}, r"boxDim\[0\] has 144 bytes, expected at most the swizzle's 128"),
        ({"box": (64, 8), "mode": 2}, "expected at most the swizzle's 64"),
        ({"mode": 9}, "swizzle is 9"),
        ({"dtype": 40}, "tensorDataType is 40"),
        ({"steps": (1, 9)}, r"elementStrides\[1\] is 9, expected 1 to 8"),
        ({"interleave": 1}, "tensorRank is 2, expected 3 or more"),
        ({"dtype": 3, "box": (32, 8), "fill": 1}, "oobFill is NaN, expected with a floating"),
        ({"box": (64,) * 6, "sizes": (64,) * 6, "strides": (128,) * 5}, "tensorRank is 6"),
    ],
)
def test_maps_that_the_driver_refuses(change, wrong):
    Map(**GOOD)
    with pytest.raises(ValueError, match=wrong):
        Map(**(GOOD | change))


def test_copies_that_are_refused():
    tensor = torch.randn(8, 64).bfloat16()
    shared = torch.zeros(4096, dtype=torch.uint8)
    good = map_of(tensor, (8, 64), 3)
    with pytest.raises(ValueError, match="shared address 0x40 is no multiple of 128"):
        tile(-1, good, (0, 0), shared, 64, tensor)
    with pytest.raises(ValueError, match="shared memory"):
        tile(-1, good, (0, 0), shared, 3328, tensor)
    wide = Map(tensor.data_ptr(), torch.bfloat16, (64, 8), (256,), (64, 8), 3)
    with pytest.raises(ValueError, match="global memory"):
        tile(-1, wide, (0, 0), shared, 0, tensor)
    good.bytes[40] ^= 1
    with pytest.raises(ValueError, match="is not one that cuTensorMapEncodeTiled wrote"):
        tile(-1, good, (0, 0), shared, 0, tensor)


def test_every_type():
    for dtype in TYPES:
        columns = 32 // dtype.itemsize
        tensor = torch.arange(4 * columns).view(4, columns).to(dtype)
        shared = torch.zeros(128, dtype=torch.uint8)
        tile(-1, map_of(tensor, (4, columns)), (0, 0), shared, 0, tensor)
        assert torch.equal(shared.view(dtype).view(4, columns), tensor)
