# SPDX-License-Identifier: Apache-2.0
"""Bad calls of every op and the errors that they must give, made from its declaration."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from support import contract_calls as calls
from support import declared

from tiercel.core.spec import Scalar, Spec, Tensor

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "uint8", "bool"),
)
_POSITIVE = "must be None or positive and finite"
# Texts of public functions that check an argument more closely than its declaration does.
_CLOSER = {
    **{
        (op, name): _POSITIVE
        for op in ("attention", "attention_varlen", "decode_attention", "paged_attention")
        for name in ("scale", "softcap")
    },
    ("decode_attention", "max_seqused_k"): "must be None or a whole number",
    ("paged_attention", "max_seqused_k"): "must be None or a whole number",
}
_WITH_SCALE = "a given `scale` needs granularity='tensor', got "


@dataclasses.dataclass(frozen=True)
class Bad:
    """Arguments to replace, and what the error must be and say."""

    title: str
    changes: dict[str, Any]
    error: type[Exception]
    text: str

    def is_right(self, op, error):
        return isinstance(error, self.error) and re.match(f"{op}: {self.text}", str(error))


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _listed(names):
    names = list(dict.fromkeys(names))
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _zeros(shape, dtype):
    if dtype.itemsize == 1:  # torch fills no 4-bit floats
        return torch.zeros(shape, dtype=torch.uint8).view(dtype)
    return torch.zeros(shape, dtype=dtype)


def _allowed(spec: Spec, tensor: Tensor, values) -> list[str]:
    """The names of the dtypes that a tensor may have in a call."""
    with_argument, instead = tensor.dtype_with, tensor.dtype_instead
    if with_argument and values.get(with_argument[0]) is not None:
        return [with_argument[1]]
    found = []
    for word in tensor.allowed:
        if word not in spec.names:
            found.append(word)
        elif isinstance(spec.argument(word), Scalar):  # a given result may have any of them
            found += _allowed(
                spec, dataclasses.replace(tensor, dtypes=spec.argument(word).choices), values
            )
        elif values[word] is not None:
            found.append(_name(values[word].dtype))
    return [instead[1] if instead and name == instead[0] else name for name in found]


def _wrong_dtypes(spec, name, values):
    """The errors of the tensors whose dtypes are not allowed; the operator's order says which."""
    found = {}
    for tensor in (*spec.tensors, *(r for r in spec.results if values.get(r.name) is not None)):
        value = values.get(tensor.name)
        if value is not None:
            allowed = _allowed(spec, tensor, values)
            if _name(value.dtype) not in allowed:
                got = _name(value.dtype)
                text = f"`{tensor.name}` must have dtype {_listed(allowed)}, got {got}"
                found[tensor.name] = re.escape(text)
    # The operator of a public function may have another order, but for the first.
    own = found and next(iter(found)) == name
    return found[name] if own else "|".join(found.values())


def _words(tensor):
    return {word.partition("/")[0] for word in tensor.own_dims} | (
        {"..."} if tensor.batched else set()
    )


