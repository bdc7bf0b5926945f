# SPDX-License-Identifier: Apache-2.0
"""moe_align_block_size, topk_softmax_align and moe_sum with PyTorch and without a GPU."""

import pytest
import torch
from support.align_truth import by_definition, by_sorting, every_second, random_ids

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def assert_aligned(ids, block_size, experts, expert_map=None, pad=False, ignore=False):
    got = tiercel.moe_align_block_size(
        ids, block_size, experts, expert_map, pad_sorted_ids=pad, ignore_invalid_experts=ignore
    )
    expected = by_definition(ids, block_size, experts, expert_map, pad, ignore)
    for tensor, due in zip(got, expected, strict=True):
        assert tensor.tolist() == due
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_the_example_of_vllm():
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    slots, blocks, number = tiercel.moe_align_block_size(ids, 4, 5)
    assert slots[:16].tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert (blocks.tolist(), number.tolist()) == ([1, 2, 3, 4, -1, -1, -1], [16])
    assert slots[16:].eq(12).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "block_size"),
    [(1, 1, 1, 1), (1, 8, 2, 16), (5, 4, 4, 3), (33, 60, 6, 48), (200, 16, 2, 16), (0, 8, 2, 16)],
)
def test_every_id_is_in_its_experts_blocks(tokens, experts, k, block_size, dtype):
    ids = random_ids(tokens, experts, k, dtype)
    for pad in (False, True):
        assert_aligned(ids, block_size, experts, pad=pad)
    if tokens:
        for got, due in zip(
            tiercel.moe_align_block_size(ids, block_size, experts),
            by_sorting(ids, block_size, experts),
            strict=True,
        ):
            assert torch.equal(got, due)


@pytest.mark.parametrize("ignore", [False, True])
def test_expert_maps(ignore):
    for tokens, experts, k, block_size in [(20, 16, 4, 8), (3, 64, 8, 16)]:
        ids = random_ids(tokens, experts, k)
        assert_aligned(ids, block_size, experts, every_second(experts), ignore=ignore)
    nowhere = torch.full((16,), -1, dtype=torch.int32)
    assert_aligned(random_ids(9, 16, 4), 8, 16, nowhere, ignore=ignore)


def test_stray_ids_are_left_out():
    ids = torch.tensor([[0, 7], [-1, 8], [3, 2**31 - 1], [-(2**31), 3]])
    assert_aligned(ids, 2, 8)
    assert_aligned(torch.tensor([[2**32 + 1, 1], [-(2**40), 0]]), 2, 8)
    assert_aligned(torch.full((5, 2), -1), 4, 8)
    assert_aligned(torch.full((5, 2), 3), 4, 8)  # the same expert twice


