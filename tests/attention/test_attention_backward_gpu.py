# SPDX-License-Identifier: Apache-2.0
"""attention's gradients on an H100 or H200, against float64: every kernel, ragged sizes, masks."""

import pytest
import torch
from support.gpu_memory import skip_without

import tiercel
from tiercel.ops.attention.reference import attention_backward as reference

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(batch, seq_q, seq_k, heads, kv_heads, d, dtype=torch.bfloat16):
        d, d_v = d if isinstance(d, tuple) else (d, d)

        def rand(length, count, columns):
            shape = (batch, length, count, columns)
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        q, k, v = rand(seq_q, heads, d), rand(seq_k, kv_heads, d), rand(seq_k, kv_heads, d_v)
        return q, k, v, rand(seq_q, heads, d_v)

    return draw


def gradients(q, k, v, grad, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(tiercel.attention(*leaves, **options), leaves, grad)


def truths(q, k, v, grad, grad_lse, **options):
    """dq, dk and dv in float64, of a few heads of keys at a time: all scores would be gigabytes."""
    share = q.shape[2] // k.shape[2]
    scores = q.shape[0] * share * q.shape[1] * k.shape[1]
    at_once = max(2**23 // max(scores, 1), 1)
    parts = []
    for first in range(0, k.shape[2], at_once):
        of_k = slice(first, first + at_once)
        of_q = slice(first * share, (first + at_once) * share)
        doubles = [grad[:, :, of_q].double(), q[:, :, of_q].double()]
        doubles += [x[:, :, of_k].double() for x in (k, v)]
        out, lse = tiercel.ref.attention(*doubles[1:], return_lse=True, **options)
        more = {"grad_lse": None if grad_lse is None else grad_lse[:, of_q]}
        parts.append(reference(*doubles, out, lse, **more, **options))
    return [torch.cat(part, 2) for part in zip(*parts, strict=True)]


def assert_right(found, q, k, v, grad, grad_lse=None, **options):
    """p, ds and results are rounded once each, by half a unit; delta is of the rounded result. An
    error of a sum goes with the sum's size, which is what the norms compare. Scores of queries that
    see one key have no gradient: what is left of two equal terms is their rounding, of values of
    about 1."""
    expected = truths(q, k, v, grad, grad_lse, **options)
    unit = torch.finfo(q.dtype).eps / 2
    for name, one, truth in zip("qkv", found, expected, strict=True):
        assert one.dtype == q.dtype and one.isfinite().all(), name
        error, terms = (one.double() - truth).norm(), q.numel() ** 0.5
        if truth.norm() <= 0.02 * terms:
            assert error <= 4 * unit * terms, (name, (error / terms / unit).item())
            continue
        assert error <= 4 * unit * truth.norm(), (name, (error / truth.norm() / unit).item())
        # A row's own: what is far off in one place does not show in the norm of all.
        rows = (one.double() - truth).norm(dim=-1)
        size = truth.norm(dim=-1)
        mean = size.sum() / (size > 0).sum()
        assert (rows <= 16 * unit * (size + mean)).all(), name


def check(tensors, **options):
    assert_right(gradients(*tensors, **options), *tensors, **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_small(make, dtype, d, causal):
    for sizes in [(1, 1, 1, 1, 1), (2, 130, 130, 2, 1), (1, 200, 300, 3, 3), (2, 65, 20, 4, 2)]:
        check(make(*sizes, d, dtype), causal=causal)


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}])
def test_small_with_fewer_columns_of_values(make, options):
    for sizes in [(1, 1, 1, 1, 1), (2, 130, 130, 2, 1), (1, 200, 300, 3, 3), (2, 65, 20, 4, 2)]:
        check(make(*sizes, (192, 128)), **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (100, 30)}, {"causal": True, "softcap": 5.0}]
)
def test_small_with_wide_heads(make, dtype, options):
    for sizes in [(1, 1, 1, 1, 1), (2, 130, 130, 2, 1), (3, 65, 20, 4, 2)]:
        check(make(*sizes, 256, dtype), **options)
    check(make(2, 70, 200, 2, 2, (200, 72), dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 40)}])