def _tensor(spec: Spec, tensor: Tensor, values) -> Iterator[Bad]:
    name, value = tensor.name, values[tensor.name]
    first = spec.arguments[0].name
    or_none = "( or None)?" if tensor.optional else ""

    def bad(title, other, error, text):
        return Bad(f"{name} {title}", {name: other}, error, text)

    yield bad("a list", [1.0], TypeError, f"`{name}` must be a torch.Tensor{or_none}, got list$")
    if not tensor.optional:
        yield bad("None", None, TypeError, f"`{name}` must be a torch.Tensor, got NoneType$")
    for dtype in _DTYPES:
        other = _zeros(value.shape, getattr(torch, dtype))
        if text := _wrong_dtypes(spec, name, values | {name: other}):
            yield bad(dtype, other, TypeError, f"({text})$")
    alike = [
        t.name for t in spec.tensors if t.allowed == (name,) and values.get(t.name) is not None
    ]
    if alike and not set(tensor.allowed) & set(spec.names):
        allowed = _allowed(spec, tensor, values)
        wrong = next(dtype for dtype in _DTYPES if dtype not in allowed)
        others = {n: _zeros(values[n].shape, getattr(torch, wrong)) for n in (name, *alike)}
        text = f"`{name}` must have dtype {_listed(allowed)}, got {wrong}$"
        yield Bad(f"{name} {wrong} with {alike}", others, TypeError, text)
    if name != first:
        device = "a CPU tensor" if tensor.on_cpu else f"on the device of `{first}`, a CPU tensor"
        text = f"`{name}` must be {device}, got a tensor on meta$"
        yield bad("on meta", value.to("meta"), ValueError, text)
    if not tensor.strided and value.numel() > 1:
        apart = torch.empty((*value.shape, 2), dtype=value.dtype)[..., 0]
        yield bad("apart", apart, ValueError, rf"`{name}` must be contiguous, got strides \[")
    if tensor.shape is not None:
        longer = _zeros((*value.shape, 1), value.dtype)
        yield bad(
            "another shape", longer, ValueError, rf"`{name}` must have shape .* = \[.*\], got \["
        )
    if tensor.any_shape:
        return  # its relations are a check's
    shape = tuple(value.shape)
    others = [t for t in (*spec.tensors, *spec.results) if values.get(t.name) is not None]
    blamed = {t.name for t in others if _words(t) & _words(tensor)} | {name}
    named = "|".join(sorted(blamed))
    text = rf"`({named})` must have (shape .* = \[|at least |\d+ dimensions?, got)"
    own = len(tensor.own_dims)
    binds = tensor.batched and not any(t.batched for t in others[: others.index(tensor)])
    if not binds or own:
        fewer = shape[len(shape) - own + 1 :] if binds else shape[1:]
        for few in dict.fromkeys((fewer, ())):
            yield bad(f"{len(few)} dimensions", _zeros(few, value.dtype), ValueError, text)
    if not binds or any(t.batched for t in others if t is not tensor):
        yield bad("too many dimensions", _zeros((1, *shape), value.dtype), ValueError, text)
    for place, word in enumerate(tensor.own_dims, len(shape) - len(tensor.own_dims)):
        base = word.partition("/")[0]
        computed = {word for word, size in spec.dims.items() if callable(size)}
        known = {base} | (computed if base in computed else set())
        bound = base.isdigit() or base in spec.dims or base in spec.names
        elsewhere = [t.name for t in others if t is not tensor and known & _words(t)]
        before = others[: others.index(tensor)]
        if base not in computed and any(base in _words(t) for t in before):
            elsewhere, bound = [], True  # it has to agree with those
        if elsewhere or bound or tensor.own_dims.count(word) > 1:
            wrong = (*shape[:place], 2 * shape[place] + 16, *shape[place + 1 :])
            text = rf"`({'|'.join([name, *elsewhere])})` must have shape .* = \[.*\], got \[.*\]$"
            yield bad(f"{word} too long", _zeros(wrong, value.dtype), ValueError, text)


_KINDS = {"int": "an int", "float": "a float"}


def _scalar(op: str, spec: Spec, scalar: Scalar) -> Iterator[Bad]:
    name = scalar.name
    or_none = " or None" if scalar.optional else ""

    def bad(value, error, text):
        if (op, name) in _CLOSER and value is not True:
            error, text = ValueError, _CLOSER[op, name]
        return Bad(f"{name} {value!r}", {name: value}, error, rf"`{name}` {text}, got ")

    wrong = {"bool": (1, "x"), "int": (2.5, "x", True), "float": ("x", True, [1.0])}
    if any(callable(size) for size in spec.dims.values()):
        wrong["int"] = (2.5, "x")  # True counts as a size first
    for value in wrong.get(scalar.kind, ()):
        kind = _KINDS.get(scalar.kind, "a bool")
        yield bad(value, TypeError, f"must be {kind}{or_none if kind != 'a bool' else ''}")
    if scalar.kind in (*wrong, "dtype") and not scalar.optional:
        kind = "a torch.dtype" if scalar.kind == "dtype" else _KINDS.get(scalar.kind, "a bool")
        yield bad(None, TypeError, f"must be {kind}")
    if scalar.kind == "dtype":
        yield bad("float32", TypeError, "must be a torch.dtype")
    if scalar.at_least is not None:
        least = f"must be at least {scalar.at_least}" if scalar.at_least else "must not be negative"
        yield bad(scalar.at_least - 1, ValueError, least)
        if scalar.kind == "float":
            yield bad(float("nan"), ValueError, least)
    if scalar.choices and scalar.kind == "str":
        known = [re.escape(repr(choice)) for choice in scalar.choices]
        text = f"one of {', '.join(known)}" if len(known) > 2 else " or ".join(known)
        for value in ("x", "", 1, *(() if scalar.optional else (None,))):
            yield bad(value, ValueError, f"must be {text}")


