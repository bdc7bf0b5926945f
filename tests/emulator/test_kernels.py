# SPDX-License-Identifier: Apache-2.0
"""Every CUDA C++ family's kernels, run by the emulator, against the reference in float64.

The shapes are small, and chosen to reach each kernel that a family's plan can choose.
"""

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.near import BF16, F16, F32, FLOATS, RELATIVE, ROWS, check, normal, reference

from tiercel import ref
from tiercel.core.dispatch import variants as families
from tiercel.ops.routing.align import align_for_products

FP8, INF, NAN = torch.float8_e4m3fn, float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROWS)
def test_softmax(shape, dtype):
    x, grad = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    keep = torch.rand(shape) < 0.8
    keep[:, 0] = True
    size = x.double().abs().max() + 12  # of a logarithm's terms
    check("softmax_online", x, -1, 1.5, None, None)
    check("softmax_online", x, -1, None, keep, None)
    check("softmax_online", x, -1, 0.37, grad, None)
    check("log_softmax", x, -1, None, None, None, scale=size)
    y = sm90("softmax_online")(x, -1, None, None, None)
    for options_ in ((-1, None, None), (-1, 0.37, keep)):
        arguments = ("softmax_online_backward", grad, y, *options_, None)
        check(*arguments, scale=4 * y.double().abs())


@pytest.mark.parametrize(("multiprocessors", "share"), [(132, False), (60, True), (132, True)])
def test_softmax_of_a_cluster_of_16(multiprocessors, share):
    """Rows of 131072 take one where they are not few; on a share of a GPU one of 8, also where the
    device does not show that it is one."""
    x = normal(9, 131_072, dtype=BF16)
    with options(multiprocessors=multiprocessors, share=share):
        check("softmax_online", x, -1, 1.5, None, None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [8, 5000, 300_000])
def test_softmax_of_special_values(columns, dtype):
    x = normal(7, columns, dtype=dtype)
    x[0, columns // 2], x[1, columns // 3], x[2] = NAN, INF, -INF
    x[3, columns // 2 :], x[4], x[5, 1:], x[6, -1] = -INF, 0, -100, 30_000
    for log, name in enumerate(("softmax_online", "log_softmax")):
        result = sm90(name)(x, -1, None, None, None).double()
        exact = torch.log_softmax(x.double(), -1) if log else torch.softmax(x.double(), -1)
        for same in (torch.isnan, torch.isneginf):
            assert torch.equal(same(result), same(exact))
        size = exact.abs() + 0.01 if log else exact
        allowed = RELATIVE[dtype] * size + torch.finfo(dtype).smallest_normal
        assert not ((result - exact).abs() > allowed).any()


@pytest.mark.parametrize("scale", [None, 1e-4, -3.0])
@pytest.mark.parametrize("columns", [8, 1000, 5003, 20_000])
def test_softmax_of_huge_scores(columns, scale):
    """Scores whose products with the scale are rounded by more than an exponential bears."""
    x = torch.full((8, columns), -100.0, dtype=torch.bfloat16)
    most = torch.finfo(x.dtype).max
    x[0], x[1], x[2], x[3, 3:] = -most, most, -most / 2, -most
    x[4], x[5], x[6, ::5], x[7] = -1e9, 1e10 + 1e9 * torch.rand(columns), 3e8, 1e6
    for name in ("softmax_online", "log_softmax"):
        result = sm90(name)(x, -1, scale, None, None).double()
        function = torch.softmax if name[0] == "s" else torch.log_softmax
        exact = function(x.double() * (scale or 1.0), -1).to(x.dtype).double()
        near = (result - exact).abs() <= 2**-7 * exact.abs() + 1e-7
        assert (near | (result == exact)).all()  # infinite where it is too much for the dtype


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize("columns", [64, 1000, 20_000])
def test_log_softmax_of_large_scores(columns, scale):
    """What is lost of them in an exponent's product shows in float16, where results are small."""
    arguments = (
        "log_softmax",
        (3e4 + 30 * torch.randn(3, columns)).half(),
        -1,
        scale,
        None,
        None,
    )
    check(*arguments, scale=reference(*arguments).abs() + 0.01)  # 5e-6 more, for float32's sums


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean", "amax"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 33), 1), ((3, 4096), 1), ((1, 70000), 1), ((40, 24), 0), ((3000, 9), 0), ((9, 7, 20), 1),
     ((201, 3), 1), ((200, 1001), 0), ((2, 90, 67), 1), ((123457,), None)],
)  # fmt: skip
def test_reduce(shape, dim, op, dtype):
    x = normal(*shape, dtype=dtype)
    size = x.double().abs().sum() if dim is None else x.double().abs().sum(dim)
    check("reduce", x, dim, op, False, None, None, scale=None if op == "amax" else size)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "amax"])
