# SPDX-License-Identifier: Apache-2.0
"""The requirements of an operator for every backend, as data. Needs no torch until it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiercel.core import spec as declaration
from tiercel.plugins.outputs import check_new


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument or output.

    Args:
        name: Its name.
        dims: Its dimensions, by name; a name that an int argument has is that argument's value.
            ``*`` alone: any shape.
        dtypes: Allowed dtypes. The name of an argument means: its dtype, or the dtype that it is.
        strided: Whether any strides may come; otherwise it is contiguous.
        optional: Whether None may come instead.
        written: Of an argument: whether the backend writes it and returns it as the output of that
            name, with the strides that it came with.
        rtol: As in torch.testing.assert_close, for outputs.
        atol: The same. With both 0, outputs must be equal.
        of_sums: Of an output that is a sum: the part of the sum of its terms' magnitudes
            (`Contract.sums`) that it may be off by besides. What short adders lose is a part of
            that, however much of the sum cancels.
        comes_with: Of an output: the argument without which there is none.
    """

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    strided: bool = False
    optional: bool = False
    written: bool = False
    rtol: float = 0.0
    atol: float = 0.0
    of_sums: float = 0.0
    comes_with: str = ""

    def __str__(self) -> str:
        text = f"{self.name} [{', '.join(self.dims)}] {' or '.join(self.dtypes)}"
        return f"{text} or None" if self.optional else text


@dataclass(frozen=True)
class ScalarSpec:
    """An argument that is no tensor: an int, a bool, a str or a torch.dtype."""

    name: str
    type: str

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True)
class Case:
    """One set of arguments to try a backend on; `values` names a kind of input values."""

    sizes: Mapping[str, int]
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    values: str = "random"

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in {**self.sizes, **self.options}.items()]
        return " ".join([*words, self.dtype, *([self.values] if self.values != "random" else [])])


