# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with PyTorch and without a GPU: gradients, public function."""

import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tiercel
from tiercel.core.spec import Call
from tiercel.ops.loss import chunks, linear

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ("none", "mean", "sum")
ROWS, HIDDEN, CLASSES = 21, 12, 37


@pytest.fixture(autouse=True)
def _on_ref():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    with tiercel.use_backend("ref"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def many_chunks(monkeypatch):
    """Eight rows of logits at a time."""
    monkeypatch.setattr(chunks, "_ROW_BYTES", 8)
    monkeypatch.setattr(chunks, "_TILE", 4)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 1000)
    monkeypatch.setattr(chunks, "_LEAST_MEMORY", 1)


def problem(dtype=torch.float32, rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(CLASSES, HIDDEN, generator=generator) / 2).to(dtype)
    bias = torch.randn(CLASSES, generator=generator).to(dtype)
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[2::5] = -100
    return x, weight, target, bias


def exact(x, weight, target, bias=None, **options):
    class_weight = options.pop("class_weight", None)
    options.pop("accum_dtype", None)
    class_weight = None if class_weight is None else class_weight.double()
    options = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    logits = functional.linear(x, weight, bias)
    return tiercel.ref.cross_entropy(logits, target, class_weight, **options)


def both(tensors, target, reduction, upstream, **options):
    """Loss and gradients of ours and of the float64 reference."""
    found = []
    for function, dtype in ((tiercel.linear_cross_entropy, None), (exact, torch.float64)):
        x, weight, bias = (
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors
        )
        loss = function(x, weight, target, bias, reduction=reduction, **options)
        leaves = [t for t in (x, weight, bias) if t is not None]
        grads = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
        found.append((loss.detach(), grads))
    return found


def options_of(rows):
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(CLASSES, generator=generator) + 0.5
    for weighted, smoothing, z_loss, softcap in itertools.product(
        (None, weight), (0.0, 0.1), (0.0, 1e-2), (None, 4.0)
    ):
        yield {
            "class_weight": weighted,
            "label_smoothing": smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
        }
    yield {"scale": torch.rand(rows, generator=generator)}
    yield {"scale": torch.tensor([0.3]), "class_weight": weight}
    yield {"ignore_index": 5}


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradients(reduction, with_bias):
    x, weight, target, bias = problem()
    upstream = torch.linspace(0.5, 2, ROWS) if reduction == "none" else torch.tensor(1.5)
    tensors = (x, weight, bias if with_bias else None)
    for options in options_of(ROWS):
        target[2::5] = options.get("ignore_index", -100)
        (loss, grads), (due, due_grads) = both(tensors, target, reduction, upstream, **options)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), due, rtol=1e-5, atol=1e-5)
        for grad, due_grad in zip(grads, due_grads, strict=True):
            torch.testing.assert_close(grad.double(), due_grad, rtol=1e-4, atol=1e-5)
        plain = tiercel.linear_cross_entropy(
            x, weight, target, tensors[2], reduction=reduction, **options
        )
        torch.testing.assert_close(plain, loss)
        assert plain.grad_fn is None


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("accum", [None, torch.float32, "own"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, accum):
    """Errors as PyTorch's own of the same dtype, if the sums are float32, or those that matter;
    others are rounded with each chunk."""
    x, weight, target, bias = problem(dtype, rows=32)
    accum = dtype if accum == "own" else accum
    (loss, grads), (due, due_grads) = both(
        (x, weight, bias), target, "mean", torch.tensor(1.0), accum_dtype=accum
    )
    assert [g.dtype for g in grads] == [dtype] * 3
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), due, rtol=4 * eps + 1e-5, atol=0)
    division = chunks.divide(Call(x=x, weight=weight, accum_dtype=accum), True)
    assert division.count == 4 and division.wide == (accum == torch.float32 and dtype != accum)
    assert division.apart == (accum is None and dtype != torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    own = functional.cross_entropy(functional.linear(*leaves).float(), target)
    for grad, due_grad, of_torch in zip(
        grads, due_grads, torch.autograd.grad(own, leaves), strict=True
    ):
        error, theirs = ((g.double() - due_grad).norm() for g in (grad, of_torch))
        rounded = 1.7 if accum == dtype else 1.15 if division.apart else 1.05
        bound = rounded if grad.shape == weight.shape else 1.05
        assert error <= bound * theirs + 1e-6 * due_grad.norm()


class Watch(TorchDispatchMode):
    """Keeps the shapes of products, and how large a tensor's memory was at most."""

    def __init__(self):
        super().__init__()
        self.products, self.most = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.untyped_storage().nbytes())
            if function.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
                self.products.add(tuple(result.shape))
        return result


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:])
def test_only_what_is_wanted(wanted):
    """A frozen weight, an input without a gradient."""
    x, weight, target, bias = problem()
    options = {"bias": bias, "class_weight": None, "scale": None, "ignore_index": -100}
    options |= {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "accum_dtype": None}
    options |= dict(zip(("for_x", "for_weight", "for_bias"), wanted, strict=True)) | {"mean": True}
    call = Call(x=x, weight=weight, target=target, **options)
    with Watch() as watch:
        chunks.with_gradient(call, linear._fill, tiercel.ops.loss.reference.mean_scale)
    assert any(s[1] == HIDDEN and s[0] != CLASSES for s in watch.products) == wanted[0]
    assert ((CLASSES, HIDDEN) in watch.products) == wanted[1]
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for reduction in REDUCTIONS:
        for leaf in leaves:
            leaf.requires_grad_()
        loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum()
        due = torch.autograd.grad(loss, leaves)
        for leaf, wants in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(wants)
            leaf.grad = None
        loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum()
        loss.backward()
        for leaf, wants, grad in zip(leaves, wanted, due, strict=True):
            assert (leaf.grad is not None) == wants
            if wants:
                torch.testing.assert_close(leaf.grad, grad)


