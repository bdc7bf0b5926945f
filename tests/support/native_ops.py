# SPDX-License-Identifier: Apache-2.0
"""The ops that run without Python, as text: python/bindings/native_ops.txt.

The extension module reads that text where C++ registers the ops. It follows from the declarations.
After a change of them, with the wheel installed:

    python tests/support/native_ops.py --write
"""

import argparse
from pathlib import Path

from tiercel import _C, ops  # noqa: F401  (registers the ops)
from tiercel.core.op import Native
from tiercel.core.op import ops as all_ops

FILE = Path(__file__).parents[2] / "python/bindings/native_ops.txt"

_HEAD = """\
# The ops that run without Python: python/bindings/native_op.h. From the declarations, by
#   python tests/support/native_ops.py --write
"""

_KINDS = {
    "Tensor": "tensor",
    "str": "string",
    "bool": "bool",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "ScalarType": "dtype",
}


class _Python(Exception):
    """The op needs Python, with the reason."""


def _value(value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return f"b{value:d}"
    if isinstance(value, int):
        return f"i{value}"
    if isinstance(value, float):
        return f"f{value!r}"
    raise _Python(f"a constant is a {type(value).__name__}")


def _key(key):
    return "-" if key is None else f"{'s' if isinstance(key, str) else 'i'}:{key}"


def _dtype(dtype):
    return str(dtype).removeprefix("torch.")


def _arguments(schema):
    for argument in schema.arguments:
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        name = {"number": "float"}.get(kind, kind)
        if optional:
            name = name.removeprefix("Optional[").removesuffix("]")
        if name not in _KINDS:
            raise _Python(f"`{argument.name}` is a {kind}")
        written = "!" if argument.is_write else ""
        yield f"argument {_KINDS[name]}{'?' * optional}{written} {argument.name}"


def _output(output, at):
    like, dtype, dropped, sizes, other, *rest = output
    instead = rest[0] if rest else None
    words = [
        str(at(like)),
        f"@{at(dtype)}" if isinstance(dtype, int) else _dtype(dtype),
        "-" if dropped is None else str(dropped),
        "-" if other is None else f"{at(other[0])}:{_dtype(other[1])}",
        "-" if instead is None else ":".join(map(_dtype, instead)),
    ]
    for place, dim, divisor, unless in sizes:
        words.append(f"{at(place)},{dim},{divisor},{at(unless)}")
    return "output " + " ".join(words)


def _slot(slot, at):
    kind, value = slot
    if kind == "constant":
        return f"slot constant {_value(value)}"
    if kind == "lookup":
        place, table = value
        pairs = [f"{_key(key)}={_value(entry)}" for key, entry in table.items()]
        return " ".join([f"slot lookup {at(place)}", *pairs])
    return f"slot {kind} {value if kind == 'output' else at(value)}"


def _lines(op, operator):
    if not isinstance(op._sm90, Native):
        raise _Python("several launches")
    eager = op._eager(op._sm90, operator.argument_names[:-1])
    name = getattr(eager and eager.native, "__name__", "")
    if eager is None or eager.returns or not (name and _C.has_native(name)):
        raise _Python("its launch")
    last, first = len(operator.argument_names) - 1, operator._positional

    def at(place):
        """The place in the schema, where `backend` comes before the results to write to."""
        return place if place < first else first if place == last else place + 1

    schema = operator.overload._schema
    yield f"op {operator.name}"
    yield f"schema {str(schema).removeprefix('tiercel::')}"
    yield f"native {name}"
    yield from _arguments(schema)
    for word in ("contiguous", "absent"):
        places = getattr(eager, word)
        if places:
            yield " ".join([word, *(str(at(place)) for place in places)])
    for place, rank in eager.ranks:
        yield f"rank {at(place)} {rank}"
    for place, dim, number in eager.equals:
        yield f"equal {at(place)} {dim} {at(number)}"
    for output in eager.outputs:
        yield _output(output, at)
    for slot in eager.slots:
        yield _slot(slot, at)


def operators():
    """(op, operator) of every operator, overloads too, by name."""
    for name in sorted(all_ops):
        op = all_ops[name]
        yield op, op.operator
        if op.out is not None:
            yield op, op.out


def text_and_rest():
    """The text, and why each other operator needs Python, by its name."""
    parts, rest = [_HEAD], {}
    for op, operator in operators():
        try:
            parts.append("\n".join(_lines(op, operator)) + "\n")
        except _Python as reason:
            rest[operator.name] = str(reason)
    return "\n".join(parts), rest


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    text, rest = text_and_rest()
    if parser.parse_args().write:
        FILE.write_text(text)
    for name, reason in rest.items():
        print(f"{name}: needs Python: {reason}")


if __name__ == "__main__":
    main()