def _scalar_dtypes(spec, values) -> Iterator[Bad]:
    for scalar in spec.scalars:
        if scalar.kind != "dtype" or not scalar.choices:
            continue
        allowed = _allowed(spec, Tensor("", "*", scalar.choices), values)
        for dtype in _DTYPES:
            if dtype not in allowed:
                text = f"`{scalar.name}` must have dtype {_listed(allowed)}, got {dtype}"
                changes = {scalar.name: getattr(torch, dtype)}
                yield Bad(f"{scalar.name} {dtype}", changes, TypeError, re.escape(text) + "$")


def derived(op: str, spec: Spec, values: dict[str, Any]) -> list[Bad]:
    """The bad calls next to a good one."""
    found = []
    for argument in spec.arguments:
        if argument.name not in values:
            continue
        if isinstance(argument, Scalar):
            found += _scalar(op, spec, argument)
        elif values[argument.name] is not None:
            found += _tensor(spec, argument, values)
    for name in (
        spec.together if all(values.get(name) is not None for name in spec.together) else ()
    ):
        text = rf"`{name}` must be given where `\w+` is, got None$"
        found.append(Bad(f"only {name} None", {name: None}, ValueError, text))
    return [*found, *_scalar_dtypes(spec, values)]


def of_results(spec: Spec, values, results) -> list[Bad]:
    """Bad values of ``out=``."""
    names = spec.result_names
    whole = {**values, **dict(zip(names, results, strict=True))}
    found = []
    for result in spec.results:
        for bad in _tensor(spec, result, whole):
            outs = [bad.changes.get(name, whole[name]) for name in names]
            outs = outs[0] if len(outs) == 1 else tuple(outs)
            if outs is not None:
                found.append(
                    dataclasses.replace(bad, title=f"out {bad.title}", changes={"out": outs})
                )
    if len(results) > 1:
        for wrong, got in (
            (results[0], "Tensor"),
            (tuple(results[1:]), f"{len(names) - 1} values"),
            (1, "int"),
        ):
            text = rf".*`out` must be .*\({', '.join(names)}\), got {got}$"
            found.append(Bad(f"out {got}", {"out": wrong}, TypeError, text))
    return found


def public(op):
    """(bad call, function, arguments) of a public function."""
    spec, defaults = declared.SPECS[op], declared.defaults(op)
    for values in declared.public_calls(op):
        found = derived(op, spec, values)
        through = [n for n in spec.result_names if values.get(n) is not None]
        if "out" in defaults and op not in declared.COMPOSITE and not through:
            results = calls.tensors_of(run(calls.function(op), values, {}))
            results = results[: len(spec.results)]
            given = spec.changed(results=spec.results[: len(results)])
            found += of_results(given, values, [torch.empty_like(r) for r in results])
        for bad in found:
            if op in declared.COMPOSITE:  # those that it is made of speak of their own arguments
                if "gated" in bad.changes:
                    continue  # it only chooses one of them
                bad = dataclasses.replace(bad, text="`\\w+` must (?:be|have)")
            if (
                op == "fp8_quantize"
                and values["scale"] is not None
                and "granularity" in bad.changes
            ):
                bad = dataclasses.replace(bad, text=_WITH_SCALE)
            yield bad, calls.function(op), values


def of_operator(name):
    """Bad calls of an operator, with its arguments by position."""
    operator = declared.OPERATORS[name]

    def function(backend, **values):
        return operator.operator.direct(*(values[n] for n in operator.spec.names), backend)

    calls_of = declared.covering(operator.spec, declared.each_form(name))
    for values in calls_of:
        for bad in derived("", operator.spec, values):
            yield bad, function, values


def run(function, values, changes):
    return function(**{**values, **changes, "backend": "ref"})
