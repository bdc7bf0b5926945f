# SPDX-License-Identifier: Apache-2.0
"""A function of others as a backend: registering it, and calling it in every way."""

import functools
import inspect
import typing
import warnings

import pytest
import torch

import tiercel
from tiercel import backends
from tiercel.core import dispatch as _op
from tiercel.plugins import types
from tiercel.plugins.contract import TensorSpec
from tiercel.plugins.contracts import CONTRACTS, contract_of

pytestmark = pytest.mark.torch

register = functools.partial(backends.register, op="topk_softmax")
EXPECTED = r"Expected \(scores, k, softmax_first, renormalize, indices_dtype\)"


def good(scores, k, softmax_first, renormalize, indices_dtype):
    return tiercel.ref.topk_softmax(
        scores,
        k,
        softmax_first=softmax_first,
        renormalize=renormalize,
        indices_dtype=indices_dtype,
    )


@pytest.fixture
def scores():
    return torch.randn(4, 8)


@pytest.fixture
def calls():
    """The calls that the backend `mine` got."""
    seen = []

    def mine(*args):
        seen.append(args)
        return good(*args)

    register(name="mine", fn=mine, language="torch")
    return seen


def test_every_way_to_ask_for_it(scores, calls, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiercel.topk_softmax(scores, 2, renormalize=True, backend="mine")
        assert calls.pop()[1:] == (2, True, True, torch.int32)
        with tiercel.use_backend("mine"):
            tiercel.topk_softmax(scores, 2, softmax_first=False, indices_dtype=torch.int64)
        assert calls.pop()[1:] == (2, False, False, torch.int64)
        tiercel.set_backend("topk_softmax", "mine")
        torch.ops.tiercel.topk_softmax(scores, 3)
        assert calls.pop()[1] == 3
        tiercel.set_backend("topk_softmax", "ref")
        tiercel.topk_softmax(scores, 2)
        assert calls == []
    told = tiercel.explain(tiercel.topk_softmax, scores, 2, backend="mine")
    assert str(told) == "topk_softmax runs on mine: it was asked for"


def test_environment(run_python):
    code = """
import torch, tiercel, warnings
warnings.simplefilter("error")
@tiercel.backends.register(op="topk_softmax", name="mine")
def mine(scores, k, softmax_first, renormalize, indices_dtype):
    print("mine")
    return scores[:, :k].clone(), torch.zeros(len(scores), k, dtype=indices_dtype)
tiercel.topk_softmax(torch.zeros(1, 2), 1)
"""
    assert run_python(code, TIERCEL_BACKEND="topk_softmax=mine").stdout == "mine\n"
    assert run_python(code, TIERCEL_BACKEND="mine").stdout == "mine\n"


def test_it_is_never_a_fallback(scores, calls):
    with pytest.warns(tiercel.FallbackWarning):
        tiercel.topk_softmax(scores, 2)
    assert calls == []


def test_out_gradients_and_compile(scores, calls):
    weights, indices = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)
    tiercel.topk_softmax(scores, 2, out=(weights, indices), backend="mine")
    due = tiercel.topk_softmax(scores, 2, indices_dtype=torch.int64, backend="ref")
    assert torch.equal(weights, due[0]) and torch.equal(indices, due[1])
    wanted = scores.clone().requires_grad_()
    tiercel.topk_softmax(wanted, 2, backend="mine")[0][:, 0].sum().backward()
    other = scores.clone().requires_grad_()
    tiercel.ref.topk_softmax(other, 2)[0][:, 0].sum().backward()
    torch.testing.assert_close(wanted.grad, other.grad)
    compiled = torch.compile(
        lambda s: tiercel.topk_softmax(s, 2, backend="mine"), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(scores)[1], due[1])
    assert len(calls) == 3


