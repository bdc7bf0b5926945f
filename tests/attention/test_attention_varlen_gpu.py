# SPDX-License-Identifier: Apache-2.0
"""attention_varlen on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(queries, keys, heads, d, dtype=torch.bfloat16, d_v=None):
        def rand(rows, count, d=d):
            drawn = torch.randn(rows, count, d, device="cuda", generator=generator)
            return drawn.to(dtype)

        tensors = [rand(sum(queries), heads[0]), rand(sum(keys), heads[1])]
        tensors.append(rand(sum(keys), heads[1], d_v or d))
        of_each = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (queries, keys)]
        return *tensors, *of_each, max(queries), max(keys)

    return draw


def check(given, **options):
    result, lse = tiercel.attention_varlen(*given, return_lse=True, **options)
    doubles = [x.double() for x in given[:3]]
    truth, sums = tiercel.ref.attention_varlen(*doubles, *given[3:], return_lse=True, **options)
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs()
    assert error.max() <= 8 * unit, error.max().item() / unit
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=2e-5)


LENGTHS = [
    ([5], [5]),
    ([128, 256], [128, 256]),
    ([1000, 1, 0, 300, 129], [1000, 1, 7, 300, 64]),
    ([64, 700, 3], [700, 64, 0]),
    ([200] * 20, [200] * 20),
    ([2048, 100, 1000], [2048, 100, 1000]),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS[:3])
def test_small(make, d, lengths):
    check(make(*lengths, (2, 1), d), causal=True)


@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(make, d, dtype, options, lengths):
    check(make(*lengths, (4, 2), d, dtype), **options)


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
def test_softcap(make, d, dtype, options):
    check(make(*LENGTHS[2], (4, 2), d, dtype), softcap=5.0, **options)


def test_what_lies_behind_a_sequence_does_not_matter(make):
    """The next sequence's keys are NaN, and the next one's result is not written over."""
    q, k, v, *rest = make([100, 50, 77], [100, 50, 77], (2, 2), 64)
    k[100:150], v[100:150] = float("nan"), float("nan")
    result = tiercel.attention_varlen(q, k, v, *rest)
    assert result[:100].isfinite().all() and result[150:].isfinite().all()
    assert result[100:150].isnan().all()


def test_longest_may_be_more(make):
    *given, _, _ = make([100, 50], [60, 90], (2, 2), 128)
    check((*given, 1000, 513), causal=True)


def padded(given, before, after):
    """The same sequences amid rows that belong to none: NaN, so that one that counts shows."""
    q, k, v, of_q, of_k, *longest = given

    def pad(x):
        rows = [x.new_full((n, *x.shape[1:]), float("nan")) for n in (before, after)]
        return torch.cat([rows[0], x, rows[1]])

    return pad(q), pad(k), pad(v), of_q + before, of_k + before, *longest


@pytest.mark.sanitize
@pytest.mark.parametrize(("before", "after"), [(0, 3), (5, 0), (130, 700)])
@pytest.mark.parametrize("d", [40, 128])
def test_rows_in_no_sequence(make, d, before, after):
    given = make([100, 1, 30], [100, 7, 60], (6, 2), d)
    out, lse = tiercel.attention_varlen(*padded(given, before, after), return_lse=True)
    inside = slice(before, before + 131)
    due, sums = tiercel.attention_varlen(*given, return_lse=True)
    assert torch.equal(out[inside], due) and torch.equal(lse[:, inside], sums)
    for rest in (slice(0, before), slice(before + 131, None)):
        assert (out[rest] == 0).all() and (lse[:, rest] == -torch.inf).all()


def test_gradients_of_rows_in_no_sequence(make):
    q, k, v, *rest = padded(make([100, 30], [100, 60], (2, 2), 64), 10, 20)
    leaves = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    out, lse = tiercel.attention_varlen(*leaves, *rest, causal=True, return_lse=True)
    (out.float().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
    for leaf, rows in zip(leaves, (130, 160, 160), strict=True):
        assert leaf.grad.isfinite().all() and (leaf.grad[10 : 10 + rows] != 0).any()
        assert (leaf.grad[:10] == 0).all() and (leaf.grad[10 + rows :] == 0).all()


def test_a_graph_whose_sequences_change(make):
    """As for a server: the tensors' size is fixed, starts are written between two replays."""
    q, k, v, of_q, *_ = make([100, 300], [100, 300], (4, 4), 128)
    starts = torch.zeros_like(of_q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tiercel.attention_varlen(q, k, v, starts, starts, 400, 400, causal=True)
    for lengths in ((0, 0), (30, 70), (100, 300)):
        starts.copy_(torch.tensor([0, *lengths]).cumsum(0).int())
        graph.replay()
        due = tiercel.attention_varlen(q, k, v, starts, starts, 400, 400, causal=True)
        assert torch.equal(result, due) and (result[sum(lengths) :] == 0).all()


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "starts", [(-40, 60, 100), (0, 101, 2**31 - 1), (2**29, -5, 70), (100, 50, 0)]
)
def test_any_contents_of_starts(make, starts):
    """Nothing beside the tensors is touched: they are rows 100 to 200 of larger ones."""
    q, k, v, *_ = make([300], [300], (2, 2), 64)
    starts = torch.tensor(starts, dtype=torch.int64, device="cuda").int()
    inner = [x[100:200] for x in (q, k, v)]
    out, lse = tiercel.attention_varlen(*inner, starts, starts, 100, 100, return_lse=True)
    expected = tiercel.ref.attention_varlen(*inner, starts, starts, 100, 100, return_lse=True)
    if (starts.clamp(0, 100).diff() >= 0).all():
        torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)


