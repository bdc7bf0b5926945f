# SPDX-License-Identifier: Apache-2.0
"""topk_softmax on an H100 or H200, against float64: every size, every kind of input."""

import math

import pytest
import torch
from support.truth import TOLERANCE, assert_right
from support.truth import topk_softmax as truth

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

OPTIONS = [(first, renormalize) for first in (True, False) for renormalize in (True, False)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


@pytest.fixture
def rand():
    generator = torch.Generator("cuda").manual_seed(5)

    def make(*shape, dtype=torch.float32, scale=3.0):
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

    return make


def run(scores, k, softmax_first=True, renormalize=False, **kwargs):
    return tiercel.topk_softmax(
        scores, k, softmax_first=softmax_first, renormalize=renormalize, **kwargs
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 300, 5000])  # one for each way that rows share a block
def test_every_number_of_experts_and_every_k(rand, dtype, rows):
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for experts in range(1, 513):
        scores = rand(rows, experts, dtype=dtype)
        most = min(16, experts)
        true_weights, true_indices = truth(scores, most)
        for k in range(1, most + 1):
            weights, indices = run(scores, k)
            wrong += (indices != true_indices[:, :k]).sum()
            close = torch.isclose(weights.double(), true_weights[:, :k], **TOLERANCE)
            wrong += (~close).sum()
        if experts % 64 == 0:
            assert wrong.item() == 0, experts
    assert wrong.item() == 0


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indices_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_options(rand, dtype, indices_dtype, softmax_first, renormalize):
    for rows, experts, k in [(1, 8, 2), (33, 64, 8), (257, 128, 8), (3000, 256, 6), (9000, 7, 7)]:
        scores = rand(rows, experts, dtype=dtype)
        result = run(scores, k, softmax_first, renormalize, indices_dtype=indices_dtype)
        assert result[0].dtype == torch.float32 and result[1].dtype == indices_dtype
        assert_right(result, scores, k, softmax_first, renormalize)


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 31, 32, 33, 131, 132, 133, 263, 264, 265, 2049, 8191])
def test_ragged_rows(rand, rows):
    for experts, k in [(1, 1), (60, 4), (128, 8), (511, 16)]:
        scores = rand(rows, experts, dtype=torch.bfloat16)
        assert_right(run(scores, k), scores, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [40, 4000])
def test_ties_take_the_lowest_index(rand, dtype, rows):
    for experts in (8, 100, 512):
        scores = rand(rows, experts, scale=1.0).round().to(dtype)  # many equal, both zeros
        assert_right(run(scores, min(16, experts)), scores, min(16, experts))
    same = torch.zeros(rows, 64, dtype=dtype, device="cuda")
    assert run(same, 16)[1].tolist() == [list(range(16))] * rows