def test_arguments_are_checked_before(scores, calls):
    with pytest.raises(ValueError, match="k must be between 1 and"):
        tiercel.topk_softmax(scores, 9, backend="mine")
    with pytest.raises(TypeError, match="`scores` must have dtype"):
        tiercel.topk_softmax(scores.int(), 2, backend="mine")
    assert calls == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w, i: w, TypeError, r"the tensors \(weights, indices\), got \(Tensor\)"),
        (lambda w, i: None, TypeError, r"\(weights, indices\), got \(NoneType\)"),
        (lambda w, i: (w, [1]), TypeError, r"\(weights, indices\), got \(Tensor, list\)"),
        (lambda w, i: (w.half(), i), TypeError, "`weights` of dtype float32, got float16"),
        (lambda w, i: (w, i.long()), TypeError, "`indices` of dtype int32, got int64"),
        (lambda w, i: (w[:, :1], i), ValueError, r"of shape \[T, k\] = \[4, 2\], got \[4, 1\]"),
        (lambda w, i: (w, i[0]), ValueError, r"`indices` of shape \[T, k\] = \[4, 2\], got \[2\]"),
        (lambda w, i: (w.t().contiguous().t(), i), ValueError, r"contiguous, got strides \[1, 4\]"),
        (lambda w, i: (w.to("meta"), i), ValueError, "`weights` on cpu, got one on meta"),
    ],
)
def test_outputs_are_checked_after(scores, change, error, message):
    register(name="bad", fn=lambda *args: change(*good(*args)))
    with pytest.raises(error, match=f"topk_softmax: backend 'bad' must return .*{message}"):
        tiercel.topk_softmax(scores, 2, backend="bad")


class Mine(torch.Tensor):
    pass


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w, i: (torch.nn.Parameter(w), i), TypeError, "as a plain Tensor, got Parameter"),
        (lambda w, i: (w.as_subclass(Mine), i), TypeError, "as a plain Tensor, got Mine"),
        (lambda w, i: (w.clone().requires_grad_(), i), ValueError, "without requires_grad"),
        (lambda w, i: (freed(w), i), ValueError, "storage has 0 bytes of 32: it was freed"),
        (lambda w, i: (w, w.view(torch.int32)), ValueError, "shares that of the output `weights`"),
    ],
)
def test_outputs_are_plain_and_new(scores, change, error, message):
    register(name="bad", fn=lambda *args: change(*good(*args)))
    with pytest.raises(error, match=f"topk_softmax: backend 'bad' must return .*{message}"):
        tiercel.topk_softmax(scores, 2, backend="bad")


@pytest.mark.parametrize(
    "alias", [lambda x: x, lambda x: x.detach(), lambda x: x.view(-1)[: x.numel()].view(x.shape)]
)
def test_an_output_is_no_argument(alias):
    """A later write to it would change the caller's tensor, and torch.compile relies on it."""
    backends.register(op="silu", name="bad", fn=lambda *args: alias(args[0]))
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="`out` in memory of its own, .* shares that of the argu"):
        tiercel.silu(x, backend="bad")
    backends.register(op="silu", name="bad", fn=lambda *args: args[0] * 1, replace=True)
    assert torch.equal(tiercel.silu(x, backend="bad"), x)
    empty = x[:0]
    backends.register(op="silu", name="bad", fn=lambda *args: args[0], replace=True)
    assert tiercel.silu(empty, backend="bad").shape == (0, 8)


def test_outputs_may_be_parts_of_one_allocation(scores):
    def parts(*args):
        weights, indices = good(*args)
        both = torch.empty(2, 4, 2)
        both[0], both.view(torch.int32)[1] = weights, indices
        return both[0], both.view(torch.int32)[1]

    register(name="mine", fn=parts)
    assert tiercel.topk_softmax(scores, 2, backend="mine")[1].dtype == torch.int32


def test_a_list_is_a_tuple(scores):
    register(name="mine", fn=lambda *args: list(good(*args)))
    assert isinstance(tiercel.topk_softmax(scores, 2, backend="mine"), tuple)


