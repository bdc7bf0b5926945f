# SPDX-License-Identifier: Apache-2.0
"""The parts of a declaration: tensors, scalars and dimensions. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
INDICES = ("int32", "int64")

# The spelling of a dtype's default value in a schema.
_SCHEMA_DTYPES = {"int32": "int", "int64": "long", "float32": "float", "float16": "half"}


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


class Call(SimpleNamespace):
    """The arguments and results of one call by name; ``"bias" in call`` says if there is one."""

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__


@dataclass(frozen=True)
class Tensor:
    """A tensor argument or result.

    Args:
        name: Its name.
        dims: Its dimensions, separated by spaces; ``*`` for any, which `Spec.check` then looks at.
        dtypes: The allowed dtypes. The name of an argument stands for the dtype of that tensor, or
            for the dtype that it is. A result has the first.
        strided: Whether any strides are allowed; otherwise the tensor is contiguous.
        optional: Whether it may be None.
        written: Of an argument: the op writes to it.
        on_cpu: Whether it lies on the CPU whatever the device of the others.
        shape_text: The words for the shape in error texts, or a function of the call; by default
            ``[dims]``.
        shape: (call) -> the shape, where words cannot say it; then `dims` is ``*``.
        dtype_with: (argument, dtype): the dtype instead if that argument is not None.
        dtype_instead: Of a result: (dtype, other) if `dtypes` gives it the first, it has the other.
        comes_with: Of a result: the argument without which there is none.
        rtol: Of a result: as in torch.testing.assert_close, against the reference.
        atol: The same. With both 0, results must be equal.
        of_sums: Of a result that is a sum: the allowed error as a part of the sum of its terms'
            magnitudes, in addition. The error of an adder grows with those, not with the result.
    """

    name: str
    dims: str
    dtypes: str | tuple[str, ...]
    strided: bool = False
    optional: bool = False
    written: bool = False
    on_cpu: bool = False
    shape_text: str | Callable[[Call], str] = ""
    shape: Callable[[Call], tuple[Any, ...]] | None = None
    dtype_with: tuple[str, str] | None = None
    dtype_instead: tuple[str, str] | None = None
    comes_with: str = ""
    rtol: float = 0.0
    atol: float = 0.0
    of_sums: float = 0.0

    @cached_property
    def batched(self) -> bool:
        return self.dims.split()[:1] == ["..."]

    @cached_property
    def own_dims(self) -> tuple[str, ...]:
        """The dimensions without ``...``."""
        return tuple(word for word in self.dims.split() if word != "...")

    @cached_property
    def any_shape(self) -> bool:
        return self.dims == "*"

    @cached_property
    def allowed(self) -> tuple[str, ...]:
        return (self.dtypes,) if isinstance(self.dtypes, str) else self.dtypes

    def text(self, call: Call) -> str:
        if callable(self.shape_text):
            return self.shape_text(call)
        return self.shape_text or f"[{', '.join(self.dims.split())}]".replace("/", " / ")

    def schema(self, alias: str = "") -> str:
        kind = f"Tensor{alias}{'?' if self.optional else ''}"
        return f"{kind} {self.name}{'=None' if self.optional else ''}"


@dataclass(frozen=True)
class Scalar:
    """An argument that is no tensor.

    Args:
        name: Its name.
        default: Its default value; of a dtype, the name.
        kind: ``int``, ``float``, ``bool``, ``str`` or ``dtype``, or another type of a schema.
        optional: Whether it may be None.
        choices: The allowed values.
        at_least: The least allowed value.
        varies: Of an int: it differs from call to call, so that a compiled graph takes a symbol.
    """

    name: str
    default: Any = REQUIRED
    kind: str = "int"
    optional: bool = False
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    varies: bool = False

    def schema(self) -> str:
        kind = {"dtype": "ScalarType", "int": "SymInt" if self.varies else "int"}.get(
            self.kind, self.kind
        )
        kind += "?" if self.optional else ""
        if self.default is REQUIRED:
            return f"{kind} {self.name}"
        value = repr(self.default)
        if self.kind == "dtype" and self.default is not None:
            value = _SCHEMA_DTYPES.get(self.default, self.default)
        return f"{kind} {self.name}={value}"


Int = partial(Scalar, kind="int")
Float = partial(Scalar, kind="float")
Bool = partial(Scalar, kind="bool")
Str = partial(Scalar, kind="str")
DType = partial(Scalar, kind="dtype")


@dataclass(frozen=True)
class Dim:
    """A dimension made from an argument's: its size, divided unless another argument is given."""

    argument: str
    dim: int
    divisor: int = 1
    unless: str = ""