@pytest.mark.parametrize("shape", [(34001, 24), (34001, 32), (300, 40), (301, 64), (301, 100)])
def test_reduce_short_rows(shape, op, dtype):
    """So many that lanes exchange rows, and the last warp has some of them only."""
    x = normal(*shape, dtype=dtype)
    size = x.double().abs().sum(1)
    check("reduce", x, 1, op, False, None, None, scale=None if op == "amax" else size)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 1500])
@pytest.mark.parametrize("columns", [7, 10, 50])
def test_reduce_packed_rows_at_any_alignment(rows, columns, dtype):
    for offset in (0, 1, 2, 7):
        x = normal(rows * columns + offset, dtype=dtype)[offset:].view(rows, columns)
        check("reduce", x, 1, "sum", False, None, None, scale=x.double().abs().sum(1))


def test_sums_down_long_columns_are_as_good_as_torchs():
    x = normal(4096, 4096)
    exact = x.double().sum(0)
    ours, theirs = sm90("reduce")(x, 0, "sum", False, None, None), x.sum(0)
    assert (ours - exact).square().mean() < 0.85 * (theirs - exact).square().mean()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [8, 1001, 2048])
def test_activation(columns, dtype):
    x, up = normal(3, columns, dtype=dtype), normal(3, columns, dtype=dtype)
    grad = normal(3, columns, dtype=dtype)
    size = (x.double().abs() + 1) * (up.double().abs() + 1) * (grad.double().abs() + 1)
    for name, options_ in (("silu", ()), ("relu", ()), ("gelu", ("none",)), ("gelu", ("tanh",))):
        check(name, x, *options_, None, None, scale=x.double().abs() + 0.01)
        check(f"{name}_and_mul", x, up, *options_, None, None, scale=size)
        both = torch.cat([x, up], 1)
        check(f"{name}_and_mul", both, None, *options_, None, None, scale=size)
        check(f"{name}_backward", grad, x, *options_, None, scale=2 * size)
        for inputs in ((x, up), (both, None)):
            backward = f"{name}_and_mul_backward", grad, *inputs, *options_, None
            of_both = torch.cat([size, size], 1) if inputs[1] is None else size
            check(*backward, scale=2 * of_both.max())
            again = sm90(f"{name}_and_mul_backward_and_result")(*backward[1:])
            assert all(map(torch.equal, again[:2], sm90(backward[0])(*backward[1:])))
            forward = sm90(f"{name}_and_mul")(*inputs, *options_, None, None)
            assert torch.equal(again[2], forward)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8, torch.int16, torch.bool])
@pytest.mark.parametrize(
    "shape", [(64, 64), (70, 133), (3, 257), (1, 5), (2500, 2501), (2504, 1304)]
)
def test_copy_transpose(shape, dtype):
    x = (torch.randn(shape) * 50).to(dtype)
    for tile in (0, 32, 64, 128) if x.numel() < 10_000 else (0,):
        assert torch.equal(sm90("copy_transpose")(x, tile, None), x.T)


@pytest.mark.parametrize(
    "shape", [(42, 196, 386), (300, 100, 107), (20, 768, 211), (310, 101, 104), (300, 104, 107)]
)
def test_copy_transpose_of_many_short_columns(shape):
    """Columns that begin on 2 to 16 bytes, where rows or columns do not begin on 16."""
    x = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    assert torch.equal(sm90("copy_transpose")(x, 0, None), x.transpose(-2, -1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("shape", [(3, 128), (130, 256), (2, 4096), (5, 136), (520, 264)])
@pytest.mark.parametrize("gap", [0, 16])
def test_fp8_quantize(shape, granularity, dtype, gap):
    """Rows side by side and apart; a whole tensor by one kernel and by two, which also take a given
    scale."""
    x = normal(shape[0], shape[1] + gap, dtype=dtype)[:, : shape[1]]
    x[0, 3], x[-1, -1] = 0, 300
    ref = {one.name: one.backends["ref"].run for one in families["fp8_quantize"]}
    exact, scale = ref["fp8_quantize"](x, granularity, None)
    q, got = sm90("fp8_quantize")(x, granularity, None)
    assert torch.equal(got, scale)
    assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))
    if granularity == "tensor":
        given = torch.tensor([[0.37]])
        q, exact = (
            run(x, given, None) for run in (sm90("fp8_quantize_static"), ref["fp8_quantize_static"])
        )
        assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(8453, 128), (8455, 256), (4300, 264), (2115, 1024)])