def test_starts_of_any_stride(make):
    q, k, v, of_q, of_k, *longest = make([100, 300], [100, 300], (4, 4), 64)
    apart = [torch.stack([x, x * 0 - 7], dim=1)[:, 0] for x in (of_q, of_k)]
    due = tiercel.attention_varlen(q, k, v, of_q, of_k, *longest)
    assert torch.equal(tiercel.attention_varlen(q, k, v, *apart, *longest), due)


def test_strides(make):
    q, k, v, *rest = make([100, 300], [100, 300], (4, 4), 64)
    packed = torch.stack([q, k, v], dim=1)
    check((*packed.unbind(1), *rest), causal=True)


def test_graph(make):
    given = make([100, 300], [100, 300], (4, 4), 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tiercel.attention_varlen(*given, causal=True)
    graph.replay()
    assert torch.equal(result, tiercel.attention_varlen(*given, causal=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_of_narrow_values(make, options, lengths):
    check(make(*lengths, (4, 2), 192, d_v=128), **options)


def check_gradients(given, return_lse=False, **options):
    def gradients(run, q, k, v, grad, *rest):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = run(*leaves, *rest, return_lse=True, **options)
        sums = lse.masked_fill(lse.isinf(), 0.0).sum() if return_lse else 0.0
        return torch.autograd.grad((out * grad).sum() + sums, leaves)

    q, k, v, *rest = given
    grad = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    grad = grad.to(q.dtype)
    found = gradients(tiercel.attention_varlen, q, k, v, grad, *rest)
    doubles = [x.double() for x in (q, k, v, grad)]
    expected = gradients(tiercel.ref.attention_varlen, *doubles, *rest)
    unit = torch.finfo(q.dtype).eps / 2
    for name, one, truth in zip("qkv", found, expected, strict=True):
        assert one.dtype == q.dtype and one.isfinite().all(), name
        error, size = (one.double() - truth).norm(), max(truth.norm(), 0.02 * q.numel() ** 0.5)
        assert error <= 4 * unit * size, (name, (error / size / unit).item())


@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS[1:])
def test_gradients(make, d, dtype, options, lengths):
    check_gradients(make(*lengths, (4, 2), d, dtype), return_lse=d == 64, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_with_softcap(make, dtype):
    check_gradients(make(*LENGTHS[2], (4, 2), 128, dtype), causal=True, softcap=5.0)


def test_compiled_gradients(make):
    q, k, v, *rest = make([100, 300], [100, 300], (2, 2), 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(*tensors):
        return tiercel.attention_varlen(*tensors, *rest, causal=True)

    expected = torch.autograd.grad(run(*leaves).float().sum(), leaves)
    found = torch.autograd.grad(torch.compile(run)(*leaves).float().sum(), leaves)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other)