def test_gpu_languages_say_that_they_need_a_gpu(scores, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for language in ("cuda", "triton", "cute"):
        register(name="mine", fn=good, language=language, replace=True)
        with pytest.raises(RuntimeError, match=f"a {language} kernel and needs CUDA tensors"):
            tiercel.topk_softmax(scores, 2, backend="mine")
    register(name="mine", fn=good, language="triton", replace=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiercel.topk_softmax(scores, 2, backend="mine")


def test_names():
    register(name="mine", fn=good, description="one", language="torch")
    with pytest.raises(ValueError, match="'mine' is registered already, from .*; replace=True"):
        register(name="mine", fn=good)
    register(name="mine", fn=good, description="two", replace=True)
    assert _op.registry["topk_softmax"].backends["mine"].description == "two"
    for name in ("sm90", "ref", "auto"):
        with pytest.raises(ValueError, match=f"'{name}': that name is Tiercel's own"):
            register(name=name, fn=good, replace=True)
    for name in ("", "a b", "a=b", "a,b", "-a", "é", "a\n", 3):
        with pytest.raises(ValueError, match="a name is made of letters"):
            register(name=name, fn=good)
    with pytest.raises(
        ValueError, match="no operator 'nope' takes backends; these do: .*linear_act"
    ):
        backends.register(op="nope", name="mine", fn=good)
    backends.unregister("topk_softmax", "mine")
    with pytest.raises(ValueError, match="topk_softmax has no registered backend 'mine'"):
        backends.unregister("topk_softmax", "mine")
    with pytest.raises(ValueError, match="topk_softmax has no backend 'mine'"):
        tiercel.set_backend("topk_softmax", "mine")
    assert set(_op.registry["topk_softmax"].backends) == {"sm90", "ref"}


def test_decorator():
    @register(name="mine")
    def mine(scores, k, softmax_first, renormalize, indices_dtype):
        return good(scores, k, softmax_first, renormalize, indices_dtype)

    assert mine.__name__ == "mine"
    tiercel.topk_softmax(torch.zeros(1, 2), 1, backend="mine")


class Callable:
    def __call__(self, scores, k, softmax_first, renormalize, indices_dtype):
        return good(scores, k, softmax_first, renormalize, indices_dtype)


@pytest.mark.parametrize(
    "fn",
    [
        good,
        Callable(),
        Callable().__call__,
        functools.partial(good),
        lambda scores, k, softmax_first, renormalize, indices_dtype, warps=4: good(
            scores, k, softmax_first, renormalize, indices_dtype
        ),
        lambda scores, k, warps=4, *, softmax_first, renormalize, indices_dtype: good(
            scores, k, softmax_first, renormalize, indices_dtype
        ),
        lambda scores, k, *, renormalize, indices_dtype, softmax_first: good(
            scores, k, softmax_first, renormalize, indices_dtype
        ),
        lambda scores, /, k, **options: good(scores, k, **options),
        lambda scores, *rest: good(scores, *rest),
        lambda **arguments: good(**arguments),
        lambda *arguments: good(*arguments),
    ],
)
def test_signatures_that_fit(fn, scores):
    register(name="mine", fn=fn)
    got = tiercel.topk_softmax(scores, 2, softmax_first=False, backend="mine")
    due = tiercel.topk_softmax(scores, 2, softmax_first=False, backend="ref")
    assert torch.equal(got[0], due[0]) and torch.equal(got[1], due[1])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (3, "must be callable, got int"),
        (None, None),
        (lambda scores, k, softmax_first, renormalize: 0, "`indices_dtype` is missing. Expected"),
        (lambda scores, k: 0, "`softmax_first` is missing; `renormalize` is missing; `indices_d"),
        (lambda: 0, "`scores` is missing"),
        (
            lambda logits, k, softmax_first, renormalize, indices_dtype: 0,
            r"argument 1 is `logits`, must be `scores`\. Expected .*, got \(logits, k, ",
        ),
        (
            lambda scores, topk, softmax_first, renormalize, indices_dtype: 0,
            r"argument 2 is `topk`, must be `k`\.",
        ),
        (
            lambda scores, k, softmax_first, renormalize, indices_dtype, warps: 0,
            r"`warps` is extra and has no default\.",
        ),
        (
            lambda k, scores, softmax_first, renormalize, indices_dtype: 0,
            r"the order is k, scores, softmax_first, renormalize, indices_dtype\.",
        ),
        (
            lambda scores, k, renormalize, softmax_first, indices_dtype: 0,
            "the order is scores, k, renormalize, softmax_first, indices_dtype",
        ),
    ],
)
def test_signatures_that_do_not_fit(fn, message):
    if message is None:  # a decorator then, and nothing is registered
        assert callable(register(name="mine", fn=fn))
    else:
        with pytest.raises(TypeError, match=f"topk_softmax: backend 'mine' .*{message}") as info:
            register(name="mine", fn=fn)
        assert "callable" in message or "Expected (scores, k, softmax_first" in str(info.value)
    assert set(_op.registry["topk_softmax"].backends) == {"sm90", "ref"}


