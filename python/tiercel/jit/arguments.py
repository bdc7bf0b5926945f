# SPDX-License-Identifier: Apache-2.0
"""A kernel's parameters, from its mangled name; and Python values as its arguments' bytes."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel import _C

_INTEGERS = {
    "char": "b",
    "signed char": "b",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "unsigned int": "I",
    "long": "q",
    "unsigned long": "Q",
    "long long": "q",
    "unsigned long long": "Q",
}
_FLOATS = {"float": "f", "double": "d"}
_POINTEES = {
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "long long": "int64",
    "bool": "bool",
    "__nv_fp8_e4m3": "float8_e4m3fn",
    "__nv_fp8_e5m2": "float8_e5m2",
}

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Signature:
    """A kernel's name in the source and its parameters' types; None where C++ does not say."""

    name: str
    types: tuple[str, ...] | None


def signature_of(symbol: str) -> Signature:
    text = _C.demangle(symbol) if symbol.startswith("_Z") else symbol  # alone, f is float
    if text == symbol:  # extern "C"
        return Signature(symbol, None)
    depth, start = 0, len(text)
    for at in range(len(text) - 1, -1, -1):  # from the end: a template argument may have brackets
        depth += (text[at] == ")") - (text[at] == "(")
        if text[at] == "(" and depth == 0:
            start = at
            break
    name = re.sub(r"^void ", "", text[:start])
    inside = text[start + 1 : text.rindex(")")]
    types = () if inside in ("", "void") else tuple(_split(inside))
    return Signature(name, types)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "(<[") - (letter in ")>]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def same_name(given: str, name: str) -> bool:
    return re.sub(r"\s+", "", given) == re.sub(r"\s+", "", name)


def converters(kernel: str, signature: Signature, sizes: Sequence[int]) -> list[Convert]:
    """One function a parameter: a value to a tensor or bytes; raises for what does not fit."""
    types = signature.types or ("",) * len(sizes)
    return [
        _converter(f"kernel {kernel}: argument {place}", text, size)
        for place, (text, size) in enumerate(zip(types, sizes, strict=True), 1)
    ]


def _converter(where: str, text: str, size: int) -> Convert:
    if text.endswith(("*", "* restrict")):
        return _pointer(where, text)
    if text == "bool":
        return _number(where, text, "?", (bool,))
    if text in _INTEGERS:
        return _number(where, text, _INTEGERS[text], (int,))
    if text in _FLOATS:
        return _number(where, text, _FLOATS[text], (float, int))
    return _raw(where, text, size)


def _pointer(where: str, text: str) -> Convert:
    pointee = re.sub(r"\b(const|volatile|restrict)\b|\*$", "", text.replace("* restrict", "*"))
    wanted = _POINTEES.get(pointee.strip())

    def convert(value: Any) -> Any:
        if value is None:
            return bytes(8)
        dtype = getattr(value, "dtype", None)
        if dtype is None:
            return _as_bytes(where, f"a tensor for {text}", 8, value)
        got = str(dtype).removeprefix("torch.")
        if wanted is not None and got != wanted:
            raise TypeError(f"{where} must be a {wanted} tensor for {text}, got {got}")
        return value

    return convert


def _number(where: str, text: str, letter: str, kinds: tuple[type, ...]) -> Convert:
    pack = struct.Struct(f"={letter}").pack
    size = struct.calcsize(f"={letter}")
    word = {"?": "a bool"}.get(letter, "a number" if letter in "fd" else "an int")

    def convert(value: Any) -> bytes:
        if type(value) in kinds:
            try:
                return pack(value)
            except (struct.error, OverflowError):
                raise ValueError(f"{where} does not fit {text}: {value}") from None
        if hasattr(value, "__index__") and letter not in "?fd":
            return convert(int(value))
        return _as_bytes(where, f"{word} for {text}", size, value)

    return convert


def _raw(where: str, text: str, size: int) -> Convert:
    expected = f"a tensor or {size} bytes as a ctypes value" + (f" for {text}" if text else "")

    def convert(value: Any) -> Any:
        if size == 8 and hasattr(value, "data_ptr"):
            return value
        return _as_bytes(where, expected, size, value)

    return convert


def _as_bytes(where: str, expected: str, size: int, value: Any) -> bytes:
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array, bytes)):
        found = bytes(value)
        if len(found) != size:
            raise ValueError(f"{where} must have {size} bytes, got {len(found)}")
        return found
    raise TypeError(f"{where} must be {expected}, got {type(value).__name__}")
