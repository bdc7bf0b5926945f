# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiercel
from tiercel.core.spec import Call
from tiercel.ops.loss import chunks

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ("none", "mean", "sum")


def problem(rows, hidden, classes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, hidden, device="cuda", generator=generator)
    weight = torch.randn(classes, hidden, device="cuda", generator=generator) * hidden**-0.5
    bias = torch.randn(classes, device="cuda", generator=generator)
    target = torch.randint(classes, (rows,), device="cuda", generator=generator)
    target[1::7] = -100
    return x.to(dtype), weight.to(dtype), target, bias.to(dtype)


def gradients(function, x, weight, target, bias, dtype=None, **options):
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
        for t in (x, weight, bias)
    ]
    loss = function(leaves[0], leaves[1], target, leaves[2], **options)
    upstream = torch.linspace(1, 0.5, loss.numel(), device="cuda").to(loss.dtype).view(loss.shape)
    grads = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], upstream)
    return loss.detach(), grads


def exact(x, weight, target, bias=None, class_weight=None, **options):
    logits = functional.linear(x, weight, bias)
    if class_weight is not None:
        class_weight = class_weight.double()
    return tiercel.ref.cross_entropy(logits, target, class_weight, **options)


def of_torch(x, weight, target, bias=None, reduction="mean"):
    logits = functional.linear(x, weight, bias).float()
    return functional.cross_entropy(logits, target, reduction=reduction)


def distance(found, due):
    return ((found.double() - due).norm() / due.norm()).item()