def test_contracts_are_those_of_the_operators():
    # A gradient with backends of its own has no contract: its operator is nobody's to call.
    gradients = {
        f"{name}_backward"
        for name in (
            "attention",
            "attention_sinks",
            "attention_varlen",
            "grouped_gemm",
            "linear_act",
        )
    }
    assert set(CONTRACTS) == set(_op.registry) == set(_op.variants) - gradients
    for op, contract in CONTRACTS.items():
        operator = _op.registry[op]
        optional = {name for _, name, may_be_none in operator._tensors if may_be_none}
        # The op itself does what an optional tensor asks for that a contract lacks.
        beside = {"accum_dtype"}  # of gradients, which a backend does not make
        assert set(operator.argument_names[:-1]) - set(contract.names) <= optional | beside
        assert all(v.plugin is not None for v in _op.variants[op])
        assert set(contract.timing) == {"cpu", "cuda"}
    assert str(contract_of("topk_softmax")) == (
        "topk_softmax(scores [T, E] float32 or bfloat16 or float16, k: int, softmax_first: bool, "
        "renormalize: bool, indices_dtype: dtype) -> weights [T, k] float32, "
        "indices [T, k] indices_dtype"
    )
    assert "bias [N] x or None, activation: str) -> out [M, N] x" in str(contract_of("linear_act"))