SPECIAL = [
    [-0.0, 0.0, -0.0, 0.0],
    [-INF, 1.0, -INF, 0.0],
    [-INF, -INF, -INF, -INF],
    [INF, 1.0, 2.0, 3.0],
    [INF, -INF, INF, 0.0],
    [NAN, 1.0, 2.0, 3.0],
    [1.0, NAN, INF, NAN],
    [NAN, NAN, NAN, NAN],
    [-NAN, NAN, 5.0, -NAN],
    [1e4, -1e4, 0.0, 88.0],
]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 500])
@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_special_values(dtype, copies, softmax_first, renormalize):
    for width in (4, 40):
        rows = [row + [-2.0] * (width - 4) for row in SPECIAL] * copies
        scores = torch.tensor(rows, dtype=dtype, device="cuda")
        for k in (1, 2, 4):
            weights, indices = run(scores, k, softmax_first, renormalize)
            expected = run(scores, k, softmax_first, renormalize, backend="ref")
            assert torch.equal(indices, expected[1])
            torch.testing.assert_close(weights, expected[0], **TOLERANCE, equal_nan=True)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_and_small_values(dtype):
    top = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    scores = torch.tensor(
        [[top, -top, 0.0, top], [tiny, -tiny, tiny / 2, 0.0], [-top, -top, -top, -top / 2]],
        dtype=dtype,
        device="cuda",
    )
    for k in (1, 4):
        assert_right(run(scores, k), scores, k)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(rand, dtype):
    base = rand(600, 640, dtype=dtype)
    views = {
        "rows of a wider tensor": base[:, :128],
        "an odd column to start at": base[:, 3:131],
        "every second row": base[::2, :64],
        "every second column": base[:, ::2],
        "columns first": base[:128].t(),
        "one row, expanded": base[:1, :256].expand(50, 256),
        "one column, expanded": base[:, :1].expand(600, 40),
        "one row of a column": base[:, 7:8].t()[:, :300],
    }
    for name, scores in views.items():
        scores = scores[:, :512]
        k = min(8, scores.shape[1])
        weights, indices = run(scores, k)
        expected = run(scores.contiguous(), k)
        assert torch.equal(indices, expected[1]), name
        assert torch.equal(weights, expected[0]), name
        assert_right((weights, indices), scores, k)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(rand, dtype, offset):
    flat = rand(20 * 128 + 16, dtype=dtype)
    scores = flat[offset : offset + 20 * 128].view(20, 128)
    assert_right(run(scores, 8), scores, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "k"), [(512, 2), (8, 1)], ids=["rows of 512", "more than 2^28 rows"]
)
def test_more_than_2_to_31_elements(experts, k):
    rows = (1 << 31) // experts + 77
    scores = torch.empty(rows, experts, dtype=torch.bfloat16, device="cuda").normal_()
    weights, indices = run(scores, k)
    step = (1 << 27) // experts
    starts = [0, rows // 2, (1 << 30) // experts - 5, (1 << 31) // experts - step // 2]
    for start in [*starts, rows - step]:
        part = slice(start, start + step)
        assert_right((weights[part], indices[part]), scores[part], k)


@pytest.mark.sanitize
def test_out(rand):
    for dtype in (torch.int32, torch.int64):
        scores = rand(70, 64, dtype=torch.bfloat16)
        out = torch.empty(70, 8, device="cuda"), torch.empty(70, 8, dtype=dtype, device="cuda")
        version = out[0]._version
        result = run(scores, 8, out=out)
        assert result[0] is out[0] and result[1] is out[1] and out[0]._version > version
        assert_right(out, scores, 8)


@pytest.mark.sanitize
def test_writes_only_its_outputs(rand):
    scores = rand(33, 100)
    before = scores.clone()
    weights = torch.full((35, 4), 7.0, device="cuda")
    indices = torch.full((35, 4), 7, dtype=torch.int32, device="cuda")
    run(scores, 4, out=(weights[1:-1], indices[1:-1]))
    assert torch.equal(scores, before)
    for tensor in (weights, indices):
        assert (tensor[0] == 7).all() and (tensor[-1] == 7).all()


def test_too_large_for_the_kernels_falls_back(rand):
    for experts, k in [(1025, 4), (64, 33)]:
        scores = rand(10, experts)
        with pytest.raises(NotImplementedError, match="supported"):
            run(scores, k, backend="sm90")
        with pytest.warns(tiercel.FallbackWarning, match="supported"):
            assert_right(run(scores, k), scores, k)


def test_mixed_devices(rand):
    scores = rand(4, 8)
    indices = torch.empty(4, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="`weights` must be on the device of `scores`"):
        run(scores, 2, out=(torch.empty(4, 2), indices))
    with pytest.raises(ValueError, match="a CPU tensor"):
        run(scores.cpu(), 2, out=(torch.empty(4, 2), indices), backend="ref")


def test_bad_arguments_on_the_fast_path(rand):
    scores = rand(4, 8)
    run(scores, 2)  # from here on the device counts as ready
    with pytest.raises(ValueError, match="got k = 9 for 8 experts"):
        run(scores, 9)
    with pytest.raises(ValueError, match="must have 2 dimensions, got 1"):
        run(scores[0], 2)
    with pytest.raises(TypeError, match="got int64"):
        run(scores.long(), 2)
    with pytest.raises(TypeError, match="`indices_dtype` must have dtype int32 or int64"):
        run(scores, 2, indices_dtype=torch.int16)


def test_explain(rand):
    told = tiercel.explain(tiercel.topk_softmax, rand(300, 128, dtype=torch.bfloat16), 8)
    assert told.backend == "sm90" and told.configuration["vector_bytes"] == 16
    assert "the precompiled kernel applies" in str(told)


@pytest.mark.sanitize
@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_gradients(rand, softmax_first, renormalize):
    scores = rand(50, 64).requires_grad_()
    pull = rand(50, 8)
    grads = []
    for backend in ("sm90", "ref"):
        weights, _ = run(scores, 8, softmax_first, renormalize, backend=backend)
        grads.append(torch.autograd.grad((weights * pull).sum(), scores)[0])
    expected, _ = tiercel.ref.topk_softmax(
        scores, 8, softmax_first=softmax_first, renormalize=renormalize
    )
    grads.append(torch.autograd.grad((expected * pull).sum(), scores)[0])
    for grad in grads[:2]:
        torch.testing.assert_close(grad, grads[2], rtol=1e-4, atol=1e-6)


def test_opcheck(rand):
    scores = rand(6, 16, dtype=torch.bfloat16).requires_grad_()
    torch.library.opcheck(torch.ops.tiercel.topk_softmax.default, (scores, 3))
    out = torch.empty(6, 3, device="cuda"), torch.empty(6, 3, dtype=torch.int32, device="cuda")
    outs = dict(zip(("weights", "indices"), out, strict=True))
    torch.library.opcheck(torch.ops.tiercel.topk_softmax.out, (scores.detach(), 3), outs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(rand, backend):
    def model(scores):
        weights, indices = tiercel.topk_softmax(scores * 2, 4, renormalize=True)
        return weights + 1, indices

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (8, 9):
        scores = rand(rows, 32).requires_grad_()
        got, expected = compiled(scores), model(scores)
        torch.testing.assert_close(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        gradients = [torch.autograd.grad(w.square().sum(), scores)[0] for w, _ in (got, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_host_time_is_at_most_topks(rand):
    import time

    scores = rand(32, 64, dtype=torch.bfloat16)

    def host_time(call):
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):  # fewer than fit the launch queue
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed / 200 * 1e6

    pairs = [
        (
            host_time(lambda: tiercel.topk_softmax(scores, 8)),
            host_time(lambda: torch.topk(scores, 8)),
        )
        for _ in range(15)
    ]
    ours, theirs = (sorted(times)[len(times) // 2] for times in zip(*pairs, strict=True))
    print(f"host time: topk_softmax {ours:.1f} us, torch.topk {theirs:.1f} us")
    assert ours <= theirs


def test_negated_views(rand):
    scores = torch.complex(rand(64, 128), rand(64, 128))
    view = scores.conj().imag  # its memory holds the opposite
    expected = run(-scores.imag, 8)
    weights, indices = run(view, 8)
    assert torch.equal(indices, expected[1]) and torch.equal(weights, expected[0])
    weights, indices = torch.empty_like(weights), torch.empty_like(indices)
    run(view, 8, out=(weights, indices))
    assert torch.equal(indices, expected[1]) and torch.equal(weights, expected[0])