@pytest.mark.usefixtures("many_chunks")
def test_ignored_tokens_add_nothing_at_targets():
    """A kernel adds all tokens of a class in a row: those at -1 it leaves out."""
    x, weight, target, _ = problem(torch.bfloat16)
    options = {"bias": None, "class_weight": None, "scale": None, "ignore_index": -100}
    options |= {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": None, "accum_dtype": None}
    options |= {"for_x": True, "for_weight": True, "for_bias": False, "mean": True}
    call = Call(x=x, weight=weight, target=target, **options)
    assert chunks.divide(call, True).apart
    left_out = []

    def at_targets(sums, x, target, by, memory):
        kept = target >= 0
        left_out.append(~kept)
        chunks.add_targets(sums, x[kept], target[kept], by[kept], memory)

    mean_scale = tiercel.ops.loss.reference.mean_scale
    found = chunks.with_gradient(call, linear._fill, mean_scale, at_targets)
    due = chunks.with_gradient(call, linear._fill, mean_scale)
    torch.testing.assert_close(found, due)
    assert torch.equal(*left_out, target == -100)


def test_it_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(chunks, "_LEAST_MEMORY", 130 * 1000 * 4)
    options = {"bias": None, "class_weight": None, "scale": None, "ignore_index": -100}
    options |= {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "accum_dtype": None}
    call = Call(
        x=torch.randn(300, 8), weight=torch.randn(1000, 8), target=torch.arange(300), **options
    )
    with_gradient = Call(**vars(call), mean=True, for_x=True, for_weight=True, for_bias=False)
    for run in (
        lambda: chunks.losses(call, linear._fill),
        lambda: linear._reference(call),
        lambda: chunks.with_gradient(
            with_gradient, linear._fill, tiercel.ops.loss.reference.mean_scale
        ),
    ):
        with Watch() as watch:
            run()
        assert 100 * 1000 * 4 <= watch.most < 150 * 1000 * 4


def test_it_is_the_functions_of_pytorch():
    x, weight, target, bias = problem()
    for reduction in REDUCTIONS:
        due = functional.cross_entropy(
            functional.linear(x, weight, bias), target, reduction=reduction, label_smoothing=0.1
        )
        found = tiercel.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, label_smoothing=0.1
        )
        torch.testing.assert_close(found, due)
        found = tiercel.ref.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, label_smoothing=0.1
        )
        torch.testing.assert_close(found, due)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(reduction):
    x, weight, target, bias = problem()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = 3 * tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum()
    first = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=True)]
    second = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, first, second))


