# SPDX-License-Identifier: Apache-2.0
"""attention_varlen's gradients on an H100 or H200: all sequences at once, unknown to the host."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tiercel
from tiercel.ops.attention.reference import attention_varlen_backward as reference

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def starts_of(*lengths, before=0):
    return torch.tensor([before, *lengths]).cumsum(0).int().cuda()


def draw(rows_q, rows_k, heads, d, dtype=torch.bfloat16):
    """q, k, v, grad; `d` may be two head dimensions, the second one that of v."""
    d, d_v = d if isinstance(d, tuple) else (d, d)
    generator = torch.Generator("cuda").manual_seed(7)

    def rand(rows, count, columns):
        made = torch.randn(rows, count, columns, device="cuda", generator=generator)
        return made.to(dtype)

    of_q, of_k = (rows_q, heads[0]), (rows_k, heads[1])
    return [rand(*shape) for shape in ((*of_q, d), (*of_k, d), (*of_k, d_v), (*of_q, d_v))]


def gradients(q, k, v, grad, starts_q, starts_k, longest, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tiercel.attention_varlen(*leaves, starts_q, starts_k, *longest, **options)
    return torch.autograd.grad(out, leaves, grad)


def assert_right(found, q, k, v, grad, starts_q, starts_k, longest, **options):
    doubles = [x.detach().double() for x in (grad, q, k, v)]
    forward = tiercel.ref.attention_varlen
    out, lse = forward(*doubles[1:], starts_q, starts_k, *longest, return_lse=True, **options)
    truth = reference(*doubles, starts_q, starts_k, out, lse, **options)
    unit = torch.finfo(q.dtype).eps / 2
    for name, one, other in zip("qkv", found, truth, strict=True):
        assert one.isfinite().all(), name
        error, size = (one.double() - other).norm(), max(other.norm(), 0.02 * q.numel() ** 0.5)
        assert error <= 4 * unit * size, (name, (error / size / unit).item())


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128, (192, 128), 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_small(d, options):
    lengths = ([300, 1, 0, 130, 129], [300, 1, 7, 130, 64])
    tensors = draw(*map(sum, lengths), (2, 1), d)
    call = (*tensors, *(starts_of(*x) for x in lengths), tuple(map(max, lengths)))
    assert_right(gradients(*call, **options), *call, **options)


@pytest.mark.parametrize("d", [64, 128, (192, 128), 256, (136, 200)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 40)}])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_many_sequences(d, options, heads):
    lengths = [(37 * i) % 900 for i in range(40)], [(53 * i) % 700 + 1 for i in range(40)]
    tensors = draw(*map(sum, lengths), heads, d)
    call = (*tensors, *(starts_of(*x) for x in lengths), tuple(map(max, lengths)))
    assert_right(gradients(*call, **options), *call, **options)


def test_more_sequences_than_threads_list_at_a_time():
    lengths = [i % 5 for i in range(3000)]
    tensors = draw(sum(lengths), sum(lengths), (2, 2), 64)
    call = (*tensors, *(starts_of(*lengths) for _ in range(2)), (4, 4))
    assert_right(gradients(*call, causal=True), *call, causal=True)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, (192, 128), 256])
def test_softcap(d):
    """The kernels alone, from results of float64."""
    q, k, v, grad = draw(500, 500, (4, 2), d)
    starts, options = starts_of(200, 300), {"causal": True, "softcap": 5.0}
    doubles = [x.double() for x in (grad, q, k, v)]
    forward = tiercel.ref.attention_varlen
    out, lse = forward(*doubles[1:], starts, starts, 300, 300, return_lse=True, **options)
    function = torch.ops.tiercel.attention_varlen_backward
    given = (grad, q, k, v, starts, starts, out.bfloat16(), lse.float())
    found = function(*given, causal=True, softcap=5.0, backend="sm90")
    truth = reference(*doubles, starts, starts, out, lse, **options)
    for one, other in zip(found, truth, strict=True):
        assert (one.double() - other).norm() <= 4 * 2**-9 * other.norm()


@pytest.mark.sanitize
def test_rows_in_no_sequence():
    tensors = draw(400, 500, (2, 2), 128)
    starts_q, starts_k = starts_of(100, 150, before=60), starts_of(200, 100, before=30)
    for tensor, starts in zip(tensors, (starts_q, starts_k, starts_k, starts_q), strict=True):
        first, last = starts[0].item(), starts[-1].item()
        tensor[:first] = tensor[last:] = torch.nan
    found = gradients(*tensors, starts_q, starts_k, (150, 200), causal=True)
    for gradient, starts in zip(found, (starts_q, starts_k, starts_k), strict=True):
        first, last = starts[0].item(), starts[-1].item()
        assert (gradient[:first] == 0).all() and (gradient[last:] == 0).all()
        assert gradient.isfinite().all() and (gradient[first:last] != 0).any()


@pytest.mark.sanitize
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "starts", [(-40, 60, 100), (0, 101, 2**31 - 1), (2**29, -5, 70), (100, 50, 0)]
)
def test_any_contents_of_starts(starts, deterministic):
    """It ends, and each gradient is written."""
    q, k, v, grad = draw(100, 100, (2, 2), 64)
    starts = torch.tensor(starts, dtype=torch.int64, device="cuda").int()
    out, lse = tiercel.attention_varlen(q, k, v, starts, starts, 100, 100, return_lse=True)
    function = torch.ops.tiercel.attention_varlen_backward
    found = function(
        grad, q, k, v, starts, starts, out, lse, causal=True, deterministic=deterministic
    )
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("d", [64, 128, (192, 128), 256])
def test_a_fixed_order_gives_a_sequence_its_bits(d, options):
    """In any batch, and at each call."""
    lengths = [(211 * i) % 1500 + 1 for i in range(30)]
    q, k, v, grad = draw(sum(lengths), sum(lengths), (4, 2), d)
    longest = (max(lengths),) * 2
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients(q, k, v, grad, *[starts_of(*lengths)] * 2, longest, **options)
        for _ in range(3):
            again = gradients(q, k, v, grad, *[starts_of(*lengths)] * 2, longest, **options)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        for i in (0, 7, 29):
            first = sum(lengths[:i])
            rows = slice(first, first + lengths[i])
            one = [x[rows].contiguous() for x in (q, k, v, grad)]
            alone = gradients(*one, *[starts_of(lengths[i])] * 2, longest, **options)
            assert all(torch.equal(a[rows], b) for a, b in zip(found, alone, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [128, (192, 128), 256])
def test_a_training_step_in_a_graph_whose_sequences_change(d, deterministic):
    """Captured once, without a wait for the GPU; starts are written between two replays."""
    rows = 700
    q, k, v, grad = draw(rows, rows, (4, 2), d)
    starts = torch.zeros(6, dtype=torch.int32, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def step():
        out = tiercel.attention_varlen(*leaves, starts, starts, rows, rows, causal=True)
        return torch.autograd.grad(out, leaves, grad)

    graph = torch.cuda.CUDAGraph()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.cuda.graph(graph):
            found = step()
    finally:
        torch.use_deterministic_algorithms(False)
    for lengths in ((0,) * 5, (700, 0, 0, 0, 0), (1, 299, 300, 7, 93), (64, 128, 200, 0, 5)):
        starts.copy_(starts_of(*lengths))
        for gradient in found:
            gradient.fill_(torch.nan)
        graph.replay()
        assert_right(found, q, k, v, grad, starts, starts, (rows, rows), causal=True)
        assert all((x[sum(lengths) :] == 0).all() for x in found)


def test_other_lengths_need_no_other_graph():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v, starts, longest):
        return tiercel.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True)

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for lengths in ((100, 300), (256, 144), (7, 393), (50, 60)):
        q, k, v, grad = draw(sum(lengths), sum(lengths), (2, 2), 64)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        starts, longest = starts_of(*lengths), max(lengths)
        found = torch.autograd.grad(compiled(*leaves, starts, longest), leaves, grad)
        assert_right(found, *leaves, grad, starts, starts, (longest, longest), causal=True)
        graphs.append(counter.frame_count)
    assert graphs[0] <= 2 and graphs[1:] == [graphs[1]] * 3


def test_step_after_step():
    """Dependent launches see what went before, on one stream and on two."""
    q, k, v, grad = draw(600, 600, (4, 4), 64)
    call = (q, k, v, grad, *[starts_of(250, 50, 300)] * 2, (300, 300))
    expected = [x.float() for x in gradients(*call)]
    for _ in range(20):
        found = gradients(*call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = gradients(*call)
    side.synchronize()
    for one, two, other in zip(found, there, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(two.float(), other, rtol=1e-2, atol=1e-2)
