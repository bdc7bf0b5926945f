# SPDX-License-Identifier: Apache-2.0
"""An op made from its declaration: the operator, its ``out`` overload, gradient and backends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core import platform
from tiercel.core.dispatch import Autograd, Backend, Eager, Operator, library
from tiercel.core.eager import empty, is_dynamo_compiling
from tiercel.core.index_checks import Index
from tiercel.core.platform import Reason
from tiercel.core.spec import Call, Spec
from tiercel.core.spec import Tensor as TensorArgument

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Lookup(NamedTuple):
    """In what a native function takes: the table's entry for an argument, -1 if there is none."""

    argument: str
    table: dict[Any, Any]


@dataclass(frozen=True)
class Native:
    """The kernels of an op, as functions of `_C`.

    Args:
        run: Launches on the current stream and fills the results.
        plan: Takes the same and returns the configuration, without a GPU; raises
            NotImplementedError for what the kernels do not take.
        takes: Their arguments: names of arguments and results, `Lookup`s, or constants that are no
            str. A name that the op lacks is None.
        description: How the kernels work, in a line.
        language: ``cuda`` or ``cute``.
        load: Loads the kernels on a CUDA device.
        contiguous: Tensors that `launch` would rearrange unless they are contiguous.
        ranks: Tensors that `launch` would reshape unless they have that many dimensions.
        rearranged: Optional tensors that `launch` always rearranges.
        launch: (native function, call) -> its result, for arguments that have to be rearranged
            first; by default they are passed as they are.
        direct: Whether a call may go to `run` without Python; no if `launch` always has to look.
        sample: (call) -> arguments to replace for a plan that only tells whether the kernels
            apply: a few rows say as much as all.
        returns: `run` allocates and returns the results.
        run_out: As `run`, for the overload ``out``, where that is another function.
        takes_out: Its arguments.
    """

    run: Callable[..., Any]
    plan: Callable[..., Any]
    takes: Sequence[Any]
    description: str
    language: str = "cuda"
    load: Callable[[int], None] | None = None
    contiguous: Sequence[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    rearranged: Sequence[str] = ()
    launch: Callable[[Callable[..., Any], Call], Any] | None = None
    direct: bool = True
    sample: Callable[[Call], dict[str, Any]] | None = None
    returns: bool = False
    run_out: Callable[..., Any] | None = None
    takes_out: Sequence[Any] = ()

    def functions(self, into_out: bool) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The native function for this operator, and its arguments."""
        if into_out and self.run_out is not None:
            return self.run_out, self.takes_out
        return self.run, self.takes


@dataclass(frozen=True)
class Python:
    """An sm90 backend that is more than one launch.

    Args:
        run: (call) -> the results; with ``out`` they are in the call already, and it returns None.
        plan: (call) -> the configuration; NotImplementedError where the kernels do not apply.
        description: How it works, in a line.
        language: ``cuda`` or ``cute``.
        load: Loads the kernels on a CUDA device.
        sample: As in `Native`.
        positional: `run` takes the arguments, and behind them the results to write to, one by one:
            faster than with a call.
    """

    run: Callable[..., Any]
    plan: Callable[[Call], dict[str, Any]]
    description: str
    language: str = "cuda"
    load: Callable[[int], None] | None = None
    sample: Callable[[Call], dict[str, Any]] | None = None
    positional: bool = False


@dataclass(frozen=True)
class Gradient:
    """The derivative of an op.

    Args:
        save: (ctx, call, results): keeps what the backward needs. ``ctx.wants`` says by name which
            tensor arguments need a gradient.
        backward: (ctx, *gradients of the results) -> gradients by argument name.
    """

    save: Callable[..., None]
    backward: Callable[..., dict[str, Tensor | None]]


def _packed(results: Sequence[Any]) -> Any:
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _unpacked(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _copy(source: Tensor, to: Tensor) -> None:
    if source.dtype == torch.float4_e2m1fn_x2:  # PyTorch 2.9 does not copy these
        source, to = source.view(torch.uint8), to.view(torch.uint8)
    to.copy_(source)


# Every op, by its operator's name.
ops: dict[str, Op] = {}


class Op:
    """An op. Calling it with the operator's arguments, ``backend`` last, is the fastest right way.

    Args:
        spec: The declaration.
        sm90: The kernels.
        reference: (call) -> the results in plain PyTorch; an op without results writes itself.
        method: How the reference works, in a line.
        gradient: The derivative, if there is one.
        indices: (call) -> the allowed values of index tensors, for TIERCEL_CHECK=1.
        out: Whether there is an overload that writes to given results.
        fake: (call) -> the results' metadata, where `Spec.empty` does not say it.
        plugin: (plug-in's function, call) -> the results, where more than the batch dimensions
            differs for a plug-in.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        sm90: Native | Python,
        reference: Callable[[Call], Any],
        method: str,
        gradient: Gradient | None = None,
        indices: Callable[[Call], Iterable[Index]] | None = None,
        out: bool = True,
        fake: Callable[[Call], Any] | None = None,
        plugin: Callable[..., Any] | None = None,
    ) -> None:
        self.spec = spec
        ops[spec.name] = self
        self._sm90 = sm90
        self._reference = reference
        self._fake = fake
        self._plugin = plugin
        self._method = method
        self._indices = indices
        self.operator = self._operator(spec.names, "", spec.schema(), gradient)
        self.pick = self.operator.pick
        self.out: Operator | None = None
        if out and spec.results:
            names = (*spec.names, *spec.result_names)
            self.out = self._operator(names, ".out", spec.out_schema(), None)
            self._into: Callable[..., Any] = self._into_in_python
            if self.out.direct is self.out.eager:
                self._into = _C.EagerInto(self.out.eager, len(spec.results), self._into_in_python)

    def __call__(self, *args: Any) -> Any:
        return self.operator.pick()(*args)

    def into(self) -> Callable[..., Any]:
        """The function (out, *arguments, backend) that writes to `out`, a tensor or a tuple of
        them, and returns it."""
        return self._into_in_python if is_dynamo_compiling() else self._into

    def _into_in_python(self, out: Any, *args: Any) -> Any:
        assert self.out is not None
        outs = (out,)
        if len(self.spec.results) > 1:
            outs = out = self.checked_out(out)
        self.out.pick()(*args[:-1], *outs, args[-1])
        return out

    def checked_out(self, out: Any) -> tuple[Any, ...]:
        """The given results of an op that has several.

        Raises:
            TypeError: It is no tuple or list of that many values.
        """
        if isinstance(out, (tuple, list)) and len(out) == len(self.spec.results):
            return tuple(out)
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        count = len(self.spec.results)
        raise TypeError(
            f"{self.spec.public}: {self.spec.out_text}`out` must be "
            f"{'a pair' if count == 2 else f'{count} tensors'} "
            f"({', '.join(self.spec.result_names)}), got {got}"
        )

    def export(self, public: _Function) -> _Function:
        """Decorates the documented function, so that names lead from it to the operators."""
        return self.operator.export(public)

    # -- the operators -----------------------------------------------------------------------------

    def _operator(
        self, names: tuple[str, ...], overload: str, schema: str, gradient: Gradient | None
    ) -> Operator:
        spec, sm90 = self.spec, self._sm90
        into_out = bool(overload)

        def named(function: Callable[[Call], Any]) -> Callable[..., Any]:
            return lambda *args: function(Call(**dict(zip(names, args, strict=False))))

        # With given results, an argument that is a dtype does not count.
        dtypes = {r.allowed[0]: r.name for r in spec.results if into_out}

        def with_dtypes(call: Call) -> Call:
            for argument, result in dtypes.items():
                if argument in {scalar.name for scalar in spec.scalars}:
                    call.__dict__[argument] = getattr(call, result).dtype
            return call

        def reference(call: Call) -> Any:
            results = self._reference(with_dtypes(call))
            if not spec.results:
                return None
            made = tuple(result.contiguous() for result in _unpacked(results))
            if not into_out:
                return _packed(made)
            for result, value in zip(spec.result_names, made, strict=True):
                _copy(value, getattr(call, result))
            return None

        def plugin(function: Callable[..., Any], contract: Any, *args: Any) -> Any:
            call = with_dtypes(Call(**dict(zip(names, args, strict=False))))
            if self._plugin is not None:
                made = _unpacked(self._plugin(function, call))
            elif spec.gradient_of:
                return named(reference)(*args)
            else:
                made = contract.run(function, call, spec.result_names)
            if spec.results and not into_out:
                return _packed(made)
            places = spec.result_names or tuple(a.name for a in spec.tensors if a.written)
            for result, value in zip(places, made, strict=True):
                given = getattr(call, result)
                if given is not value:
                    _copy(value, given)
            return None

        return Operator(
            spec.name + overload,
            schema,
            check=named(spec.validate),
            fake=(lambda *args: None) if into_out else named(self._metadata),
            sm90=Backend(
                "sm90",
                self._positional
                if isinstance(sm90, Python) and sm90.positional
                else named(self._run_out)
                if into_out
                else self._run,
                sm90.description,
                sm90.language,
                why_not=named(self.why_not),
            ),
            ref=Backend("ref", named(reference), self._method, "torch"),
            autograd=None if gradient is None else self._autograd(gradient),
            defaults=spec.defaults(),
            variant_of=spec.public,
            describe=named(self.plan),
            load=None if into_out else sm90.load,
            eager=self._eager(sm90, names) if isinstance(sm90, Native) else None,
            indices=None if self._indices is None else named(self._indices),
            plugin=plugin,
        )

    def _metadata(self, call: Call) -> Any:
        return _packed(self.spec.empty(call)) if self._fake is None else self._fake(call)

    def _autograd(self, gradient: Gradient) -> Autograd:
        names = self.spec.names
        # The first argument of the autograd.Function says how to run.
        tensors = [
            (1 + place, argument.name)
            for place, argument in enumerate(self.spec.arguments)
            if isinstance(argument, TensorArgument)
        ]

        def save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
            call = Call()
            call.__dict__.update(zip(names, args, strict=False))
            call.__dict__["backend"] = args[-1]
            needs = ctx.needs_input_grad
            ctx.wants = {name: needs[place] for place, name in tensors}
            gradient.save(ctx, call, outputs)

        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = gradient.backward(ctx, *grads)
            return tuple(found.get(name) for name in names)

        return Autograd(save, backward)

    # -- sm90 --------------------------------------------------------------------------------------

    def _values(self, call: Call, takes: Sequence[Any]) -> list[Any]:
        values = []
        for taken in takes:
            if isinstance(taken, Lookup):
                taken = taken.table.get(getattr(call, taken.argument), -1)
            elif isinstance(taken, str):
                taken = getattr(call, taken, None)
            values.append(taken)
        return values

    def _launch(self, native: Callable[..., Any], call: Call, takes: Sequence[Any]) -> Any:
        assert isinstance(self._sm90, Native)
        if self._sm90.launch is not None:
            return self._sm90.launch(native, call)
        return native(*self._values(call, takes))

    def launch(self, native: Callable[..., Any], call: Call) -> Any:
        """Calls a native function with the arguments and results that the call has."""
        assert isinstance(self._sm90, Native)
        return native(*self._values(call, self._sm90.takes))

    def empty(self, call: Call) -> tuple[Any, ...]:
        """New results."""
        spec = self.spec
        if any(r.any_shape and r.shape is None for r in spec.results):
            assert self._fake is not None
            return _unpacked(self._fake(call))
        known = {} if all(r.shape is not None for r in spec.results) else spec.sizes(call)
        first = getattr(call, spec.arguments[0].name)
        return tuple(
            empty(first, tuple(spec.result_shape(r, call, known)), spec.result_dtype(r, call))
            for r in spec.results
        )

    def _run(self, *args: Any) -> Any:
        call = Call()
        call.__dict__.update(zip(self.spec.names, args, strict=False))  # without the backend
        if isinstance(self._sm90, Python):
            return self._sm90.run(call)
        run, takes = self._sm90.functions(False)
        if self._sm90.returns:
            return self._launch(run, call, takes)
        made = self.operator.eager.outputs(*args) or self.empty(call)
        call.__dict__.update(zip(self.spec.result_names, made, strict=True))
        self._launch(run, call, takes)
        return _packed(made)

    def _positional(self, *args: Any) -> Any:
        return self._sm90.run(*args[:-1])  # without the backend

    def _run_out(self, call: Call) -> None:
        if isinstance(self._sm90, Python):
            self._sm90.run(call)
            return
        ints = {a.name for a in self.spec.scalars if a.kind == "int"}
        if any(not ints.isdisjoint(result.own_dims) for result in self.spec.results):
            self.spec.validate(call)  # the native function takes such a size from the results
        run, takes = self._sm90.functions(True)
        self._launch(run, call, takes)

    def _eager(self, sm90: Native, names: tuple[str, ...]) -> Eager | None:
        spec = self.spec
        place = {name: i for i, name in enumerate(names)}
        into_out = len(names) > len(spec.names)
        run, takes = sm90.functions(into_out)
        outputs = () if into_out or sm90.returns else spec.allocation(place)
        if outputs is None:
            return None
        if not sm90.direct:
            return Eager(None, outputs=outputs)
        slots: list[tuple[str, Any]] = []
        for taken in takes:
            if isinstance(taken, Lookup):
                slots.append(("lookup", (place[taken.argument], taken.table)))
            elif not isinstance(taken, str):
                slots.append(("constant", taken))
            elif taken in place:
                slots.append(("argument", place[taken]))
            elif taken in spec.result_names and not sm90.returns:
                slots.append(("output", spec.result_names.index(taken)))
            else:
                slots.append(("constant", None))
        return Eager(
            run,
            tuple(slots),
            outputs,
            contiguous=tuple(place[name] for name in sm90.contiguous if name in place),
            ranks=(
                *spec.ranks(place),
                *((place[name], rank) for name, rank in sm90.ranks.items()),
            ),
            equals=spec.int_dims(place),
            returns=sm90.returns,
            absent=tuple(place[name] for name in sm90.rearranged if name in place),
        )

    def plan(self, call: Call) -> dict[str, Any]:
        """The configuration that sm90 would launch; NotImplementedError where it does not apply."""
        if isinstance(self._sm90, Python):
            return self._sm90.plan(call)
        call = Call(**call.__dict__)
        if any(result not in call for result in self.spec.result_names):
            call.__dict__.update(zip(self.spec.result_names, self.empty(call), strict=True))
        return dict(self._launch(self._sm90.plan, call, self._sm90.takes))

    def why_not(self, call: Call) -> Reason | None:
        """Why sm90 does not apply, or None."""
        device: Any = getattr(call, self.spec.arguments[0].name).device
        reason = platform.why_not(device)
        if reason is not None:
            return reason
        if self._sm90.sample is not None:
            call = Call(**{**self.spec.values(call), **self._sm90.sample(call)})
        try:
            self.plan(call)
        except NotImplementedError as error:
            # A native function's text begins with an op's name, which may be another's.
            return Reason(NotImplementedError, re.sub(r"^\w+: ", "", str(error)))
        return None


def composite(spec: Spec) -> Callable[[_Function], _Function]:
    """Decorates a public function that only calls other ops: torch.ops has it, too, and decomposes
    it into them."""

    def declare(public: _Function) -> _Function:
        names = (*spec.names, "backend")
        library.define(spec.name + spec.schema(), tags=(torch.Tag.pt2_compliant_tag,))

        def call(*args: Any) -> Any:
            return public(**dict(zip(names, args, strict=False)))

        library.impl(spec.name, call, "CompositeImplicitAutograd")
        return public

    return declare
