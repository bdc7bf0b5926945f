# SPDX-License-Identifier: Apache-2.0
"""cross_entropy on an H100 or H200, against PyTorch's in float64."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def problem(rows, classes, dtype=torch.bfloat16, seed=0, factor=3.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = factor * torch.randn(rows, classes, device="cuda", generator=generator)
    target = torch.randint(classes, (rows,), device="cuda", generator=generator)
    return logits.to(dtype), target


def exact(logits, target, weight=None, *, scale=None, z_loss=0.0, softcap=None, **options):
    """Losses and gradients of the rows in float64, a few rows at a time."""
    losses, grads = [], []
    for part, of_part, rows in zip(
        logits.split(64), target.split(64), torch.arange(len(target)).split(64), strict=True
    ):
        x = part.double().requires_grad_()
        capped = x if softcap is None else softcap * (x / softcap).tanh()
        wide = None if weight is None else weight.double()
        loss = functional.cross_entropy(capped, of_part.long(), wide, reduction="none", **options)
        if z_loss:
            counts = of_part != options.get("ignore_index", -100)
            loss = loss + z_loss * capped.logsumexp(-1).square() * counts
        if scale is not None:
            loss = loss * scale.double()[rows.to(scale.device) if len(scale) > 1 else 0]
        grads.append(torch.autograd.grad(loss.sum(), x)[0])
        losses.append(loss.detach())
    return torch.cat(losses), torch.cat(grads)


# p - 1 of a target whose p is near 1: three roundings of p, as PyTorch has them.
AT_TARGET = 3 * 2**-24


def assert_right(loss, grad, due_loss, due_grad, target, smoothing=0.0, softcap=None):
    """The gradient is rounded once; before that, float32 arithmetic loses a part of each term."""
    torch.testing.assert_close(loss.double(), due_loss, rtol=4e-6, atol=4e-6)
    assert grad.dtype in DTYPES
    unit = torch.finfo(grad.dtype).eps / 2
    tiny = torch.finfo(grad.dtype).smallest_normal if grad.dtype == torch.float16 else 1e-12
    size = due_grad.abs() + 1e-6 * due_grad.abs().amax(-1, keepdim=True)
    size = size + smoothing / grad.shape[1]
    error, allowed = (grad.double() - due_grad).abs(), (1.02 * unit + 2e-5) * size + tiny
    classes = torch.arange(grad.shape[1], device=grad.device)
    allowed += AT_TARGET * (classes == target[:, None])
    if softcap is not None:
        allowed += 5e-7  # 1 - tanh**2 where that is near 0, as PyTorch has it
    assert (error <= allowed).all(), (error / allowed).max().item()


def check(logits, target, weight=None, **options):
    due_loss, due_grad = exact(logits, target, weight, **options)
    bounds = {
        "smoothing": options.get("label_smoothing", 0.0),
        "softcap": options.get("softcap"),
    }
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        x = leaf * 1 if inplace else leaf
        loss = tiercel.cross_entropy(
            x, target, weight, reduction="none", inplace=inplace, **options
        )
        (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        assert_right(loss.detach(), grad, due_loss, due_grad, target, **bounds)
    without = tiercel.cross_entropy(logits, target, weight, reduction="none", **options)
    torch.testing.assert_close(without, loss.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 7, 8, 9, 100, 1000, 2048, 4096, 4099, 10_003])
def test_short_rows(classes, dtype):
    for rows in (1, 5, 131):
        logits, target = problem(rows, classes, dtype)
        target[rows // 2] = -100
        check(logits, target)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [9, 1000, 1024])
def test_several_rows_of_warps_in_a_block(classes, dtype):
    """The last block has fewer rows than warps."""
    for rows in (401, 1101):
        logits, target = problem(rows, classes, dtype)
        target[::7] = -100
        check(logits, target)
        check(logits, target, label_smoothing=0.1, z_loss=1e-3, softcap=5.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        (700, 32_000),
        (300, 50_257),
        (300, 128_256),
        (100, 151_936),
        (40, 262_144),
        (9, 262_147),
        (2, 442_365),
    ],
)
def test_vocabularies(rows, classes, dtype):
    """More rows than run at once, one or some blocks a row; odd rows begin anywhere."""
    logits, target = problem(rows, classes, dtype)
    target[0], target[1] = -100, classes - 1
    check(logits, target)
    check(logits, target.int(), label_smoothing=0.1, z_loss=1e-4)


def test_the_longest_rows():
    check(*problem(3, 884_729))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1003, 40_000])
def test_options(classes, dtype):
    logits, target = problem(40, classes, dtype)
    target[3] = 11
    weight, scale = torch.rand(classes, device="cuda") + 0.5, torch.rand(40, device="cuda")
    check(logits, target, weight)
    check(logits, target, weight, label_smoothing=0.2, z_loss=1e-3, softcap=5.0)
    check(logits, target, scale=scale)
    check(logits, target, scale=scale[:1], softcap=30.0)
    check(logits, target, label_smoothing=1.0)
    check(logits, target, ignore_index=11, label_smoothing=0.1)


def test_strided_logits():
    base, target = problem(64, 3000)
    for x in (base[:, :1000], base[:, 1:1001], base[::2, :999], base.t()[:64, :64]):
        check(x, target[: len(x)] % x.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [100, 5000, 128_256])
def test_special_values_are_torchs(classes, dtype):
    logits, target = problem(8, classes, dtype)
    logits[0, 5], logits[1, 5], logits[2] = NAN, INF, -INF
    logits[3, 1:], target[3] = -INF, 0
    logits[4], target[4] = NAN, -100
    logits[5, 4:], target[5] = -INF, 9
    target[6] = classes
    leaf = logits.clone().requires_grad_()
    loss = tiercel.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    inside = [0, 1, 2, 3, 5, 7]
    due_loss, due_grad = exact(logits[inside], target[inside])
    torch.testing.assert_close(
        loss[inside].double(), due_loss, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    assert torch.equal(grad[inside].isnan(), due_grad.isnan())
    assert loss[4] == 0 and not grad[4].any()
    assert loss[6].isnan() and grad[6].isnan().all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(reduction, weighted):
    for rows in (1, 9, 5000):
        logits, target = problem(rows, 1003)
        if rows > 1:
            target[:3] = -100
        weight = torch.rand(1003, device="cuda") + 0.5 if weighted else None
        x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
        loss = tiercel.cross_entropy(x, target, weight, reduction=reduction)
        due = functional.cross_entropy(
            wide, target, None if weight is None else weight.double(), reduction=reduction
        )
        torch.testing.assert_close(loss.double(), due, rtol=1e-5, atol=0)
        for factor in (1.0, 0.25):
            (grad,) = torch.autograd.grad(loss * factor, x, retain_graph=factor == 1)
            (due_grad,) = torch.autograd.grad(due * factor, wide, retain_graph=factor == 1)
            size = due_grad.abs().amax().item()
            torch.testing.assert_close(grad.double(), due_grad, rtol=2**-7, atol=1e-6 * size)


def test_no_row_counts():
    logits, _ = problem(5, 1000)
    target = torch.full((5,), -100, device="cuda")
    leaf = logits.requires_grad_()
    loss = tiercel.cross_entropy(leaf, target)
    assert loss.isnan() and not torch.autograd.grad(loss, leaf)[0].any()
    assert tiercel.cross_entropy(leaf, target, reduction="sum") == 0
    assert tiercel.cross_entropy(logits[:0], target[:0]).isnan()


def test_in_place_needs_no_memory():
    logits, target = problem(2048, 32_000)
    leaf = logits.requires_grad_()
    x = leaf * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = tiercel.cross_entropy(x, target, inplace=True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.data_ptr() == x.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_more_than_2_31_logits():
    """Rows beyond 2**31 elements are as right as the first ones."""
    rows = 2**31 // 128_256 + 300
    logits = torch.empty(rows, 128_256, device="cuda", dtype=torch.bfloat16)
    for part in logits.split(1024):
        part.normal_(std=3)
    target = torch.randint(128_256, (rows,), device="cuda")
    first, last = logits[:64].clone(), logits[-64:].clone()
    loss = tiercel.cross_entropy(logits, target, reduction="none")
    due_first, due_last = exact(first, target[:64]), exact(last, target[-64:])
    results = torch.ops.tiercel.cross_entropy_(logits, target)
    torch.testing.assert_close(results, loss, rtol=1e-6, atol=1e-6)
    assert_right(loss[:64], logits[:64], *due_first, target[:64])
    assert_right(loss[-64:], logits[-64:], *due_last, target[-64:])


def test_many_rows():
    logits, target = problem(2**22, 32)
    check(logits[:4096], target[:4096])
    loss = tiercel.cross_entropy(logits, target, reduction="none")
    due = functional.cross_entropy(logits.float(), target, reduction="none")
    torch.testing.assert_close(loss, due, rtol=1e-5, atol=1e-5)


def test_reproducible():
    logits, target = problem(500, 50_257)
    results = []
    for _ in range(3):
        leaf = logits.clone().requires_grad_()
        loss = tiercel.cross_entropy(leaf, target, label_smoothing=0.1)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for one in results[1:]:
        assert all(map(torch.equal, one, results[0]))


@pytest.mark.parametrize("inplace", [False, True])
def test_graph_of_a_step(inplace):
    """Captured in the very first call, forward and backward."""
    head = torch.nn.Linear(64, 5000, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(5000, (256,), device="cuda")

    def step():
        head.zero_grad(set_to_none=True)
        loss = tiercel.cross_entropy(head(x), target, inplace=inplace)
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            due = step()
    torch.cuda.current_stream().wait_stream(stream)
    due_grad = head.weight.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    assert torch.equal(loss, due) and torch.equal(head.weight.grad, due_grad)
    target.random_(5000)
    graph.replay()
    torch.testing.assert_close(loss, step())


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_step(inplace):
    torch._dynamo.reset()
    head = torch.nn.Linear(64, 5000, device="cuda", dtype=torch.bfloat16)
    other = copy.deepcopy(head)

    def step(model, x, target):
        return tiercel.cross_entropy(model(x), target, z_loss=1e-4, inplace=inplace)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (256, 130):
        x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(5000, (rows,), device="cuda")
        step(head, x, target).backward()
        compiled(other, x, target).backward()
        torch.testing.assert_close(head.weight.grad, other.weight.grad, rtol=2**-6, atol=1e-4)


def test_checkpointed():
    head = torch.nn.Linear(64, 5000, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(5000, (256,), device="cuda")

    def step(x):
        return tiercel.cross_entropy(head(x), target, inplace=True)

    (due,) = torch.autograd.grad(step(x), x)
    for reentrant in (False, True):
        loss = checkpoint(step, x, use_reentrant=reentrant)
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, due)


def test_on_another_stream_without_waiting():
    logits, target = problem(64, 32_000)
    leaf = logits.requires_grad_()
    due = tiercel.cross_entropy(leaf, target)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            loss = tiercel.cross_entropy(leaf, target)
            torch.autograd.grad(2 * loss, leaf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(loss, due)
