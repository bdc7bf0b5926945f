# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.tiercel.<op>`` takes the calls that ``tiercel.<op>`` takes."""

import inspect

import pytest
import torch
from support import contract_calls as calls

import tiercel

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]


def ours(op, values, **more):
    values = calls.copied(values)
    result = calls.function(op)(*values.values(), **more)
    return tuple(values.values()) if op in calls.WRITING else result


def theirs(op, values, call):
    values = calls.copied(values)
    result = call(*values.values())
    return tuple(values.values()) if op in calls.WRITING else result


@pytest.mark.parametrize("op", calls.OPS)
def test_minimal_call(op):
    values = calls.without_defaults(op, calls.arguments(op))
    operator = getattr(torch.ops.tiercel, op)
    expected = ours(op, values, **calls.AS_OPERATOR.get(op, {}))
    tensors = [v for v in calls.tensors_of(expected) if isinstance(v, torch.Tensor)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: operator(*x), backend="aot_eager", fullgraph=True)
    for call in (operator, compiled):
        got = calls.tensors_of(theirs(op, values, call))
        calls.same([v for v in got if isinstance(v, torch.Tensor)], tensors)


# Arguments that choose another operator: `<op>.out`, `<op>_lse`, `<op>_`, `add_<op>`.
ELSEWHERE = {"out", "return_lse", "return_logprobs", "inplace"}
ROUTING = {"scoring", "correction_bias", "n_group", "topk_group", "scaling_factor", "n_shared"}
ROUTING |= {"token_ids", "expert_table"}
ELSEWHERE_OF = {
    "cross_entropy": {"reduction"},
    "topk_softmax": ROUTING,
    "topk_softmax_align": ROUTING,
    "linear_cross_entropy": {"reduction", "return_entropy", "group"},
    "fp8_linear_weight_grad": {"total"},
    "fp8_quantize": {"scale"},
    "grouped_gemm": {"counts", "expected_rows", "w_scale", "x_scale"},
    "gated_linear": {"weight_scale", "x_scale"},
    "gated_delta_rule": {"output_final_state"},
    "layer_norm": {"residual"},
    "rms_norm": {"residual"},
    "sample": {"top_logprobs"},
    "verify_draft": {"parents"},
}


@pytest.mark.parametrize("op", calls.OPS)
def test_every_argument_is_in_a_schema(op):
    packet = getattr(torch.ops.tiercel, op)
    schemas = [getattr(packet, name)._schema for name in packet.overloads()]
    known = {argument.name for schema in schemas for argument in schema.arguments}
    public = set(inspect.signature(calls.function(op)).parameters)
    assert public - ELSEWHERE - ELSEWHERE_OF.get(op, set()) <= known


def test_optional_arguments_by_keyword():
    ops, x = torch.ops.tiercel, torch.randn(4, 8)
    weight, residual = torch.randn(8), torch.randn(4, 8)
    for op in ("rms_norm", "layer_norm"):
        ours, theirs = getattr(tiercel, op), getattr(ops, op)
        calls.same(theirs(x), ours(x))
        calls.same(theirs(x, bias=weight), ours(x, bias=weight))
        calls.same(theirs(x, weight, eps=0.5), ours(x, weight, eps=0.5))
        both = getattr(ops, f"add_{op}")(x, residual, weight)
        calls.same(both, ours(x, weight, residual=residual))
    scale = torch.tensor([0.5])
    assert ops.silu(x, scale=scale).dtype == torch.float8_e4m3fn
    keep = x > 0
    calls.same(ops.log_softmax(x, mask=keep), tiercel.log_softmax(x, mask=keep))
    calls.same(
        ops.reduce_sum(x.half(), 0, dtype=torch.float32),
        tiercel.reduce_sum(x.half(), 0, dtype=torch.float32),
    )


def test_gradients():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    grads = [
        torch.autograd.grad(op(x, weight).square().sum(), (x, weight))
        for op in (tiercel.rms_norm, torch.ops.tiercel.rms_norm)
    ]
    calls.same(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_in_a_compiled_graph(dtype):
    """torch drops an argument that is the schema's default; what takes its place must be it."""
    q, scale = tiercel.nvfp4_quantize(torch.randn(4, 32))
    for given in ({}, {"global_scale": torch.ones(1)}):

        def run(q, scale, given=given):
            return tiercel.nvfp4_dequantize(q, scale, dtype=dtype, **given)

        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert run(q, scale).dtype == dtype
        calls.same(compiled(q, scale), run(q, scale))