@dataclass(frozen=True)
class Contract:
    """The contract of an operator's backends.

    A backend is a function of `arguments`, in this order, that returns `outputs`: a new tensor, or
    a tuple of new tensors, contiguous and on the device of the first tensor argument.

    Args:
        family: The kernel family.
        op: The operator.
        arguments: What it gets.
        outputs: What it returns.
        cases: What `tiercel smoke` tries.
        timing: What it times, by device type.
        make: (case, device, seed) -> the arguments by name: the input generator.
        sums: (arguments by name) -> the sum of the terms' magnitudes of each element of the outputs
            that have `of_sums`.
        derive: (dimensions, arguments by name) -> further dimensions, that outputs have.
        mutates: Arguments that the operator writes to; a backend itself returns new tensors.
        batched: Tensors whose batch dimensions are joined to one before a backend gets them.
        constants: Arguments that the operators lack, and what backends get there.
        reference: The function in the family's reference.py that does what a backend does; by
            default it has the operator's name.
    """

    family: str
    op: str
    arguments: tuple[TensorSpec | ScalarSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cases: tuple[Case, ...]
    timing: Mapping[str, Case]
    make: Callable[[Case, str, int], dict[str, Any]]
    mutates: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    sums: Callable[[dict[str, Any]], Any] | None = None
    derive: Callable[[dict[str, int], dict[str, Any]], dict[str, int]] = lambda sizes, values: {}
    reference: str = ""

    @classmethod
    def of(
        cls,
        family: str,
        spec: declaration.Spec,
        *,
        batch: str = "M",
        replaced: Mapping[str, TensorSpec | ScalarSpec] | None = None,
        order: Sequence[str] = (),
        **more: Any,
    ) -> Contract:
        """The contract of a declared op.

        Args:
            family: The kernel family.
            spec: The declaration, with all optional arguments of the public op.
            batch: The name of the joined batch dimensions.
            replaced: What a backend gets or returns in another form than the op.
            order: The order in which a backend gets its arguments; by default the operator's.
            **more: The fields of `Contract` that the declaration does not give, or others instead.
        """
        replaced = replaced or {}

        def tensor(each: declaration.Tensor) -> TensorSpec:
            if isinstance(other := replaced.get(each.name), TensorSpec):
                return other
            dims = tuple(
                batch if word == "..." else word.replace("/", " / ") for word in each.dims.split()
            )
            same = ("name", "strided", "optional", "written", "rtol", "atol", "of_sums")
            named = {name: getattr(each, name) for name in (*same, "comes_with")}
            dtypes = list(each.allowed)
            if each.dtype_with and each.dtype_with[0] in spec.names:
                dtypes.append(each.dtype_with[1])
            return TensorSpec(dims=dims, dtypes=tuple(dict.fromkeys(dtypes)), **named)

        def derive(sizes: dict[str, int], values: dict[str, Any]) -> dict[str, int]:
            call = declaration.Call(**values)
            numbers = {word for result in spec.results for word in result.own_dims}
            computed = (name for name, size in spec.dims.items() if callable(size))
            return {
                name: spec.size(name, call, sizes)
                for name in (*computed, *filter(str.isdigit, numbers))
            }

        def argument(name: str) -> TensorSpec | ScalarSpec:
            each = spec.argument(name)
            if isinstance(each, declaration.Tensor):
                return tensor(each)
            if isinstance(other := replaced.get(name), ScalarSpec):
                return other
            ints = {"int[]": "(int, int)", "int[3]": "(int, int, int)"}
            kind = ints.get(each.kind, each.kind)
            return ScalarSpec(each.name, kind + " | None" * each.optional)

        given = {
            "arguments": tuple(argument(name) for name in order or spec.names),
            "outputs": tuple(replace(tensor(each), strided=False) for each in spec.results),
            "batched": tuple(
                each.name
                for each in (*spec.arguments, *spec.results)
                if isinstance(each, declaration.Tensor) and each.batched
            ),
            "mutates": tuple(each.name for each in spec.tensors if each.written),
            "derive": derive,
        }
        return cls(family=family, op=spec.public, **(given | more))

    def run(
        self, backend: Callable[..., Any], call: declaration.Call, wanted: Sequence[str] = ()
    ) -> tuple[Any, ...]:
        """The outputs of a backend, which `backend` runs and checks, for a call of the op.

        An argument that the operator lacks is None, or what `constants` says. Of the outputs those
        are returned that are `wanted`; by default all.
        """
        values, batch = [], None
        for argument in self.arguments:
            value = getattr(call, argument.name, self.constants.get(argument.name))
            if isinstance(argument, TensorSpec) and value is not None:
                self._refuse_dtype(argument, value)
            if argument.name in self.batched and value is not None:
                assert isinstance(argument, TensorSpec)
                own = len(argument.dims) - 1
                if batch is None:
                    batch = value.shape[: value.dim() - own]
                own_shape = value.shape[value.dim() - own :]
                value = value.reshape(math.prod(value.shape[: value.dim() - own]), *own_shape)
            values.append(value)
        due = [spec for spec in self.outputs if not spec.comes_with or spec.comes_with in call]
        return tuple(
            result.view(*batch, *result.shape[1:])
            if spec.name in self.batched and batch is not None
            else result
            for spec, result in zip(due, backend(*values), strict=False)
            if not wanted or spec.name in wanted
        )

    def _refuse_dtype(self, argument: TensorSpec, value: Any) -> None:
        """Raises where the operator takes a dtype that backends do not."""
        dtype = str(value.dtype).removeprefix("torch.")
        if not {*self.names, dtype}.intersection(argument.dtypes):
            raise NotImplementedError(f"a registered backend does not take {dtype}")

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments that a backend writes."""
        return tuple(a.name for a in self.arguments if isinstance(a, TensorSpec) and a.written)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    def spec(self, name: str) -> TensorSpec:
        for spec in (*self.arguments, *self.outputs):
            if spec.name == name and isinstance(spec, TensorSpec):
                return spec
        raise KeyError(name)

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        return f"{self.op}({arguments}) -> {', '.join(map(str, self.outputs))}"

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        """The dimensions' values in a call."""
        found: dict[str, int] = {}
        for spec, value in zip(self.arguments, values, strict=True):
            if isinstance(spec, TensorSpec) and value is not None and spec.dims != ("*",):
                found |= zip(spec.dims, value.shape, strict=True)
            elif isinstance(spec, ScalarSpec) and spec.type == "int":
                found[spec.name] = value
        return found | self.derive(found, dict(zip(self.names, values, strict=True)))

    def check_outputs(self, who: str, values: Sequence[Any], outputs: Any) -> tuple[Any, ...]:
        """The outputs as a tuple.

        Raises:
            TypeError: Not that many tensors, subclasses of them, or of other dtypes.
            ValueError: Other shapes, device or strides; memory that is an argument's, another
                output's or freed; one that requires a gradient.
        """
        import torch

        results = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        tensors = all(isinstance(result, torch.Tensor) for result in results)
        due = [
            spec
            for spec in self.outputs
            if not spec.comes_with or values[self.names.index(spec.comes_with)] is not None
        ]
        if not tensors or len(results) != len(due):
            names = ", ".join(spec.name for spec in due)
            came = ", ".join(type(result).__name__ for result in results)
            raise TypeError(f"{who} must return the tensors ({names}), got ({came})")
        sizes = self.sizes(values)
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        for spec, result in zip(due, results, strict=True):
            allowed = self._dtypes(spec, values)
            if result.dtype not in allowed:
                names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                came = str(result.dtype).removeprefix("torch.")
                raise TypeError(f"{who} must return `{spec.name}` of dtype {names}, got {came}")
            shape = [sizes[dim] for dim in spec.dims]
            if list(result.shape) != shape:
                dims = f"[{', '.join(spec.dims)}]"
                raise ValueError(
                    f"{who} must return `{spec.name}` of shape {dims} = {shape}, "
                    f"got {list(result.shape)}"
                )
            if result.device != device:
                raise ValueError(
                    f"{who} must return `{spec.name}` on {device}, got one on {result.device}"
                )
            if spec.name in self.written:
                given = values[self.names.index(spec.name)]
                if result.data_ptr() != given.data_ptr() or result.stride() != given.stride():
                    raise ValueError(f"{who} must return `{spec.name}` itself, got another tensor")
            elif not result.is_contiguous():
                raise ValueError(
                    f"{who} must return `{spec.name}` contiguous, got strides "
                    f"{list(result.stride())} for shape {shape}"
                )
        check_new(who, [spec.name for spec in due], results, self._not_new(values), self.written)
        return tuple(results)

    def _not_new(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments whose memory no output may share, by name: not those that the operator
        writes to anyway, nor one that is handed through as the output of its name."""
        through = {*self.mutates, *(spec.name for spec in self.outputs)}
        named = zip(self.names, values, strict=True)
        tensors = {name: value for name, value in named if hasattr(value, "untyped_storage")}
        return {name: value for name, value in tensors.items() if name not in through}

    def _dtypes(self, spec: TensorSpec, values: Sequence[Any]) -> list[Any]:
        import torch

        if spec.dtypes[0] in self.names:
            value = values[self.names.index(spec.dtypes[0])]
            return [value.dtype if isinstance(value, torch.Tensor) else value]
        return [getattr(torch, name) for name in spec.dtypes]
