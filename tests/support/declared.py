# SPDX-License-Identifier: Apache-2.0
"""Calls of every declared op, made from its declaration and the cases of its contract."""

import contextlib
import functools
import inspect
from unittest import mock

import torch
from support import contract_calls as calls
from support import declarations
from torch.utils._python_dispatch import TorchDispatchMode

from tiercel.core import op as op_layer
from tiercel.core.spec import Call
from tiercel.ops.attention import forward

# Tensors that are float8 if scales are given; a scale has one element, in moe a row per expert.
_FLOAT8 = {
    "attention": ("q", "k", "v"),
    "attention_varlen": ("q", "k", "v"),
    "paged_attention": ("q", "k_cache", "v_cache"),
    "kv_cache_write": ("key_cache", "value_cache"),
    "mla_cache_write": ("kv_cache",),
    "mla_decode": ("kv_cache",),
    "mla_sparse_attention": ("kv_cache",),
    "qk_norm_rope_cache": ("q_out", "key_cache", "value_cache"),
    "fused_moe": ("w_up", "w_down"),
    "moe_up": ("x", "w_up"),
    "moe_down": ("x", "w_down"),
    "w4_linear": ("x",),
    "w4_moe": ("x",),
    "fused_mlp": ("up_weight", "down_weight"),
}


def _float8(tensor):
    return tensor.contiguous().to(torch.float8_e4m3fn)


def _blocks(size):
    return -(-size // 128)


def _ones(*shape):
    """Scales of 1 for each 128 columns."""
    return torch.ones(*shape[:-1], _blocks(shape[-1]))


def _of_weights(w):
    return _ones(w.shape[0], _blocks(w.shape[1]), w.shape[2])


_GROUPED_FLOAT8 = {
    "x": lambda values: _float8(values["x"]),
    "w": lambda values: _float8(values["w"]),
    "x_scale": lambda values: _ones(*values["x"].shape),
    "w_scale": lambda values: _of_weights(values["w"]),
}

_BLOCKS_FLOAT8 = {
    "x": lambda values: _float8(values["x"]),
    "weight": lambda values: _float8(values["weight"]),
    "x_scale": lambda values: _ones(*values["x"].shape),
    "weight_scale": lambda values: _ones(_blocks(len(values["weight"])), values["weight"].shape[1]),
    "bias": lambda values: None if values["bias"] is None else values["bias"].bfloat16(),
}

# Options with which a public function calls other operators; a function makes one of the arguments.
_OPTIONS = (
    {},
    {"return_lse": False},
    {"return_logprobs": True},
    {"top_logprobs": 3},
    {
        "token_ids": lambda values: torch.arange(len(values["scores"])),
        "expert_table": lambda values: torch.zeros(3, values["k"], dtype=torch.int32),
    },
    {"parents": lambda values: torch.full_like(values["draft_tokens"], -1, dtype=torch.int32)},
    {"output_final_state": True},
    {"inplace": True},
    {"reduction": "mean"},
    {"return_entropy": True, "label_smoothing": 0.0},
    {"return_entropy": True, "label_smoothing": 0.0, "reduction": "mean"},
    {"scaling_factor": 2.0},
    _BLOCKS_FLOAT8,
    _GROUPED_FLOAT8,
    _GROUPED_FLOAT8
    | {
        "x": lambda values: _float8(values["x"].expand(len(values["w"]), -1, -1)),
        "x_scale": lambda values: _ones(len(values["w"]), *values["x"].shape),
        "offsets": None,
        "counts": lambda values: torch.full((len(values["w"]),), len(values["x"])),
    },
)

SPECS = {name: spec for specs in declarations.by_family().values() for name, spec in specs.items()}
# Operators that are made of others check nothing themselves.
COMPOSITE = tuple(sorted(set(calls.OPS) - set(op_layer.ops)))
OPERATORS = op_layer.ops


def defaults(op):
    parameters = inspect.signature(calls.function(op)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _size(values):
    return sum(v.numel() for v in values.values() if isinstance(v, torch.Tensor))


def _cost(spec, case, values):
    """The fewer elements the better; but NaNs are not equal to themselves, strides of one element
    mean nothing, and sizes of 1 hide mistakes."""
    odd = any(bool(values[name].isnan().any()) for name in calls.float_arguments("", values))
    given = [t for t in spec.tensors if values.get(t.name) is not None and not t.strided]
    single = any(values[t.name].numel() == 1 and t.own_dims != ("1",) for t in given)
    return odd, single, _size(values) + 10_000 * (1 in case.sizes.values())


def _given(spec, values):
    return {t.name for t in spec.tensors if t.optional and values.get(t.name) is not None}


def _with_scales(op, values, missing):
    values = dict(values)
    for name in _FLOAT8[op]:
        values[name] = values[name].to(torch.float8_e4m3fn)
    if values.get("x") is not None and values["x"].dtype == torch.float16:
        values["x"] = values["x"].bfloat16()
    for name in missing:
        if op == "fused_mlp":  # of blocks
            rows, columns = values[name.replace("scale", "weight")].shape
            shape = (_blocks(rows), _blocks(columns))
        elif "moe" in op:
            shape = (values[name.removesuffix("_scale")].shape[0], 1)
        else:
            shape = (values["key"].shape[1] if "key" in values else 1,)
        values[name] = torch.ones(shape)
    return values


def _made(spec, values, missing):
    """Adds the optional tensors to a call that no case of the contract has."""
    call = Call(**{**dict.fromkeys(spec.names), **values})
    known = spec.sizes(call)
    for tensor in (spec.argument(name) for name in missing):
        shape = (1,) if tensor.any_shape else spec.result_shape(tensor, call, known)
        dtype = spec.result_dtype(tensor, call)
        values = {**values, tensor.name: torch.ones(shape, dtype=dtype)}
    return values


def covering(spec, every):
    """The first call, and others until each optional argument has been given."""
    chosen, given = [], set()
    for values in every:
        names = {a.name for a in spec.arguments if a.optional and values.get(a.name) is not None}
        if not chosen or names - given:
            chosen.append(values)
            given |= names
    return chosen


@functools.cache
def public_calls(op):
    """Arguments of the public function: the smallest case, and others until each optional tensor
    has been given."""
    spec, start = SPECS[op], defaults(op)
    made = [(case, start | calls.arguments(op, case=case)) for case in calls.cases(op)]
    made.sort(key=lambda pair: _cost(spec, *pair))
    chosen = covering(spec, [values for _, values in made])
    given = set().union(*(_given(spec, values) for values in chosen))
    missing = [t.name for t in spec.tensors if t.optional and t.name not in given]
    scales = [name for name in missing if op in _FLOAT8 and name.endswith("scale")]
    others = [name for name in missing if name not in scales]
    values = chosen[0]
    if others:
        values = _made(spec, values, others)
        chosen.append(values)
    if scales:
        chosen.append(_with_scales(op, values, scales))
    return chosen


def with_and_without(spec, every):
    """The calls with their optional tensors, without each in turn, and without all."""
    found = {}
    for values in every:
        given = _given(spec, values)
        for dropped in ([], *([name] for name in sorted(given)), given):
            together = spec.together if set(dropped) & set(spec.together) else ()
            fewer = values | dict.fromkeys((*dropped, *together))
            if not together or set(together) != given or values[spec.names[0]].dtype.itemsize > 1:
                found.setdefault(frozenset(_given(spec, fewer)), fewer)
    return list(found.values())


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of our operators."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("tiercel::") and function._overloadname == "default":
            operator = OPERATORS[name.removeprefix("tiercel::")]
            filled = (*args, *operator.operator._defaults[len(args) :])[:-1]
            values = dict(zip(operator.spec.names, filled, strict=True)) | (kwargs or {})
            values.pop("backend", None)
            kept = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
            self.found.setdefault(operator.spec.name, []).append(kept)
        return function(*args, **(kwargs or {}))


def has_gradient(op):
    return op in COMPOSITE or OPERATORS[op].operator._function is not None


def _run(op, values, **options):
    """With a gradient, where there is one."""
    values = calls.copied(values)
    for name in calls.float_arguments(op, values):
        with contextlib.suppress(RuntimeError):
            values[name].requires_grad_()
            if "inplace" in options:  # no leaf is overwritten
                values[name] = values[name].clone()
    results = calls.tensors_of(calls.function(op)(**values | options | {"backend": "ref"}))
    results = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])


