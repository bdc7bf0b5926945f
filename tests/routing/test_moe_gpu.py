# SPDX-License-Identifier: Apache-2.0
"""moe_align_block_size, topk_softmax_align and moe_sum on an H100 or H200."""

import itertools

import pytest
import torch
from support.align_truth import by_definition, by_sorting, every_second, random_ids
from support.truth import assert_right

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def assert_equal(got, due):
    for tensor, expected in zip(got, due, strict=True):
        assert tensor.dtype == torch.int32
        if not isinstance(expected, list):
            assert torch.equal(tensor, expected)
        else:
            assert tensor.tolist() == expected


def ids_of(tokens, experts, k, dtype=torch.int32, seed=0):
    return random_ids(tokens, experts, k, dtype, "cuda", seed)


@pytest.mark.parametrize(
    "experts", [1, 2, 8, 31, 32, 33, 60, 64, 128, 255, 256, 257, 384, 511, 512]
)
def test_every_way_to_launch(experts):
    """From one id to more than a cluster holds, at sizes around each boundary."""
    k = min(8, experts)
    for tokens in (1, 3, 16, 31, 32, 33, 127, 128, 129, 500, 1023, 1025, 4095, 4097, 8191, 8193):
        for block_size in (16, 48, 128):
            ids = ids_of(tokens, experts, k)
            got = tiercel.moe_align_block_size(ids, block_size, experts)
            assert_equal(got, by_sorting(ids, block_size, experts))


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 32, 64, 100, 128, 256, 1000])
def test_block_sizes(block_size):
    for tokens, experts, k in [(5, 64, 8), (700, 64, 6), (20_000, 128, 8)]:
        ids = ids_of(tokens, experts, k)
        got = tiercel.moe_align_block_size(ids, block_size, experts)
        assert_equal(got, by_sorting(ids, block_size, experts))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("pad", [False, True])
def test_maps_and_padding(dtype, ignore, pad):
    for tokens, experts, k, block_size in [(0, 8, 2, 16), (3, 64, 8, 16), (200, 60, 4, 48)]:
        ids = ids_of(tokens, experts, k, dtype)
        for here in (None, every_second(experts, "cuda")):
            options = {"pad_sorted_ids": pad, "ignore_invalid_experts": ignore}
            got = tiercel.moe_align_block_size(ids, block_size, experts, here, **options)
            assert_equal(got, by_definition(ids, block_size, experts, here, pad, ignore))


@pytest.mark.parametrize("tokens", [9000, 70_000])
@pytest.mark.parametrize("ignore", [False, True])
def test_maps_of_many_tokens(tokens, ignore):
    ids, here = ids_of(tokens, 128, 8, torch.int64), every_second(128, "cuda")
    got = tiercel.moe_align_block_size(ids, 64, 128, here, ignore_invalid_experts=ignore)
    due = tiercel.moe_align_block_size(
        ids, 64, 128, here, ignore_invalid_experts=ignore, backend="ref"
    )
    assert_equal(got, due)


@pytest.mark.sanitize
def test_stray_ids_are_left_out():
    ids = torch.tensor([[0, 7], [-1, 8], [3, 2**31 - 1], [-(2**31), 3]], device="cuda")
    for given in (ids, ids.int(), ids * 2**32, ids + 2**32):
        got = tiercel.moe_align_block_size(given, 2, 8)
        assert_equal(got, by_definition(given, 2, 8))
    nowhere = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    for tokens in (40, 20_000):
        got = tiercel.moe_align_block_size(
            ids_of(tokens, 16, 4), 16, 16, nowhere, ignore_invalid_experts=True
        )
        assert got[2].item() == 0 and got[1].eq(-1).all() and got[0].eq(tokens * 4).all()


@pytest.mark.parametrize("tokens", [1, 100, 1024, 8192, 40_000])
def test_one_expert_takes_all(tokens):
    for expert in (0, 63):
        ids = torch.full((tokens, 4), expert, dtype=torch.int32, device="cuda")
        got = tiercel.moe_align_block_size(ids, 64, 64)
        assert_equal(got, by_sorting(ids, 64, 64))


@pytest.mark.sanitize
def test_out_and_nothing_else_is_written():
    ids = ids_of(40, 16, 4)
    before = ids.clone()
    expected = tiercel.moe_align_block_size(ids, 16, 16)
    slots = len(expected[0]) + 21
    whole = [torch.full((n + 2,), 7, dtype=torch.int32, device="cuda") for n in (slots, 27, 1)]
    whole[1] = torch.full((-(-slots // 16) + 2,), 7, dtype=torch.int32, device="cuda")
    out = tuple(t[1:-1] for t in whole)
    result = tiercel.moe_align_block_size(ids, 16, 16, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True)) and torch.equal(ids, before)
    for tensor, due, rest in zip(out, expected, (160, -1, 0), strict=True):
        assert torch.equal(tensor[: len(due)], due) and tensor[len(due) :].eq(rest).all()
    assert all(t[0] == 7 and t[-1] == 7 for t in whole)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "k"), [(512, 10), (64, 8)])