def test_fp8_quantize_of_many_short_rows(shape, dtype):
    """A warp takes each."""
    x = normal(*shape, dtype=dtype)
    exact, due = families["fp8_quantize"][0].backends["ref"].run(x, "row", None)
    q, scale = sm90("fp8_quantize")(x, "row", None)
    assert torch.equal(scale, due)
    assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("shape", [(300, 128), (5, 2048), (2, 40000)])
@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_fp8_quantize_clears_counters_for_the_next_launch(shape, granularity):
    x = normal(*shape, dtype=BF16)
    exact, due = families["fp8_quantize"][0].backends["ref"].run(x, granularity, None)
    q, scale = torch.empty_like(exact), torch.empty_like(due)
    counters = torch.full((6,), 7, dtype=torch.int32)
    index = ["tensor", "row", "1x128"].index(granularity)
    kernels.fp8_quantize_between(x, q, scale, counters[1:5], index, False, False)
    assert counters.tolist() == [7, 0, 0, 0, 0, 7]
    assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))
    with pytest.raises(ValueError, match="`counters` may be in use"):
        kernels.fp8_quantize_between(x, q, scale, counters[1:5], index, True, False)
    with pytest.raises(ValueError, match="`counters` must have shape"):
        kernels.fp8_quantize_between(x, q, scale, counters, index, False, False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
@pytest.mark.parametrize("shape", [(1, 8), (128, 128), (130, 264), (61, 1016), (300, 136)])
@pytest.mark.parametrize("gap", [0, 16])
def test_fp8_quantize_transpose(shape, granularity, dtype, gap):
    x = normal(shape[0], shape[1] + gap, dtype=dtype)[:, : shape[1]]
    x *= torch.logspace(-3, 3, shape[0])[:, None].to(dtype)
    x[0, 3], x[-1, -1], x[shape[0] // 2, 0] = 0, 300, torch.nan
    ref = families["fp8_quantize_transpose"][0].backends["ref"].run
    due = ref(x, granularity, None)
    for got, one in zip(sm90("fp8_quantize_transpose")(x, granularity, None), due, strict=True):
        assert got.shape == one.shape and got.is_contiguous()
        torch.testing.assert_close(got.float(), one.float(), rtol=0, atol=0, equal_nan=True)


def test_fp8_quantize_transpose_of_what_lies_anywhere():
    """It is copied first, so that the kernel runs."""
    flat = normal(1 + 40 * 264, dtype=BF16)
    ref = families["fp8_quantize_transpose"][0].backends["ref"].run
    for x in (
        flat[1:].view(40, 264),
        flat[:10560].view(264, 40).t(),
        flat[:10560].view(40, 264)[:, 4:20],
        flat[:264].expand(40, 264),
        flat[0].expand(40, 264),
    ):
        due = ref(x, "1x128", None)
        for got, one in zip(sm90("fp8_quantize_transpose")(x, "1x128", None), due, strict=True):
            torch.testing.assert_close(got.float(), one.float(), rtol=0, atol=0)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128"])
@pytest.mark.parametrize("columns", [128, 264])
def test_fp8_quantize_to_any_multiple_of_8_bytes(granularity, columns):
    """Where q cannot be written 16 bytes at once."""
    x = normal(130, columns, dtype=BF16)
    exact, due = families["fp8_quantize"][0].backends["ref"].run(x, granularity, None)
    q, scale = torch.zeros(x.numel() + 8).to(FP8)[8:].view(x.shape), torch.empty_like(due)
    sm90("fp8_quantize.out")(x, granularity, q, scale, None)
    assert torch.equal(scale, due)
    assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nvfp4(dtype):
    x = normal(5, 256, dtype=dtype) * 3
    x[1] = 0
    for factor in (None, torch.tensor([0.37])):
        run = families["nvfp4_quantize"][0].backends["ref"].run
        exact, scale = run(x, factor, None)
        q, got = sm90("nvfp4_quantize")(x, factor, None)
        assert torch.equal(got.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, dtype):
    q, k = normal(5, 4, 64, dtype=dtype), normal(5, 2, 64, dtype=dtype)
    positions, cache = torch.tensor([0, 3, 99, 7, 1]), normal(100, 32, dtype=dtype)
    check("rotary_embedding", positions, q, k, cache, interleaved, None, scale=16.0)
    # Blocks of many tokens.
    q, k, positions = (
        normal(100, 1, 2, dtype=dtype),
        normal(100, 0, 2, dtype=dtype),
        torch.arange(100),
    )
    check("rotary_embedding", positions, q, k, cache[:, :2].contiguous(), interleaved, None)


def test_rotary_embedding_of_few_vectors_that_turn():
    """Many tokens, odd heads: neighbours exchange what their pairs need."""
    positions, cache = torch.randint(0, 50, (2040,)), normal(50, 16, dtype=BF16)
    q, k = normal(2040, 131, 32, dtype=BF16), normal(2040, 2, 32, dtype=BF16)
    check("rotary_embedding", positions, q, k, cache, False, None, scale=16.0)


@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_kv_cache_write(dtype, cache_dtype):
    key, value = normal(4, 2, 64, dtype=dtype), normal(4, 2, 64, dtype=dtype)
    slots = torch.tensor([5, -1, 17, 0])
    caches = [torch.zeros(3, 8, 2, 64).to(cache_dtype or dtype) for _ in range(4)]
    scales = (torch.tensor([0.5]), torch.tensor([2.0])) if cache_dtype else (None, None)
    sm90("kv_cache_write")(key, value, caches[0], caches[1], slots, *scales, None)
    run = families["kv_cache_write"][0].backends["ref"].run
    run(key, value, caches[2], caches[3], slots, *scales, None)
    for got, exact in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_kv_cache_write_divides_as_the_reference_does(dtype):
    patterns = torch.randperm(65536).to(torch.int32).to(torch.int16)
    key = patterns.view(dtype).view(64, 8, 128)
    slots = torch.arange(64)
    below_two = 2 - 2**-23
    scales = torch.tensor([0.37, 1.0, below_two, 3e-4, 1e-30, 1e30, 2.0**-60, -1.5])
    caches = [torch.zeros(8, 8, 8, 128).to(FP8) for _ in range(4)]
    sm90("kv_cache_write")(key, key, *caches[:2], slots, scales, scales.flip(0), None)
    run = families["kv_cache_write"][0].backends["ref"].run
    run(key, key, *caches[2:], slots, scales, scales.flip(0), None)
    for got, exact in zip(caches[:2], caches[2:], strict=True):
        number = ~exact.float().isnan()
        assert torch.equal(got.float().isnan(), ~number)
        assert torch.equal(got.view(torch.uint8)[number], exact.view(torch.uint8)[number])


def fused(tokens, heads, kv_heads, size, dtype, kind=None, cache_kind=None, strided=False):
    """The tensors of qk_norm_rope_cache; `kind`: of q_out."""
    packed = normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    if not strided:
        q, k, v = (x.contiguous() for x in (q, k, v))
    blocks = tokens // 8 + 1
    caches = [torch.zeros(blocks, 16, kv_heads, size).to(cache_kind or dtype) for _ in range(2)]
    slots = torch.randperm(blocks * 16)[:tokens].masked_fill(torch.rand(tokens) < 0.1, -1)
    positions = torch.randint(50, (tokens,))
    q_out = torch.zeros(tokens, heads, size).to(kind or dtype)
    return q, k, v, q_out, *caches, slots, positions


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [None, FP8])
@pytest.mark.parametrize("cache_kind", [None, FP8])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "rotated"),
    [
        (3, 4, 2, 128, 128),
        (5, 3, 1, 64, 32),
        (2, 1, 2, 80, 16),
        (2, 2, 1, 512, 0),
        (9, 1, 1, 16, 16),
    ],
)
def test_qk_norm_rope_cache(
    tokens, heads, kv_heads, size, rotated, cache_kind, kind, interleaved, dtype
):
    tensors = fused(tokens, heads, kv_heads, size, dtype, kind, cache_kind, kind is None)
    angles = normal(50, rotated, dtype=dtype if size == 64 else F32)
    weights = (torch.rand(size) + 0.5, normal(size, dtype=dtype))
    if tokens == 5:
        weights = (None, weights[1])
    scales = [
        None if each is None else torch.rand(count) + 0.5
        for each, count in ((kind, heads), (cache_kind, 1), (cache_kind, kv_heads))
    ]
    options = (angles, *weights, 1e-5, interleaved, *scales, None, False, None)
    run = families["qk_norm_rope_cache"][0].backends["ref"].run
    wide = [t.double() for t in tensors[:6]]
    exact = [t.double() if isinstance(t, torch.Tensor) else t for t in options]
    run(*wide, *tensors[6:], *exact)
    sm90("qk_norm_rope_cache")(*tensors, *options)
    slots = tensors[6]
    for got, due, scale in zip(tensors[3:6], wide[3:], scales, strict=True):
        narrow = got.dtype == FP8
        if narrow and scale is not None:
            due = due / scale.double().view(-1, 1)
        half_unit = 2.0**-4 if narrow else torch.finfo(got.dtype).eps / 2
        error = (got.double() - due).abs()
        assert (error <= 1.02 * half_unit * due.abs() + (2.0**-10 if narrow else 2e-6)).all()
    assert (tensors[4].flatten(0, 1)[slots[slots >= 0]].float() != 0).any() or (slots < 0).all()