def outputs(tokens=4, k=2, experts=8, block_size=4, extra=0):
    slots = min(tokens * k * block_size, tokens * k + experts * (block_size - 1)) + extra
    sizes = (slots, -(-slots // block_size), 1)
    return tuple(torch.full((size,), -7, dtype=torch.int32) for size in sizes)


@pytest.mark.parametrize("extra", [0, 1, 9])
def test_align_out(extra):
    ids = random_ids(4, 8, 2)
    out = outputs(extra=extra)
    result = tiercel.moe_align_block_size(ids, 4, 8, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    slots, blocks, number = tiercel.moe_align_block_size(ids, 4, 8)
    assert torch.equal(out[0][: len(slots)], slots) and out[0][len(slots) :].eq(8).all()
    assert torch.equal(out[1][: len(blocks)], blocks) and out[1][len(blocks) :].eq(-1).all()
    assert torch.equal(out[2], number)


ALIGN_BAD = [
    (
        {"block_size": 2**30},
        ValueError,
        "more slots than int32 can number are needed, 8589934592",
    ),
    (
        {"out": outputs(extra=-1)},
        ValueError,
        "`sorted_token_ids` must have at least 32 elements, got 31",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), ALIGN_BAD)
def test_bad_arguments_of_align_are_named(changes, error, text):
    arguments = {"topk_ids": random_ids(4, 8, 2), "block_size": 4, "num_experts": 8} | changes
    with pytest.raises(error) as info:
        tiercel.moe_align_block_size(**arguments)
    assert str(info.value) == f"moe_align_block_size: {text}"


# topk_softmax_align


@pytest.mark.parametrize("tokens", [0, 1, 50, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choosing_and_sorting_is_both_in_turn(tokens, dtype):
    scores = torch.randn(tokens, 16).to(dtype)
    for options in ({}, {"softmax_first": False}, {"indices_dtype": torch.int64}):
        weights, ids, *blocks = tiercel.topk_softmax_align(scores, 3, 8, **options)
        chosen = tiercel.topk_softmax(scores, 3, **options)
        assert torch.equal(weights, chosen[0]) and torch.equal(ids, chosen[1])
        assert ids.dtype == chosen[1].dtype
        for got, due in zip(blocks, tiercel.moe_align_block_size(ids, 8, 16), strict=True):
            assert torch.equal(got, due)
    here = every_second(16)
    options = {"pad_sorted_ids": True, "ignore_invalid_experts": True}
    _, ids, *blocks = tiercel.topk_softmax_align(scores, 3, 8, here, **options)
    due = tiercel.moe_align_block_size(ids, 8, 16, here, **options)
    assert all(torch.equal(a, b) for a, b in zip(blocks, due, strict=True))


def test_choosing_and_sorting_out():
    scores = torch.randn(4, 8)
    out = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64), *outputs(extra=5))
    result = tiercel.topk_softmax_align(scores, 2, 4, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    expected = tiercel.topk_softmax_align(scores, 2, 4)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[2][:32], expected[2])


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_of_choosing_and_sorting(renormalize):
    scores = torch.randn(6, 12, requires_grad=True)
    pull = torch.randn(6, 4)
    grads = []
    for function, args in ((tiercel.topk_softmax_align, (8,)), (tiercel.ref.topk_softmax, ())):
        found = function(scores, 4, *args, renormalize=renormalize)
        assert not any(t.requires_grad for t in found[1:])
        grads.append(torch.autograd.grad((found[0] * pull).sum(), scores)[0])
    torch.testing.assert_close(*grads)


SHORT = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32), *outputs(extra=-1))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": 17}, ValueError, "k must be between 1 and the number of experts, got k = 17 for 16"),
        ({"out": SHORT}, ValueError, "`sorted_token_ids` must have at least 32 elements, got 31"),
        ({"block_size": 2**30}, ValueError, "more slots than int32 can number are needed"),
    ],
)
def test_bad_arguments_of_choosing_and_sorting_are_named(changes, error, text):
    arguments = {"scores": torch.randn(4, 16), "k": 2, "block_size": 4} | changes
    with pytest.raises(error) as info:
        tiercel.topk_softmax_align(**arguments)
    assert text in str(info.value)


# moe_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(dtype, weighted):
    generator = torch.Generator().manual_seed(1)
    for tokens, k, columns in [(1, 1, 1), (3, 8, 64), (5, 6, 33), (0, 2, 8), (4, 2, 0), (2, 0, 8)]:
        x = torch.randn(tokens, k, columns, generator=generator).to(dtype)
        weights = torch.rand(tokens, k, generator=generator) if weighted else None
        out = tiercel.moe_sum(x, weights)
        wide = x.double() * (weights.double()[:, :, None] if weighted else 1)
        # Rounded once: half a unit in the last place, and float32's sums before it.
        bound = wide.abs().sum(1) * 1e-6 + wide.sum(1).abs() * torch.finfo(dtype).eps / 2
        assert out.shape == (tokens, columns) and out.dtype == dtype
        assert bool(((out.double() - wide.sum(1)).abs() <= bound + 1e-7).all())


def test_sum_out_and_strides():
    x = torch.randn(8, 3, 16).transpose(0, 1)
    weights = torch.rand(3, 8)
    for given in ((), (weights,)):
        out = torch.empty(3, 16)
        assert tiercel.moe_sum(x, *given, out=out) is out
        torch.testing.assert_close(out, tiercel.moe_sum(x.contiguous(), *given))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_sums(weighted):
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    given = (x, weights) if weighted else (x,)
    assert torch.autograd.gradcheck(tiercel.ref.moe_sum, given)
    narrow = [t.detach().float().requires_grad_() for t in given]
    pull = torch.randn(3, 5)
    results = [
        torch.autograd.grad((function(*narrow) * pull).sum(), narrow)
        for function in (tiercel.moe_sum, tiercel.ref.moe_sum)
    ]
    torch.testing.assert_close(*results)