def test_a_backend_of_linear_act():
    seen = []

    @backends.register(op="linear_act", name="mine")
    def mine(x, weight, bias, activation):
        seen.append((tuple(x.shape), bias is None))
        return tiercel.ref.linear_act(x, weight, bias, activation=activation)

    x, weight = torch.randn(2, 3, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    bias, out = torch.randn(16).bfloat16(), torch.empty(2, 3, 16).bfloat16()
    for b in (bias, None):
        due = tiercel.linear_act(x, weight, b, activation="silu", backend="ref")
        got = tiercel.linear_act(x, weight, b, activation="silu", backend="mine")
        assert torch.equal(got, due)
        tiercel.linear_act(x, weight, b, activation="silu", out=out, backend="mine")
        assert torch.equal(out, due)
        told = tiercel.explain(tiercel.linear_act, x, weight, b, backend="mine")
        assert told.backend == "mine"
    assert seen == [((6, 8), False)] * 2 + [((6, 8), True)] * 2
    backends.register(op="linear_act", name="bad", fn=lambda x, weight, bias, activation: x.float())
    with pytest.raises(TypeError, match="must return `out` of dtype bfloat16, got float32"):
        tiercel.linear_act(x, weight, backend="bad")


# Other people's backends import these names.
TYPE_NAMES = """
    Activated Activation ActivationInput ActivationResult Attended Attention AttentionVarlen Bias
    BlockExperts ChosenExperts CopyTranspose DownScale DownWeights ElementWeights ExpertMap
    ExpertOutputs ExpertWeights Factor Features Fp4Codes Fp4Matrix Fp4Scales Fp4Vector Fp4Weight
    Fp8Codes Fp8Quantize FusedMoe GateInput GatedActivation GatedGelu GatedResult Gelu Indices
    InnerFeatures InnerResult Keys LinearAct LocalExperts LogSums Matrices MixedTokens
    MoeAlignBlockSize MoeDown MoeSum MoeUp Norm NormBias NormWeight Normalised NumSlots
    Nvfp4Dequantize Nvfp4Gemv Nvfp4Linear Nvfp4Quantize OuterResult PackedAttended PackedKeys
    PackedLogSums PackedQueries PackedValues PermutedScales ProductColumn Queries RawScales Reduce
    Reduced Residual ResidualSum Rows Scores ScoresMap Softmax SoftmaxMask SoftmaxResult
    SoftmaxScores SortedTokens SummedOutputs TokenExperts TokenFeatures TokenWeights TopkSoftmax
    TopkSoftmaxAlign Transposed Unreduced UpScale UpWeights Values Weight Weights
"""
SHARED_PROTOCOLS = {
    "gelu_and_mul": "GatedGelu",
    "layer_norm": "Norm",
    "log_softmax": "Softmax",
    "relu": "Activation",
    "relu_and_mul": "GatedActivation",
    "rms_norm": "Norm",
    "silu": "Activation",
    "silu_and_mul": "GatedActivation",
    "softmax_online": "Softmax",
}


def test_typed_aliases():
    assert set(TYPE_NAMES.split()) <= set(types.__all__)
    base, spec = typing.get_args(types.Weights)
    assert base is torch.Tensor and spec == contract_of("topk_softmax").spec("weights")
    base, spec = typing.get_args(types.Bias)
    assert base == torch.Tensor | None and spec == contract_of("linear_act").spec("bias")


@pytest.mark.parametrize("op", CONTRACTS)
def test_the_protocol_of_an_op(op):
    contract = contract_of(op)
    own = "".join(word.capitalize() for word in op.split("_"))
    protocol = getattr(types, SHARED_PROTOCOLS.get(op, own))
    assert op in protocol.__doc__
    assert tuple(inspect.signature(protocol.__call__).parameters)[1:] == contract.names
    hints = typing.get_type_hints(protocol.__call__, include_extras=True)
    result = hints.pop("return")
    for argument in contract.arguments:
        if isinstance(argument, TensorSpec):
            base, spec = typing.get_args(hints.pop(argument.name))
            assert base == (torch.Tensor | None if argument.optional else torch.Tensor)
            assert (spec.name, spec.dims) == (argument.name, argument.dims)
    plain = {int, bool, str, float, torch.dtype, type(None), tuple[int, int], tuple[int, int, int]}
    for hint in hints.values():
        assert {hint} <= plain or set(typing.get_args(hint)) <= plain
    if op == "rms_norm":
        assert result == types.Normalised | tuple[types.Normalised, types.ResidualSum]
    elif len(contract.outputs) == 1:
        assert typing.get_args(result)[1].name == contract.outputs[0].name
    elif op != "layer_norm":
        found = [typing.get_args(each)[1] for each in typing.get_args(result)]
        assert [spec.name for spec in found] == [spec.name for spec in contract.outputs]


@pytest.mark.parametrize("op", CONTRACTS)
def test_the_input_generator_gives_what_the_case_says(op):
    contract = contract_of(op)
    first = contract.arguments[0]
    packed = first.dtypes == ("float4_e2m1fn_x2",)  # a case's dtype is that of the result then
    strided = []
    for case in (*contract.cases, contract.timing["cpu"]):
        arguments = contract.make(case, "cpu", 1)
        again = contract.make(case, "cpu", 1)
        # Further arguments make the public function return the backend's result unchanged.
        assert tuple(arguments)[: len(contract.names)] == contract.names
        tensor = arguments[first.name]
        if not packed:
            assert str(tensor.dtype) == f"torch.{case.dtype}"
        if not packed:  # k comes from half as many bytes there
            assert (
                contract.sizes(list(arguments.values())[: len(contract.names)]).items()
                >= case.sizes.items()
            )
        if packed or tensor.element_size() == 1:  # torch has no == for it
            tensor, same = tensor.view(torch.uint8), again[first.name].view(torch.uint8)
        else:
            tensor, same = tensor.nan_to_num(9), again[first.name].nan_to_num(9)
        assert torch.equal(tensor, same)
        strided.append(not arguments[first.name].is_contiguous())
    assert packed or (any(strided) == first.strided and not all(strided))
    assert any(0 in case.sizes.values() for case in contract.cases)
    assert packed or {case.dtype for case in contract.cases} == set(first.dtypes)