def test_qk_norm_rope_cache_of_many_tokens_in_place():
    """Rows that no block fills. Two heads a thread need so many tokens that GPU tests have them."""
    with options(multiprocessors=1):
        tensors = list(fused(70, 130, 2, 128, BF16))
        due = [t.clone() for t in tensors]
        tensors[3] = tensors[0]
        angles = normal(50, 128, dtype=F32)
        rest = (angles, torch.rand(128), torch.rand(128), 1e-6, False, *[None] * 4, False, None)
        families["qk_norm_rope_cache"][0].backends["ref"].run(*due, *rest)
        sm90("qk_norm_rope_cache")(*tensors, *rest)
        for got, exact in zip(tensors[3:6], due[3:6], strict=True):
            torch.testing.assert_close(got.float(), exact.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "k"), [((5, 64), 6), ((3, 128), 8), ((2, 256), 8), ((3, 7), 2), ((2, 512), 10)]
)
def test_topk_softmax(shape, k, dtype):
    scores = normal(*shape, dtype=dtype)
    scores[0, 3] = scores[0, 5]  # a tie
    for softmax_first in (True, False):
        arguments = (scores, k, softmax_first, True, torch.int32, None)
        check("topk_softmax", *arguments)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (33, 8), (300, 64), (700, 200)])