def test_ragged_with_wide_heads(make, dtype, options):
    for seq_q in (1, 63, 64, 65, 511, 1000):
        for seq_k in (1, 64, 65, 300, 1024):
            check(make(2, seq_q, seq_k, 4, 2, 256, dtype), **options)


WIDE = [(192, 128), (136, 128), (192, 8), (256, 256), (136, 136), (64, 200), (256, 64), (200, 128)]


@pytest.mark.parametrize("d", [*WIDE, (96, 128), (128, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_another_head_dimension(make, d, causal):
    for seq_q, seq_k in ((1, 300), (511, 129), (1000, 1024)):
        check(make(2, seq_q, seq_k, 4, 2, d), causal=causal)
    check(make(5, 700, 700, 8, 8, d), causal=causal)
    check(make(1, 2500, 2500, 6, 1, d), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 63, 64, 65, 127, 128, 129, 511, 1000])
@pytest.mark.parametrize("seq_k", [1, 8, 127, 128, 129, 256, 300, 1024])
def test_ragged(make, d, causal, seq_q, seq_k):
    check(make(2, seq_q, seq_k, 4, 2, d), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (6, 1), (32, 8)])
def test_heads_and_many_tiles(make, d, causal, heads):
    check(make(5, 700, 700, *heads, d), causal=causal)
    check(make(1, 2500, 2500, *heads, d, torch.float16), causal=causal)


WINDOWS = [(0, 0), (5, 0), (None, 7), (100, 30), (200, None), (1, 1), (None, None), (4096, 0)]


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", WINDOWS)
def test_window(make, d, window):
    for sizes in [(1, 130, 130, 2, 2), (2, 500, 130, 4, 2), (2, 777, 1300, 4, 2)]:
        check(make(*sizes, d), window=window)
        check(make(*sizes, d, torch.float16), window=window, causal=True)


@pytest.mark.parametrize("d", [64, 96, 128, (192, 128), 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 0)}])
def test_softcap(make, d, dtype, options):
    q, k, v, grad = make(2, 300, 700, 4, 2, d, dtype)
    check((q * 3, k, v, grad), softcap=2.5, **options)
    check((q, k, v, grad), softcap=50.0, scale=0.3, **options)


@pytest.mark.parametrize("d", [8, 32, 40, 72, 80, 104, 120])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dimensions(make, d, causal):
    check(make(2, 300, 300, 4, 2, d), causal=causal)
    check(make(1, 600, 700, 2, 2, d, torch.float16), causal=causal)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_that_see_no_key_and_keys_that_none_sees(make, d):
    q, k, v, grad = make(2, 300, 100, 2, 2, d)
    dq, dk, dv = gradients(q, k, v, grad, causal=True)
    assert (dq[:, :200] == 0).all()
    assert_right((dq, dk, dv), q, k, v, grad, causal=True)
    q, k, v, grad = make(2, 100, 300, 2, 2, d)
    dq, dk, dv = gradients(q, k, v, grad, window=(10, 0))
    assert (dk[:, :190] == 0).all() and (dv[:, :190] == 0).all()
    assert_right((dq, dk, dv), q, k, v, grad, window=(10, 0))


@pytest.mark.parametrize("d", [64, 256])
def test_nothing(make, d):
    for sizes in [(2, 5, 0, 2, 2), (2, 0, 5, 2, 2), (0, 7, 5, 2, 2)]:
        tensors = make(*sizes, d)
        for gradient, like in zip(gradients(*tensors), tensors[:3], strict=True):
            assert gradient.shape == like.shape and (gradient == 0).all()