def test_second_derivatives():
    x, weight, target, bias = problem()
    leaves = [t.double().float().requires_grad_() for t in (x, weight, bias)]
    loss = tiercel.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2])
    with pytest.raises(RuntimeError, match="^linear_cross_entropy: the forward has made"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    results = []
    for function, dtype in ((tiercel.linear_cross_entropy, None), (exact, torch.float64)):
        own = [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]
        loss = function(own[0], own[1], target, own[2], reduction="none", z_loss=0.01).sum()
        first = torch.autograd.grad(loss, own, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), own)
        results.append([g.double() for g in (*first, *second)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_function_transforms():
    x, weight, target, bias = problem()

    def loss(x, weight):
        return tiercel.linear_cross_entropy(x, weight, target, bias)

    def due(x, weight):
        return functional.cross_entropy(functional.linear(x, weight, bias), target)

    for transform in (lambda f: torch.func.grad(f, (0, 1)), torch.func.hessian):
        torch.testing.assert_close(transform(loss)(x, weight), transform(due)(x, weight))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows_and_rows_that_do_not_count(reduction):
    x, weight, target, bias = problem()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    target[:] = -100
    loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert not any(g.any() for g in grads)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    leaves[0] = x[:0].detach().requires_grad_()
    loss = tiercel.linear_cross_entropy(leaves[0], weight, target[:0], bias, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    if reduction != "mean":
        assert not any(g.any() for g in grads)
    with torch.no_grad():
        again = tiercel.linear_cross_entropy(x[:0], weight, target[:0], bias, reduction=reduction)
    torch.testing.assert_close(again, loss.detach(), equal_nan=True)


@pytest.mark.parametrize("memory", [1, 32 * 21 * 5, 1 << 30])
def test_what_targets_add_is_rounded_once(memory):
    """Whatever the number of equal targets, and of columns at a time."""
    generator = torch.Generator().manual_seed(0)
    for highest in (1, 3, CLASSES):
        x, _, _, _ = problem(torch.bfloat16)
        target = torch.randint(highest, (ROWS,), generator=generator)
        by = torch.randn(ROWS, generator=generator)
        sums = torch.randn(CLASSES, HIDDEN, generator=generator).bfloat16()
        due = sums.float().index_add(0, target, by[:, None] * x.float())
        chunks.add_targets(sums, x, target, by, memory)
        torch.testing.assert_close(sums.float(), due, rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("many_chunks")
def test_a_target_that_is_no_class():
    x, weight, target, _ = problem()
    target[1] = CLASSES
    x.requires_grad_()
    loss = tiercel.linear_cross_entropy(x, weight, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().nonzero().tolist() == [[1]]
    assert grad.isnan().any(1).nonzero().tolist() == [[1]]
    assert tiercel.linear_cross_entropy(x, weight, target).isnan()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpoint(reduction, reentrant):
    x, weight, target, bias = problem()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def step(x, weight, bias):
        loss = tiercel.linear_cross_entropy(x.tanh(), weight, target, bias, reduction=reduction)
        return loss.sum()

    due = torch.autograd.grad(step(*leaves), leaves)
    checkpoint(step, *leaves, use_reentrant=reentrant).backward()
    torch.testing.assert_close(tuple(t.grad for t in leaves), due)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(reduction):
    x, weight, target, bias = problem()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert {g.dtype for g in grads} == {torch.float32}
    halves = [t.detach().bfloat16().requires_grad_() for t in leaves]
    loss_of_halves = tiercel.linear_cross_entropy(
        halves[0], halves[1], target, halves[2], reduction=reduction
    )
    torch.testing.assert_close(loss, loss_of_halves)
    due = torch.autograd.grad(loss_of_halves.sum(), halves)
    torch.testing.assert_close(grads, tuple(g.float() for g in due))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_step(reduction):
    """One graph for any number of rows, with the layer in front of it."""
    torch._dynamo.reset()
    front = torch.nn.Linear(HIDDEN, HIDDEN)
    _, weight, _, bias = problem()
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    graphs = []

    def step(x, target):
        return tiercel.linear_cross_entropy(
            front(x), weight, target, bias, reduction=reduction, z_loss=1e-3
        ).sum()

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    leaves = [*front.parameters(), weight, bias]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    counted = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    for rows in (6, 9, 50):
        x, _, target, _ = problem(rows=rows)
        counted(x, target)
        grads = [torch.autograd.grad(2 * f(x, target), leaves) for f in (step, compiled)]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "`reduction` must be one of 'none', 'mean', 'sum', got 'sums'",
         {"reduction": "sums"}),
        (ValueError, r"`scale` must have shape \[1\] or \[T\] = \[21\], got \[5\]",
         {"scale": torch.ones(5)}),
        (ValueError, "`label_smoothing` must be from 0 to 1, got 1.5", {"label_smoothing": 1.5}),
        (ValueError, "`softcap` must be a positive number or None, got 0.0", {"softcap": 0.0}),
        (ValueError, "`weight` must have at least 1 row, got 0",
         {"weight": torch.ones(0, HIDDEN), "bias": torch.ones(0)}),
        (ValueError, r"`weight` must have shape \[V, H\]", {"weight": torch.ones(5, HIDDEN + 1)}),
        (TypeError, "`weight` must have dtype float32, got float16",
         {"weight": torch.ones(CLASSES, HIDDEN).half()}),
        (TypeError, "`accum_dtype` must have dtype float32", {"accum_dtype": torch.float16}),
        (TypeError, "`x` must be a torch.Tensor, got list", {"x": [1.0]}),
    ],
)  # fmt: skip
def test_bad_arguments(error, text, arguments):
    x, weight, target, bias = problem()
    for reduction, grad in itertools.product(REDUCTIONS, (False, True)):
        call = {"x": x.detach().requires_grad_(grad), "weight": weight, "target": target}
        call |= {"bias": bias, "reduction": reduction} | arguments
        with pytest.raises(error, match=f"^linear_cross_entropy: {text}"):
            tiercel.linear_cross_entropy(**call)


def test_module():
    x, weight, target, bias = problem()
    of_classes = torch.rand(CLASSES)
    module = tiercel.nn.LinearCrossEntropy(of_classes, z_loss=1e-3, accum_dtype=torch.float32)
    due = tiercel.linear_cross_entropy(
        x, weight, target, bias, class_weight=of_classes, z_loss=1e-3
    )
    assert torch.equal(module(x, weight, target, bias), due)
    assert list(module.state_dict()) == ["class_weight"]
    assert repr(module) == "LinearCrossEntropy(z_loss=0.001, accum_dtype=torch.float32)"
    sums = tiercel.nn.LinearCrossEntropy(reduction="sum", label_smoothing=0.1, backend="ref")
    half = torch.tensor([0.5])
    due = tiercel.linear_cross_entropy(x, weight, target, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(sums(x, weight, target, scale=half), due / 2)


WITH_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype"
)


def wide_gradient(reduction, dtype, times=1, **options):
    """weight.grad where PyTorch is told that it is float32, and the same where it is not."""
    found = []
    for wide in (True, False):
        x, weight, target, bias = problem(dtype)
        weight.requires_grad_()
        if wide:
            weight.grad_dtype = torch.float32
        for _ in range(times):
            loss = tiercel.linear_cross_entropy(
                x, weight, target, bias, reduction=reduction, **options
            )
            (loss.sum() * 0.5).backward()
        found.append(weight.grad)
    return found


@WITH_GRAD_DTYPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_weight_s_gradient_in_float32(reduction, dtype):
    wide, usual = wide_gradient(reduction, dtype)
    assert wide.dtype == torch.float32 and usual.dtype == dtype
    assert not torch.equal(wide, wide.to(dtype).float())
    torch.testing.assert_close(wide.to(dtype), usual, rtol=2**-6, atol=2**-9)


@WITH_GRAD_DTYPE
def test_chunks_of_a_gradient_in_float32(many_chunks):
    """Sums in float32 are rounded once where they become 16 bits, and never where they stay."""
    wide, usual = wide_gradient("sum", torch.bfloat16, accum_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), usual)


@WITH_GRAD_DTYPE
def test_gradients_of_several_backwards_add_up_in_float32():
    once, _ = wide_gradient("mean", torch.bfloat16)
    often, _ = wide_gradient("mean", torch.bfloat16, times=5)
    torch.testing.assert_close(often, 5 * once, rtol=1e-6, atol=1e-9)
