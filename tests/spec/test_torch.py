# SPDX-License-Identifier: Apache-2.0
"""opcheck, torch.compile and gradients of every operator, with each optional tensor and without."""

import pytest
import torch
from support import contract_calls as calls
from support import declared

from tiercel.core.op import Native
from tiercel.core.spec import Call

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]
SCHEMA, AUTOGRAD, FAKE, DISPATCH = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# Results are rounded to bfloat16, which a graph may do elsewhere.
BOUND = {"rtol": 2**-6, "atol": 2**-5}

NATIVE = sorted(
    name
    for name, op in declared.OPERATORS.items()
    if op.spec.results and isinstance(op._sm90, Native)
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors_of(values):
    return [v for v in values if isinstance(v, torch.Tensor)]


def with_gradients(name, values, results):
    """Leaves, where the operator has a derivative for these dtypes."""
    operator = declared.OPERATORS[name].operator
    if operator._function is None or any(map(_narrow, tensors_of(values) + results)):
        return values
    return [
        v.detach().clone().requires_grad_()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else v
        for v in values
    ]


def _narrow(tensor):
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


@pytest.mark.parametrize("name", sorted(declared.OPERATORS))
def test_opcheck(name):
    op = declared.OPERATORS[name]
    forms = declared.each_form(name)
    for number, form in enumerate(forms, 1):
        values = list(form.values())
        results = tensors_of(calls.tensors_of(op.operator.overload(*values, backend="ref")))
        tests = {SCHEMA, AUTOGRAD, FAKE, DISPATCH}
        if any(map(_narrow, tensors_of(values))):
            tests -= {SCHEMA}  # it multiplies tensors, which torch cannot do in float8
        if any(t.dtype == torch.float4_e2m1fn_x2 for t in results):
            tests -= {SCHEMA, DISPATCH}  # they compare values, which torch cannot do in float4
        if 1 < number < len(forms):
            tests -= {DISPATCH}  # slow
        bound = {} if any(map(_narrow, results)) else BOUND
        given = with_gradients(name, values, results)
        torch.library.opcheck(op.operator.overload, given, test_utils=sorted(tests), **bound)
        if op.out is not None:
            outs = dict(zip(op.spec.result_names, map(torch.empty_like, results), strict=True))
            tests -= {DISPATCH, SCHEMA} if any(map(_narrow, results)) else {DISPATCH}
            torch.library.opcheck(op.out.overload, values, outs, test_utils=sorted(tests))


def compiled(op, values, backend):
    """The public function, and the same in one graph; both take tensors by name."""
    rest = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor)}

    def call(tensors):
        return calls.function(op)(**tensors, **rest | {"backend": "ref"})

    torch._dynamo.reset()
    return call, torch.compile(call, backend=backend, fullgraph=True)


@pytest.mark.parametrize("op", calls.OPS)
def test_one_graph(op):
    """The public function compiles without a break, whatever optional tensors there are."""
    spec = declared.SPECS[op]
    for values in declared.with_and_without(spec, declared.public_calls(op)):
        tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
        results = [
            tensors_of(calls.tensors_of(call(calls.copied(tensors))))
            for call in compiled(op, values, "eager")
        ]
        calls.same(*results)


@pytest.mark.parametrize("op", [op for op in calls.OPS if declared.has_gradient(op)])
def test_gradients_of_one_graph(op):
    every = [*declared.public_calls(op), *(calls.arguments(op, case=c) for c in calls.cases(op))]
    values = next(values for values in every if calls.float_arguments(op, values))
    grads = []
    for call in compiled(op, values, "aot_eager"):
        leaves = calls.copied({n: v for n, v in values.items() if isinstance(v, torch.Tensor)})
        wanted = [leaves[name].requires_grad_() for name in calls.float_arguments(op, leaves)]
        results = tensors_of(calls.tensors_of(call(leaves)))
        results = [result for result in results if result.requires_grad]
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(r.shape, generator=generator).to(r) for r in results]
        grads.append(torch.autograd.grad(results, wanted, upstream, allow_unused=True))
    assert any(grad is not None for grad in grads[0])
    torch.testing.assert_close(*grads, **BOUND)


@pytest.mark.parametrize("op", calls.OPS)
def test_no_derivative(op):
    """A call with ``out=`` has no gradient, and neither has an op that declares none."""
    values = declared.public_calls(op)[0]
    wanted = calls.float_arguments(op, values)
    if op in declared.COMPOSITE or not wanted:
        pytest.skip("made of others, or no argument could have a gradient")
    call = {**calls.copied(values), "backend": "ref"}
    results = calls.tensors_of(calls.function(op)(**call))[: len(declared.SPECS[op].results)]
    call = {**calls.copied(values), "backend": "ref"}
    call[wanted[0]].requires_grad_()
    if not declared.has_gradient(op):
        with pytest.raises(RuntimeError, match=f"^{op}: there is no derivative"):
            calls.function(op)(**call)
    if "out" in call and results:
        outs = tuple(map(torch.empty_like, results))
        call["out"] = outs[0] if len(outs) == 1 else outs
        with pytest.raises(RuntimeError, match=f"^{op}: there is no derivative for `out=`"):
            calls.function(op)(**call)
        with torch.no_grad():
            calls.function(op)(**call)


@pytest.mark.parametrize("name", NATIVE)
def test_results_are_as_the_fake_says(name):
    """Both allocations, in C and in Python, have the metadata that graphs expect."""
    op = declared.OPERATORS[name]
    for form in declared.each_form(name):
        call = Call(**form)
        due = calls.tensors_of(op._metadata(call))
        made = op.operator.eager.outputs(*form.values(), None)
        described = op.spec.allocation({n: i for i, n in enumerate(op.spec.names)}) is not None
        assert (made is not None) == (described and not op._sm90.returns)
        for results in filter(None, (op.empty(call), made)):
            assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in due]