def test_moe_align_block_size(tokens, experts):
    ids = torch.randint(-1, experts + 1, (tokens, 4), dtype=torch.int32)
    check("moe_align_block_size", ids, 16, experts, None, False, False, None)


@pytest.mark.parametrize("tokens", [33, 300, 7000])  # a block, a cluster, two launches
def test_counters_behind_the_number_of_slots(tokens):
    ids = torch.randint(-1, 9, (tokens, 4), dtype=torch.int32)
    got = align_for_products(ids, 128, 8, None)
    due = ref.moe_align_block_size(ids, 128, 8)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], due[:2], strict=True))
    assert got[2].tolist() == [due[2].item(), 0, 0, *[0] * due[1].numel()]


@pytest.mark.parametrize("tokens", [1, 9])
def test_topk_softmax_align(tokens):
    scores = normal(tokens, 64, dtype=BF16)
    check("topk_softmax_align", scores, 6, 16, None, True, True, torch.int32, False, False, None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 2, 256), (2, 8, 1000), (2, 5, 33)])
def test_moe_sum(shape, dtype):
    x = normal(*shape, dtype=dtype)
    weights = torch.rand(shape[:2])
    check("moe_sum", x, None, None, scale=x.double().abs().sum(1))
    check("moe_sum", x, weights, None, scale=x.double().abs().sum(1))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_order_of_warps(seed):
    """Kernels that synchronise blocks and clusters, with warps in an order of the seed's."""
    with options(seed=seed):
        check("softmax_online", normal(1, 40001), -1, None, None, None)
        check("reduce", normal(1, 70000), 1, "sum", False, None, None, scale=70000.0)
        check("rms_norm", normal(1, 20000), None, None, 1e-5, None, scale=8.0)
        ids = torch.randint(0, 64, (300, 4), dtype=torch.int32)
        check("moe_align_block_size", ids, 16, 64, None, False, False, None)
