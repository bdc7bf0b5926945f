# SPDX-License-Identifier: Apache-2.0
"""Calls of every public operator, made from the contracts, with any number of tokens."""

import dataclasses
import inspect

import torch

import tiercel
import tiercel.ops
from tiercel.plugins.contracts import CONTRACTS

OPS = tuple(tiercel.ops.__all__)
# Operators that return nothing but what they have written to.
WRITING = tuple(op for op in OPS if not getattr(torch.ops.tiercel, op).default._schema.returns)
# Arguments with which a public function returns its operator's result unchanged.
AS_OPERATOR = {
    "cross_entropy": {"reduction": "none"},
    "linear_cross_entropy": {"reduction": "none"},
}

# The dimensions that tokens are counted in, where that is not the first one of the first tensor.
_TOKENS = {
    "attention": ("Sq", "Sk"),
    "attention_varlen": ("Tq", "Tk"),
    "nvfp4_gemv": ("l",),
}
# Contracts whose cases cannot be of any number of tokens: rows are repeated instead.
_REPEATED = {
    "decode_attention",
    "kv_cache_write",
    "mla_cache_write",
    "mla_decode",
    "paged_attention",
    "qk_norm_rope_cache",
}
# Operators made of others: the one whose contract says what they take.
_OF_OTHERS = {"reduce_sum": "reduce", "fused_mlp": "gated_linear"}


def function(op):
    return getattr(tiercel, op)


def contract(op):
    return CONTRACTS[_OF_OTHERS.get(op, op)]


def tensor_specs(op):
    return [spec for spec in contract(op).arguments if hasattr(spec, "dims")]


def cases(op):
    """One case of each kind that is not empty: of its options, and of the values it names."""
    found = {}
    for case in contract(op).cases:
        if 0 not in case.sizes.values() and case.values != "none":
            kind = (tuple(map(str, case.options.items())), case.values, case.dtype)
            found.setdefault(kind, case)
    return list(found.values())


def _repeated(tensor, spec, dims, tokens):
    named = spec.dims
    if spec.name == "positions":  # [3, tokens] too
        named = ("",) * (tensor.dim() - 1) + dims[:1]
    for place, name in enumerate(named):
        if name in dims:
            rows = torch.arange(tokens, device=tensor.device) % tensor.shape[place]
            wide = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            tensor = wide.index_select(place, rows).view(tensor.dtype)
    return tensor


def arguments(op, tokens=None, *, case=None, device="cpu"):
    """The public function's arguments by name; of `tokens` tokens, or of the case's own."""
    case = case or cases(op)[0]
    dims = _TOKENS.get(op) or tensor_specs(op)[0].dims[:1]
    if case.values == "packed":  # sequences one after the other, in a batch of 1
        dims = ("T",)
    if tokens is not None and op not in _REPEATED:
        case = dataclasses.replace(case, sizes={**case.sizes, **dict.fromkeys(dims, tokens)})
        if op == "attention_varlen":
            first = tokens // 3
            of_each = f"{first} {tokens - first}"
            case = dataclasses.replace(case, values=f"{of_each} of {of_each}")
    made = contract(op).make(case, device, 0)
    if tokens is not None and op in _REPEATED:
        for spec in tensor_specs(op):
            if made[spec.name] is not None:
                made[spec.name] = _repeated(made[spec.name], spec, dims, tokens)
    if op == "reduce_sum":
        del made["op"]
    if op == "fused_mlp":
        weight, bias = made.pop("weight"), made.pop("bias")
        down = torch.randn(weight.shape[1], weight.shape[0] // 2).to(weight)
        made |= {"up_weight": weight, "up_bias": bias, "down_weight": down}
    return made


def tensors_of(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def same(got, expected):
    """Bit for bit, NaN included."""
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.element_size() == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def copied(values):
    """The same arguments in other memory: some operators write to them."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def float_arguments(op, values):
    """Names of the arguments that a gradient could be of."""
    return [
        n
        for n, v in values.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.element_size() > 1
    ]


def without_defaults(op, values):
    """The minimal call: only the arguments that have no default."""
    needed = inspect.signature(function(op)).parameters.values()
    return {p.name: values[p.name] for p in needed if p.default is p.empty}