@pytest.mark.parametrize("d", [64, 128, (192, 128), 256])
def test_both_outputs(make, d):
    q, k, v, grad = make(2, 300, 400, 4, 2, d)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tiercel.attention(*leaves, causal=True, return_lse=True)
    grad_lse = torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], leaves, [grad, grad_lse])
    plain = [x.detach() for x in (q, k, v)]
    assert_right(found, *plain, grad, grad_lse=grad_lse, causal=True)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_strides(make, d):
    q, k, v, grad = make(2, 300, 300, 4, 4, d)
    expected = gradients(q, k, v, grad)
    packed = torch.stack([q, k, v], dim=2).requires_grad_()  # [B, S, 3, H, D]
    out = tiercel.attention(*packed.unbind(2))
    (found,) = torch.autograd.grad(out, packed, grad)
    for one, other in zip(found.unbind(2), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    heads_first = grad.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(gradients(q, k, v, heads_first), q, k, v, grad)
    rows_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    assert_right(gradients(*rows_first, v, grad), q, k, v, grad)
    ones = torch.ones(1, device="cuda", dtype=q.dtype).expand(q.shape)
    assert_right(gradients(q, k, v, ones), q, k, v, ones)


@pytest.mark.parametrize("d", [64, 256])
def test_strides_of_more_than_2_to_31_elements(make, d):
    """The tensors share a buffer; their two entries are 2**31 elements apart."""
    skip_without(6)
    tensors = make(2, 200, 300, 4, 2, d)
    apart, sizes = 2**31, [x[0].numel() for x in tensors]
    buffer = torch.empty(apart + sum(sizes), dtype=tensors[0].dtype, device="cuda")
    views, first = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        views.append(buffer.as_strided(x.shape, (apart, *x.stride()[1:]), first).copy_(x))
        first += size
    assert_right(gradients(*views, causal=True), *tensors, causal=True)


@pytest.mark.parametrize("d", [128, 256])
def test_large_scores(make, d):
    q, k, v, grad = make(1, 300, 300, 2, 2, d)
    for gradient in gradients(q * 20, k * 20, v, grad, causal=True):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("d", [64, 128, (192, 128), 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 100)}])
def test_in_a_fixed_order_the_same_bits(make, d, options):
    for sizes in [(2, 1000, 1300, 8, 2), (1, 5000, 5000, 12, 12), (40, 300, 300, 8, 8)]:
        tensors = make(*sizes, d)
        torch.use_deterministic_algorithms(True)
        try:
            first = gradients(*tensors, **options)
            for _ in range(4):
                again = gradients(*tensors, **options)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        finally:
            torch.use_deterministic_algorithms(False)
        if sizes[1] < 5000:
            assert_right(first, *tensors, **options)
        anyhow = gradients(*tensors, **options)
        assert torch.equal(first[1], anyhow[1]) and torch.equal(first[2], anyhow[2])


def test_more_than_2_to_31_elements_of_workspace(make):
    """The workspace has 64 columns where q has 8."""
    skip_without(16)
    length = 132_000
    q, k, v, grad = make(2, length, 200, 128, 128, 8)
    dq, dk, dv = gradients(q, k, v, grad)
    last = (slice(1, 2), slice(length - 300, length), slice(127, 128))
    out, lse = tiercel.attention(q, k, v, return_lse=True)
    part = [x[1:, :, 127:] if x.shape[1] == 200 else x[last] for x in (grad, q, k, v, out)]
    expected = reference(*[x.double() for x in part], lse[1:, 127:, length - 300 :].double())
    assert (dq[last].double() - expected[0]).norm() <= 1.6e-2 * expected[0].norm()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("d", [128, 256])
def test_inside_a_graph(make, d):
    q, k, v, grad = make(2, 500, 500, 4, 2, d)
    out, lse = tiercel.attention(q, k, v, causal=True, return_lse=True)
    run = torch.ops.tiercel.attention_backward
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(grad, q, k, v, out, lse, causal=True)
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_right(results, q, k, v, grad, causal=True)


@pytest.mark.parametrize("d", [64, 256])
def test_training_step_after_step(make, d):
    """Dependent launches see what went before, on one stream and on two."""
    q, k, v, grad = make(1, 300, 300, 4, 4, d)
    expected = [x.float() for x in gradients(q, k, v, grad)]
    for _ in range(20):
        found = gradients(q, k, v, grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = gradients(q, k, v, grad)
    side.synchronize()
    for one, two, other in zip(found, there, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(two.float(), other, rtol=1e-2, atol=1e-2)


def test_compiled(make):
    q, k, v, grad = make(2, 300, 300, 4, 2, 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    run = torch.compile(lambda *x: tiercel.attention(*x, causal=True), fullgraph=True)
    found = torch.autograd.grad(run(*leaves), leaves, grad)
    assert_right(found, *[x.detach() for x in leaves], grad, causal=True)