def test_a_million_tokens(experts, k):
    ids = ids_of(1 << 20, experts, k)
    assert_equal(tiercel.moe_align_block_size(ids, 128, experts), by_sorting(ids, 128, experts))


def test_too_many_experts_fall_back():
    ids = ids_of(30, 1100, 4)
    with pytest.raises(NotImplementedError, match="at most 1024 experts are supported, got 1100"):
        tiercel.moe_align_block_size(ids, 16, 1100, backend="sm90")
    with pytest.warns(tiercel.FallbackWarning, match="at most 1024 experts"):
        assert_equal(tiercel.moe_align_block_size(ids, 16, 1100), by_sorting(ids, 16, 1100))


@pytest.mark.parametrize("tokens", [7, 128, 1024, 8192, 40_000])
def test_align_in_a_graph(tokens):
    ids = ids_of(tokens, 64, 8)
    tiercel.moe_align_block_size(ids, 32, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = tiercel.moe_align_block_size(ids, 32, 64)
        # Back to back: the second reads what the first has just written.
        second = tiercel.moe_align_block_size((first[0] % 64).view(1, -1), 16, 64)
    for seed in range(3):
        ids.copy_(ids_of(tokens, 64, 8, seed=seed + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(first, by_sorting(ids, 32, 64))
        assert_equal(second, by_sorting(first[0] % 64, 16, 64))


def test_the_very_first_calls_may_be_in_a_capture(run_python):
    run_python(
        """
import torch, tiercel, warnings
warnings.simplefilter("error", tiercel.FallbackWarning)
scores = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
many = torch.randint(64, (40_000, 8), device="cuda", dtype=torch.int32)
x = torch.randn(100, 8, 256, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    weights, ids, *blocks = tiercel.topk_softmax_align(scores, 8, 16)
    again = tiercel.moe_align_block_size(ids, 16, 64)
    large = tiercel.moe_align_block_size(many, 16, 64)
    out = tiercel.moe_sum(x, weights)
graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(a, b) for a, b in zip(blocks, again))
due = tiercel.moe_align_block_size(many, 16, 64, backend="ref")
assert all(torch.equal(a, b) for a, b in zip(large, due))
torch.testing.assert_close(out, tiercel.moe_sum(x, weights, backend="ref"))
"""
    )


def test_runs_on_the_current_stream():
    ids, fresh = torch.zeros_like(ids_of(500, 64, 8)), ids_of(500, 64, 8, seed=3)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the default stream would read zeros meanwhile
        ids.copy_(fresh)
        result = tiercel.moe_align_block_size(ids, 16, 64)
    stream.synchronize()
    assert_equal(result, by_sorting(fresh, 16, 64))


def test_opcheck():
    ids = ids_of(6, 16, 4)
    torch.library.opcheck(torch.ops.tiercel.moe_align_block_size.default, (ids, 8, 16))
    scores = torch.randn(6, 16, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.tiercel.topk_softmax_align.default, (scores, 3, 8))
    x = torch.randn(3, 4, 8, device="cuda", requires_grad=True)
    weights = torch.rand(3, 4, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.tiercel.moe_sum.default, (x, weights))


# topk_softmax_align


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choosing_and_sorting(dtype):
    for tokens, experts, k, block_size in [
        (0, 16, 4, 16),
        (1, 64, 8, 16),
        (16, 60, 6, 48),
        (17, 128, 1, 16),
        (33, 256, 8, 64),
        (128, 512, 16, 128),
        (127, 100, 9, 32),
        (300, 64, 8, 16),
    ]:
        scores = torch.randn(tokens, experts, device="cuda").to(dtype)
        options = {"renormalize": tokens % 2 == 0, "indices_dtype": torch.int64}
        weights, ids, *blocks = tiercel.topk_softmax_align(scores, k, block_size, **options)
        assert ids.dtype == torch.int64
        assert_right((weights, ids), scores, k, True, options["renormalize"])
        assert_equal(blocks, tiercel.moe_align_block_size(ids, block_size, experts, backend="ref"))


def test_every_number_of_experts_is_chosen_and_sorted():
    for experts, tokens in itertools.product(range(1, 513, 3), (1, 40, 128)):
        scores = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
        k = min(8, experts)
        weights, ids, *blocks = tiercel.topk_softmax_align(scores, k, 16)
        assert_right((weights, ids), scores, k)
        assert_equal(blocks, by_sorting(ids, 16, experts))


@pytest.mark.parametrize("experts", [64, 128, 256, 512])
def test_scores_that_differ_in_their_last_bits_only(experts):
    """float32 scores are compared without those first."""
    close = torch.arange(experts, device="cuda", dtype=torch.int32).repeat(100, 1)
    order = torch.rand(100, experts, device="cuda").argsort(dim=1)
    scores = (close.gather(1, order) + 0x3F800000).view(torch.float32)
    scores[::2] = torch.randn(50, experts, device="cuda")  # beside rows that differ by more
    scores[1::4, ::7] = torch.randn(25, len(range(0, experts, 7)), device="cuda")
    for k in (1, 8, 16):
        weights, ids, *blocks = tiercel.topk_softmax_align(scores, k, 16)
        assert_right((weights, ids), scores, k)
        assert_equal(blocks, by_sorting(ids, 16, experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_scores_are_chosen_and_sorted(dtype):
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([nan, inf, -inf, 0.0, -0.0], device="cuda")
    for experts in (64, 512):
        scores = torch.randn(120, experts, device="cuda")
        chosen = special[torch.randint(5, scores.shape, device="cuda")]
        often = torch.arange(120, device="cuda")[:, None] / 120
        scores = torch.where(torch.rand_like(scores) < often, chosen, scores).to(dtype)
        got = tiercel.topk_softmax_align(scores, 8, 16)
        expected = tiercel.topk_softmax_align(scores, 8, 16, backend="ref")
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-7, equal_nan=True)
        assert all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))


@pytest.mark.sanitize
def test_choosing_and_sorting_with_a_map():
    here = every_second(64, "cuda")
    for tokens, ignore in itertools.product((5, 100, 200), (False, True)):
        scores = torch.randn(tokens, 64, device="cuda")
        options = {"ignore_invalid_experts": ignore, "pad_sorted_ids": True}
        _, ids, *blocks = tiercel.topk_softmax_align(scores, 4, 16, here, **options)
        assert_equal(blocks, by_definition(ids, 16, 64, here, True, ignore))


def test_choosing_and_sorting_in_a_graph():
    scores = torch.randn(64, 128, device="cuda")
    tiercel.topk_softmax_align(scores, 8, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids, *blocks = tiercel.topk_softmax_align(scores, 8, 16)
    for _ in range(3):
        scores.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right((weights, ids), scores, 8)
        assert_equal(blocks, by_sorting(ids, 16, 128))


# moe_sum


def assert_summed(out, x, weights=None):
    wide = x.double() if weights is None else x.double() * weights.double()[:, :, None]
    due = wide.sum(1)
    # Rounded once: half a unit in the last place, and float32's sums of k terms before it.
    bound = due.abs() * torch.finfo(x.dtype).eps / 2 + wide.abs().sum(1) * 2.0**-22 + 1e-7
    assert out.shape == due.shape and out.dtype == x.dtype
    assert bool(((out.double() - due).abs() <= bound).all())


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(dtype, weighted):
    for k in (1, 2, 3, 4, 5, 6, 8, 9, 16):
        for tokens, columns in [(1, 8), (3, 65), (17, 1408), (64, 2048), (0, 8)]:
            x = torch.randn(tokens, k, columns, device="cuda").to(dtype)
            weights = torch.rand(tokens, k, device="cuda") if weighted else None
            assert_summed(tiercel.moe_sum(x, weights), x, weights)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_any_strides(dtype):
    base = torch.randn(40, 6, 520, device="cuda").to(dtype)
    views = {
        "part of the columns": base[:, :, :512],
        "an odd column to start at": base[:, :, 3:99],
        "every second column": base[:, :, ::2],
        "every second expert": base[:, ::2],
        "experts first": base.transpose(0, 1),
        "columns first": base.transpose(1, 2),
        "expanded": base[:1].expand(30, 6, 520),
    }
    for name, x in views.items():
        weights = torch.rand(x.shape[:2], device="cuda")
        assert torch.equal(tiercel.moe_sum(x), tiercel.moe_sum(x.contiguous())), name
        assert_summed(tiercel.moe_sum(x, weights), x, weights)


def test_sums_of_no_experts_are_zero():
    assert tiercel.moe_sum(torch.empty(3, 0, 64, device="cuda")).eq(0).all()


def test_special_values_of_sums():
    x = torch.tensor([[[torch.inf, torch.nan, 1e30, 3e38]], [[-torch.inf, 1.0, -1e30, 3e38]]])
    x = x.transpose(0, 1).contiguous().cuda()
    due = torch.tensor([[torch.nan, torch.nan, 0.0, torch.inf]])
    torch.testing.assert_close(tiercel.moe_sum(x).cpu(), due, equal_nan=True)


@pytest.mark.slow
def test_sums_of_more_than_2_to_31_elements():
    x = torch.empty(2**17 + 3, 8, 2048, dtype=torch.bfloat16, device="cuda").normal_()
    out = tiercel.moe_sum(x)
    for start in (0, 2**17 - 100):
        assert_summed(out[start : start + 103], x[start : start + 103])


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_sums(weighted):
    x = torch.randn(30, 4, 64, device="cuda", requires_grad=True)
    weights = torch.rand(30, 4, device="cuda", requires_grad=True)
    given = (x, weights) if weighted else (x,)
    pull = torch.randn(30, 64, device="cuda")
    results = [
        torch.autograd.grad((function(*given) * pull).sum(), given)
        for function in (tiercel.moe_sum, tiercel.ref.moe_sum)
    ]
    torch.testing.assert_close(*results)