@functools.cache
def operator_calls():
    """The arguments of every operator by name, from calls of the public functions."""
    recorder = _Recorder()
    # Without a GPU attention's gradient is torch's.
    with recorder, mock.patch.object(forward, "has_kernels", return_value=True):
        for op in calls.OPS:
            for values in with_and_without(SPECS[op], public_calls(op)):
                for option in _OPTIONS:
                    if set(option) <= set(inspect.signature(calls.function(op)).parameters):
                        option = {n: o(values) if callable(o) else o for n, o in option.items()}
                        with contextlib.suppress(RuntimeError):  # there is no derivative
                            _run(op, values, **option)
                        _without_grad(op, values, **option)
    for name in OPERATORS:  # for layers, which call a gradient and its function at once
        if name.endswith("_backward_and_result"):
            recorder.found[name] = recorder.found[name.removesuffix("_and_result")]
    return recorder.found


def _without_grad(op, values, **options):
    with torch.no_grad():
        calls.function(op)(**calls.copied(values) | options | {"backend": "ref"})


def each_form(name):
    """A call of an operator for each choice of optional tensors that its public function makes;
    each optional tensor is given in one."""
    spec = OPERATORS[name].spec
    every = {frozenset(_given(spec, values)): values for values in reversed(operator_calls()[name])}
    missing = [t.name for t in spec.tensors if t.optional and not any(t.name in g for g in every)]
    if missing:
        values = _made(spec, every[max(every, key=len)], missing)
        every[frozenset(_given(spec, values))] = values
    return list(every.values())