def few_rows(monkeypatch, rows, classes, size):
    """Chunks of that many rows, and no memory for float32 sums."""
    stride = -(-classes * size // 128) * 128
    monkeypatch.setattr(chunks, "_LEAST_MEMORY", rows * stride)
    monkeypatch.setattr(chunks, "_TILE", 1)


def reductions(dtype):
    """A mean's gradients of many rows are below the range of float16."""
    return ("none", "sum") if dtype == torch.float16 else REDUCTIONS


@pytest.fixture
def whole_sums():
    """Products of few rows may otherwise add shares of K in 16 bits, and PyTorch's of all rows not.
    Not by monkeypatch: its undoing deletes what an object's class does not have."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [None, 96])
@pytest.mark.parametrize("classes", [1, 999, 4099])
def test_small(dtype, chunk, classes, monkeypatch, whole_sums):
    """Gradients are as near to float64 as PyTorch's of the same dtype, whose logits are rounded,
    too."""
    rows, hidden = 300, 64
    x, weight, target, bias = problem(rows, hidden, classes, dtype)
    if chunk is not None:
        few_rows(monkeypatch, chunk, classes, x.element_size())
    accum = {"accum_dtype": torch.float32}
    for reduction in reductions(dtype):
        for given in (None, bias):
            due, due_grads = gradients(
                exact, x, weight, target, given, torch.float64, reduction=reduction
            )
            loss, grads = gradients(
                tiercel.linear_cross_entropy, x, weight, target, given, reduction=reduction, **accum
            )
            _, theirs = gradients(of_torch, x, weight, target, given, reduction=reduction)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(loss.double(), due, rtol=4 * eps + 1e-5, atol=8 * eps)
            for grad, due_grad, their in zip(grads, due_grads, theirs, strict=True):
                assert grad.dtype == dtype and grad.shape == due_grad.shape
                if classes > 1:
                    bound = 1.05 * distance(their, due_grad) + 1e-6
                    assert distance(grad, due_grad) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [64, 200, 1000])
@pytest.mark.parametrize("frequent", [False, True])
def test_several_chunks_round_no_more_than_one(dtype, chunk, frequent, monkeypatch):
    """Without memory for float32 sums; targets of which most differ, or few are most."""
    rows, hidden, classes = 1000, 256, 8000
    x, weight, target, _ = problem(rows, hidden, classes, dtype)
    if frequent:
        target = (target.double() / classes).pow(8).mul(classes).long().clamp(min=0)
    few_rows(monkeypatch, chunk, classes, 2)
    call = Call(x=x, weight=weight, accum_dtype=None)
    assert chunks.divide(call, True).apart == (chunk < 1000)
    _, due = gradients(exact, x, weight, target, None, torch.float64, reduction="sum")
    _, grads = gradients(tiercel.linear_cross_entropy, x, weight, target, None, reduction="sum")
    _, theirs = gradients(of_torch, x, weight, target, None, reduction="sum")
    for grad, due_grad, their in zip(grads, due, theirs, strict=True):
        assert distance(grad, due_grad) <= 1.05 * distance(their, due_grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options(dtype, monkeypatch):
    rows, hidden, classes = 500, 128, 5000
    x, weight, target, bias = problem(rows, hidden, classes, dtype)
    few_rows(monkeypatch, 128, classes, x.element_size())
    of_classes = torch.rand(classes, device="cuda") + 0.5
    eps = torch.finfo(dtype).eps
    for options in (
        {"label_smoothing": 0.1, "z_loss": 1e-3},
        {"softcap": 5.0},
        {"class_weight": of_classes, "label_smoothing": 0.1},
        {"scale": torch.rand(rows, device="cuda")},
        {"scale": torch.full((1,), 0.25, device="cuda"), "ignore_index": 7},
    ):
        target[1::7] = options.get("ignore_index", -100)
        for reduction in reductions(dtype):
            due, due_grads = gradients(
                exact, x, weight, target, bias, torch.float64, reduction=reduction, **options
            )
            loss, grads = gradients(
                tiercel.linear_cross_entropy,
                x,
                weight,
                target,
                bias,
                reduction=reduction,
                **options,
            )
            torch.testing.assert_close(loss.double(), due, rtol=4 * eps + 1e-5, atol=8 * eps)
            for grad, due_grad in zip(grads, due_grads, strict=True):
                assert distance(grad, due_grad) <= 3 * eps + 1e-5
            with torch.no_grad():
                plain = tiercel.linear_cross_entropy(
                    x, weight, target, bias, reduction=reduction, **options
                )
            torch.testing.assert_close(plain, loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [32_000, 50_257, 128_256])
def test_vocabularies(classes):
    """A row of logits may begin at no multiple of 16 bytes in the tensor itself."""
    x, weight, target, _ = problem(700, 512, classes)
    due, due_grads = gradients(exact, x, weight, target, None, torch.float64)
    loss, grads = gradients(tiercel.linear_cross_entropy, x, weight, target, None)
    _, theirs = gradients(of_torch, x, weight, target, None)
    torch.testing.assert_close(loss.double(), due, rtol=1e-4, atol=0)
    for grad, due_grad, their in zip(grads, due_grads, theirs, strict=True):
        assert distance(grad, due_grad) <= 1.05 * distance(their, due_grad)


@pytest.mark.parametrize("strided", ["columns", "transposed", "rows"])
def test_strides(strided):
    x, weight, target, bias = problem(200, 64, 1000)
    due = gradients(tiercel.linear_cross_entropy, x, weight, target, bias)
    if strided == "columns":
        x, weight = (torch.cat([t, -t], 1)[:, :64] for t in (x, weight))
        bias = torch.stack([bias, -bias], 1)[:, 0]
    elif strided == "transposed":
        x, weight = (t.t().contiguous().t() for t in (x, weight))
    else:
        x, target = torch.stack([x, -x], 1)[:, 0], torch.stack([target, -target], 1)[:, 0]
    found = gradients(tiercel.linear_cross_entropy, x, weight, target, bias)
    torch.testing.assert_close(found, due, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "hidden", "classes"),
    [(8192, 2048, 128256), (16384, 1024, 32000), (8192, 4096, 32000), (4096, 4096, 128256)],
)
def test_memory(rows, hidden, classes):
    """Beside the gradients 2048 rows of logits, half a weight gradient, or 512 MiB; and what cuBLAS
    needs."""
    x, weight, target, _ = problem(rows, hidden, classes)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    tiercel.linear_cross_entropy(x[:8], weight, target[:8]).backward()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tiercel.linear_cross_entropy(x, weight, target).backward()
    extra = torch.cuda.max_memory_allocated() - before
    extra -= sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    assert extra <= max(2048 * 2 * classes, hidden * classes, 512 << 20) + (4 << 20)


def test_the_upstream_gradient_is_multiplied_in_place():
    """That of `loss.backward()` is 1, and costs no pass over the gradients."""
    x, weight, target, bias = problem(256, 512, 32000)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    due = torch.autograd.grad(tiercel.linear_cross_entropy(x, weight, target, bias), leaves)
    loss = tiercel.linear_cross_entropy(x, weight, target, bias)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(4 * loss, leaves)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert all(torch.equal(4 * a, b) for a, b in zip(due, grads, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cuda_graph(reduction, monkeypatch):
    x, weight, target, bias = problem(300, 64, 4099)
    few_rows(monkeypatch, 128, 4099, 2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def step():
        loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
        return torch.autograd.grad(loss.sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    with torch.no_grad():
        x.copy_(x.flip(0))
        target.copy_(target.roll(3))
    graph.replay()
    due = step()
    assert all(map(torch.equal, grads, due))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_checkpointed_and_under_autocast(reduction):
    torch._dynamo.reset()
    _, weight, _, bias = problem(8, 64, 4099)
    front = torch.nn.Linear(64, 64, device="cuda")
    weight, bias = torch.nn.Parameter(weight.float()), torch.nn.Parameter(bias.float())
    leaves = [*front.parameters(), weight, bias]

    def loss(x, target):
        with torch.autocast("cuda", torch.bfloat16):
            return tiercel.linear_cross_entropy(front(x), weight, target, bias, reduction=reduction)

    def step(x, target):
        return checkpoint(loss, x, target, use_reentrant=False).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (100, 333):
        x, _, target, _ = problem(rows, 64, 4099, torch.float32)
        grads = [torch.autograd.grad(2 * f(x, target), leaves) for f in (step, compiled)]
        torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-3)


def test_it_does_not_wait():
    x, weight, target, bias = problem(300, 64, 4099)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    tiercel.linear_cross_entropy(x, weight, target, bias).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in REDUCTIONS:
            loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
            torch.autograd.grad(loss.sum(), leaves)
            with torch.no_grad():
                tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_group_of_one(reduction, tmp_path, monkeypatch):
    """It reads the logits twice: once for the log-sum that ranks exchange."""
    from torch import distributed as dist

    x, weight, target, bias = problem(300, 64, 4099)
    few_rows(monkeypatch, 128, 4099, 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options = {"reduction": reduction, "z_loss": 1e-3, "softcap": 5.0}
    due_loss, due = gradients(tiercel.linear_cross_entropy, x, weight, target, bias, **options)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        options["group"] = dist.group.WORLD
        loss, grads = gradients(tiercel.linear_cross_entropy, x, weight, target, bias, **options)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(loss, due_loss, rtol=1e-5, atol=1e-5)
    for grad, due_grad in zip(grads, due, strict=True):
        assert distance(grad, due_grad.double()) <= 2**-8


def test_explain():
    x, weight, target, _ = problem(8192, 64, 128256)
    plan = tiercel.explain(tiercel.linear_cross_entropy, x, weight, target)
    assert "chunk" in str(plan)
    call = Call(x=x, weight=weight, accum_dtype=None)
    assert chunks.divide(call, True).count == 5


def test_too_many_classes():
    x, weight, target, _ = problem(4, 8, 900_000)
    with pytest.raises(NotImplementedError, match="rows of up to"):
        tiercel.linear_cross_entropy(x, weight, target, backend="sm90")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs grad_dtype")
@pytest.mark.parametrize("chunk", [None, 256])
def test_a_weight_s_gradient_in_float32(chunk, monkeypatch):
    if chunk is not None:
        few_rows(monkeypatch, chunk, 5000, 2)
    x, weight, target, _ = problem(1000, 256, 5000)
    _, (_, usual) = gradients(
        tiercel.linear_cross_entropy, x, weight, target, None, accum_dtype=torch.float32
    )
    weight = weight.requires_grad_()
    weight.grad_dtype = torch.float32
    for times in (1, 2):
        tiercel.linear_cross_entropy(x, weight, target).backward()
        assert weight.grad.dtype == torch.float32
        assert distance(weight.grad / times, usual) < 2**-8
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
