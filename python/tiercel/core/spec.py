# SPDX-License-Identifier: Apache-2.0
"""The declaration of an op, as data. Needs no torch until it is used.

A `Spec` lists the arguments and results of an op once. Derived from it are the schemas of the
operator and of its ``out`` overload, the argument checks with their error texts, the allocation of
the results (of fake tensors too), the layout that the eager call hands to the native function, the
contract for plug-in backends, the table of ops in README.md and the tests of bad arguments.

    RMS_NORM = Spec(
        "rms_norm",
        Tensor("x", "... N", FLOATS, strided=True),
        Tensor("weight", "N", ("x", "float32"), optional=True),
        Float("eps", 1e-6, at_least=0),
        results=[Tensor("out", "... N", "x")],
    )

Dimensions are words. A name binds where it first occurs and must agree everywhere else; a number
is itself; ``K/2`` is half of K; a leading ``...`` stands for any number of batch dimensions; ``*``
alone is any shape, left to `check`. `Spec.dims` defines names that no argument has as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tiercel.core.arguments import FLOATS as FLOATS
from tiercel.core.arguments import HALVES as HALVES
from tiercel.core.arguments import INDICES as INDICES
from tiercel.core.arguments import REQUIRED, Call, Dim, Scalar, Tensor
from tiercel.core.arguments import Bool as Bool
from tiercel.core.arguments import DType as DType
from tiercel.core.arguments import Float as Float
from tiercel.core.arguments import Int as Int
from tiercel.core.arguments import Str as Str
from tiercel.core.numerics import Numerics as Numerics


@dataclass(frozen=True, init=False)
class Spec:
    """The declaration of an op.

    Args:
        name: The operator's name in ``torch.ops.tiercel``.
        arguments: In the order of the schema, the first one a tensor.
        results: What it returns. None of them: the op only writes to arguments.
        dims: Dimensions that occur in no argument, by name: a `Dim`, or a function of the call,
            which may return None for a size that is not known.
        together: Optional arguments of which a call has all or none.
        check: Raises for a relation between arguments that the data above cannot express; called
            after all other checks.
        public: The name of the public function, which error texts and backends go by.
        gradient_of: The public function that this is the gradient of. It has no contract: a plug-in
            runs its reference.
        out_text: The beginning of the error text for a wrong ``out=``.
        limits: What the backend sm90 is limited to, in words, for README.md.
        numerics: What is promised of its numbers; every public op says it.
    """

    name: str
    arguments: tuple[Tensor | Scalar, ...]
    results: tuple[Tensor, ...]
    dims: Mapping[str, Any]
    check: Callable[[Call], None] | None
    public: str
    gradient_of: str
    out_text: str
    together: tuple[str, ...]
    limits: str
    numerics: Numerics | None

    def __init__(
        self,
        name: str,
        *arguments: Tensor | Scalar,
        results: Sequence[Tensor] = (),
        dims: Mapping[str, Any] | None = None,
        check: Callable[[Call], None] | None = None,
        public: str = "",
        gradient_of: str = "",
        out_text: str = "",
        together: tuple[str, ...] = (),
        limits: str = "",
        numerics: Numerics | None = None,
    ) -> None:
        for key, value in {
            "name": name,
            "arguments": arguments,
            "results": tuple(results),
            "dims": dims or {},
            "check": check,
            "public": public or gradient_of or name,
            "gradient_of": gradient_of,
            "out_text": out_text,
            "together": together,
            "limits": limits,
            "numerics": numerics,
        }.items():
            object.__setattr__(self, key, value)

    # -- other specs -------------------------------------------------------------------------------

    def changed(self, **others: Any) -> Spec:
        """A copy with other fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | others
        return Spec(values.pop("name"), *values.pop("arguments"), **values)

    def without(self, *names: str, **fields: Any) -> Spec:
        """A copy that lacks these optional arguments, and the results that come with them."""
        arguments = tuple(a for a in self.arguments if a.name not in names)
        results = tuple(r for r in self.results if r.comes_with not in names)
        return self.changed(arguments=arguments, results=results, **fields)

    def having(self, *names: str, **fields: Any) -> Spec:
        """A copy in which these optional arguments are required, before those with a default."""
        arguments = [replace(a, optional=False) if a.name in names else a for a in self.arguments]
        arguments.sort(key=_has_default)
        return self.changed(arguments=tuple(arguments), **fields)

    # -- names and schemas -------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        return tuple(result.name for result in self.results)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Tensor))

    @cached_property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Scalar))

    def values(self, call: Call) -> dict[str, Any]:
        """The arguments of a call by name, without its results and backend."""
        return {name: getattr(call, name) for name in self.names}

    def argument(self, name: str) -> Tensor | Scalar:
        for argument in (*self.arguments, *self.results):
            if argument.name == name:
                return argument
        raise KeyError(name)

    def schema(self) -> str:
        results = ", ".join(f"Tensor {result.name}" for result in self.results)
        results = "Tensor" if len(self.results) == 1 else f"({results})"
        return f"({', '.join([*self._schemas(), 'str? backend=None'])}) -> {results}"

    def out_schema(self) -> str:
        """The schema of the overload ``out``, which writes to given results."""
        outs = [
            f"Tensor({alias}!) {result.name}"
            for alias, result in zip("abcdefgh", self.results, strict=False)
        ]
        return f"({', '.join([*self._schemas(), 'str? backend=None', '*', *outs])}) -> ()"

    def _schemas(self) -> list[str]:
        """The arguments in a schema, where no default may stand before a required argument."""
        aliases = iter("abcdefgh")
        texts, required = [], 0
        for i, argument in enumerate(self.arguments):
            if isinstance(argument, Tensor) and argument.written:
                texts.append(argument.schema(f"({next(aliases)}!)"))
            else:
                texts.append(argument.schema())
            if not _has_default(argument):
                required = i
        return [text.partition("=")[0] if i < required else text for i, text in enumerate(texts)]

    def defaults(self) -> dict[str, Any]:
        """The default values that the schema spells in another way."""
        import torch

        return {
            a.name: getattr(torch, a.default)
            for a in self.scalars
            if a.kind == "dtype" and isinstance(a.default, str)
        }

    # -- sizes -------------------------------------------------------------------------------------

    def sizes(self, call: Call) -> dict[str, Any]:
        """The dimensions' values; the batch dimensions are those of ``...``."""
        found: dict[str, Any] = {}
        for argument in self.arguments:
            value = getattr(call, argument.name)
            if isinstance(argument, Scalar):
                if argument.kind == "int":
                    found[argument.name] = value
            elif value is not None and not argument.any_shape:
                own = argument.own_dims
                shape = tuple(value.shape)
                if argument.batched:
                    found.setdefault("...", shape[: len(shape) - len(own)])
                    shape = shape[len(shape) - len(own) :]
                for name, size in zip(own, shape, strict=True):
                    found.setdefault(name, size)
        return found

    def size(self, name: str, call: Call, known: Mapping[str, Any]) -> Any:
        """The value of one dimension, None if it is not known yet."""
        if name.isdigit():
            return int(name)
        base, slash, divisor = name.partition("/")
        if slash:
            whole = self.size(base, call, known)
            return known.get(name) if whole is None else whole // int(divisor)
        derived = self.dims.get(name)
        if derived is None:
            return known.get(name)
        if not isinstance(derived, Dim):
            return derived(call)
        size = getattr(call, derived.argument).shape[derived.dim]
        given = derived.unless and getattr(call, derived.unless) is not None
        return size if derived.divisor == 1 or given else size // derived.divisor

    def result_shape(self, result: Tensor, call: Call, known: Mapping[str, Any]) -> tuple[Any, ...]:
        if result.shape is not None:
            return result.shape(call)
        batch = tuple(known["..."]) if result.batched else ()
        return (*batch, *(self.size(name, call, known) for name in result.own_dims))

    def result_dtype(self, result: Tensor, call: Call) -> Any:
        import torch

        if result.dtype_with is not None and getattr(call, result.dtype_with[0], None) is not None:
            return getattr(torch, result.dtype_with[1])
        found = (self._dtype(name, call) for name in result.allowed)
        return self._instead(result, next(dtype for dtype in found if dtype is not None))

    @staticmethod
    def _instead(result: Tensor, dtype: Any) -> Any:
        import torch

        if result.dtype_instead is not None and dtype == getattr(torch, result.dtype_instead[0]):
            return getattr(torch, result.dtype_instead[1])
        return dtype

    def _dtype(self, name: str, call: Call) -> Any:
        import torch

        if name in self.names:
            value = getattr(call, name)
            return value.dtype if isinstance(value, torch.Tensor) else value
        return getattr(torch, name)

    def empty(self, call: Call) -> tuple[Any, ...]:
        """New results, for fake and for real tensors."""
        known = self.sizes(call)
        first = getattr(call, self.arguments[0].name)
        return tuple(
            first.new_empty(
                self.result_shape(result, call, known), dtype=self.result_dtype(result, call)
            )
            for result in self.results
        )

    # -- checks ------------------------------------------------------------------------------------

    def validate(self, call: Call) -> None:
        """Raises for arguments that no backend takes.

        Raises:
            TypeError: A dtype or a type is not allowed.
            ValueError: A shape, stride, device or value is not allowed.
        """
        known: dict[str, Any] = {}
        missing = [name for name in self.together if getattr(call, name) is None]
        if missing and len(missing) < len(self.together):
            given = next(name for name in self.together if name not in missing)
            raise ValueError(
                f"{self.public}: `{missing[0]}` must be given where `{given}` is, got None"
            )
        for argument in self.arguments:
            if isinstance(argument, Tensor):
                value = getattr(call, argument.name)
                if value is not None:
                    self._check_tensor(argument, value, call, known)
            else:
                self.check_value(argument.name, getattr(call, argument.name), call=call)
                if argument.kind == "int":
                    known[argument.name] = getattr(call, argument.name)
        if self.check is not None:
            self.check(call)
        for result in self.results:
            if result.name in call:
                self._check_tensor(result, getattr(call, result.name), call, known)

    def _allowed(self, tensor: Tensor, call: Call) -> tuple[str, ...]:
        """The dtypes of a given tensor; an argument that is a dtype says nothing of a result."""
        if tensor.dtype_with and getattr(call, tensor.dtype_with[0], None) is not None:
            return (tensor.dtype_with[1],)
        if tensor.allowed[0] in self.names:
            argument = self.argument(tensor.allowed[0])
            if isinstance(argument, Scalar):
                return argument.choices
        return tensor.allowed

    def _check_tensor(self, spec: Tensor, tensor: Any, call: Call, known: dict[str, Any]) -> None:
        from tiercel.core.checks import (
            check_contiguous,
            check_dtype,
            check_on_cpu,
            check_same_device,
            check_shape,
        )

        op, name = self.public, spec.name
        allowed = self._allowed(spec, call)
        dtypes = (self._instead(spec, self._dtype(dtype, call)) for dtype in allowed)
        check_dtype(op, name, tensor.dtype, tuple(dict.fromkeys(dtypes)))
        if spec.shape is not None:
            check_shape(op, name, tensor, spec.shape(call), spec.text(call))
        elif not spec.any_shape:
            self._check_shape(spec, tensor, call, known)
        first = self.arguments[0].name
        if spec.on_cpu:
            check_on_cpu(op, name, tensor, getattr(call, first))
        else:
            check_same_device(op, name, tensor, first, getattr(call, first))
        if not spec.strided:
            check_contiguous(op, name, tensor)

    def _check_shape(self, spec: Tensor, tensor: Any, call: Call, known: dict[str, Any]) -> None:
        from tiercel.core.checks import check_rank, check_shape

        op, own, rank = self.public, spec.own_dims, tensor.dim()
        sizes = [self.size(name, call, known) for name in own]
        batch = known.get("...") if spec.batched else ()
        if batch is None:  # the first tensor with batch dimensions
            if rank < len(own):
                raise ValueError(
                    f"{op}: `{spec.name}` must have at least {len(own)} "
                    f"dimension{'s' if len(own) > 1 else ''}, got {rank}"
                )
            batch = known["..."] = tuple(tensor.shape[: rank - len(own)])
        elif rank != len(batch) + len(own) and None in sizes and not spec.batched:
            check_rank(op, spec.name, tensor, len(own))
        if rank == len(batch) + len(own):
            actual = tensor.shape[len(batch) :]
            sizes = [is_ if due is None else due for due, is_ in zip(sizes, actual, strict=True)]
        due = (*batch, *(-1 if size is None else size for size in sizes))
        check_shape(op, spec.name, tensor, due, spec.text(call))
        known.update(zip(own, sizes, strict=True))

    def check_value(self, name: str, value: Any, op: str = "", call: Call | None = None) -> None:
        """Raises for the value of an argument that is no tensor; `op` begins the error texts."""
        import torch

        from tiercel.core.checks import check_bool, check_dtype

        spec, op = self.argument(name), op or self.public
        assert isinstance(spec, Scalar)
        if value is None and spec.optional:
            return
        if spec.kind == "bool":
            check_bool(op, name, value)
        elif spec.kind == "dtype":
            if not isinstance(value, torch.dtype):
                raise TypeError(f"{op}: `{name}` must be a torch.dtype, got {type(value).__name__}")
            if spec.choices:
                allowed = (self._dtype(choice, call or Call()) for choice in spec.choices)
                check_dtype(op, name, value, tuple(dict.fromkeys(allowed)))
        elif spec.kind == "str":
            if spec.choices and not (isinstance(value, str) and value in spec.choices):
                known = " or ".join(map(repr, spec.choices))
                if len(spec.choices) > 2:
                    known = f"one of {', '.join(map(repr, spec.choices))}"
                raise ValueError(f"{op}: `{name}` must be {known}, got {value!r}")
        elif spec.kind in ("int", "float"):
            fits = hasattr(value, "__index__")
            if spec.kind == "float":
                fits = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
            if isinstance(value, bool) or not fits:
                article = "an int" if spec.kind == "int" else "a float"
                article += " or None" if spec.optional else ""
                raise TypeError(f"{op}: `{name}` must be {article}, got {type(value).__name__}")
            if spec.at_least is not None and not value >= spec.at_least:
                least = (
                    "must not be negative"
                    if spec.at_least == 0
                    else f"must be at least {spec.at_least}"
                )
                raise ValueError(f"{op}: `{name}` {least}, got {value}")

    # -- the eager call ----------------------------------------------------------------------------

    def allocation(self, place: Mapping[str, int]) -> tuple[Any, ...] | None:
        """The results for `_C.EagerCall`, or None if only Python can make them."""
        import torch

        made = []
        first = self.arguments[0]
        assert isinstance(first, Tensor)
        for result in self.results:
            if result.any_shape:
                return None
            sizes = []
            for name in result.own_dims:
                size = self._native_size(name, place)
                if size is None:
                    return None
                sizes.append(size)
            dtype: Any = result.allowed[0]
            dtype = place[dtype] if dtype in place else getattr(torch, dtype)
            other = None
            if result.dtype_with is not None:
                other = (place[result.dtype_with[0]], getattr(torch, result.dtype_with[1]))
            instead = None
            if result.dtype_instead is not None:
                instead = tuple(getattr(torch, name) for name in result.dtype_instead)
            dropped = len(first.own_dims) if result.batched else None
            made.append((place[first.name], dtype, dropped, tuple(sizes), other, instead))
        return tuple(made)

    def _native_size(self, name: str, place: Mapping[str, int]) -> tuple[int, int, int, int] | None:
        base, slash, divisor = name.partition("/")
        if slash:
            size = self._native_size(base, place)
            return None if size is None else (*size[:2], size[2] * int(divisor), size[3])
        derived = self.dims.get(name)
        if isinstance(derived, Dim):
            unless = place[derived.unless] if derived.unless else -1
            return place[derived.argument], derived.dim, derived.divisor, unless
        if derived is not None or name.isdigit():
            return None
        for argument in self.arguments:
            if isinstance(argument, Scalar):
                if argument.name == name and argument.kind == "int":
                    return place[name], 0, 1, -1
            elif name in argument.own_dims and not argument.optional:
                dim = argument.own_dims.index(name)
                if argument.batched:
                    dim -= len(argument.own_dims)
                return place[argument.name], dim, 1, -1
        return None

    def ranks(self, place: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """The required arguments that have a fixed number of dimensions."""
        return tuple(
            (place[a.name], len(a.own_dims))
            for a in self.tensors
            if not (a.batched or a.any_shape or a.optional)
        )

    def int_dims(self, place: Mapping[str, int]) -> tuple[tuple[int, int, int], ...]:
        """The dimensions of given results that an int argument states."""
        ints = {a.name for a in self.scalars if a.kind == "int"}
        return tuple(
            (place[result.name], dim, place[name])
            for result in self.results
            if result.name in place and not result.batched
            for dim, name in enumerate(result.own_dims)
            if name in ints
        )


def _has_default(argument: Tensor | Scalar) -> bool:
    if isinstance(argument, Tensor):
        return argument.optional
    return argument.default is not REQUIRED
