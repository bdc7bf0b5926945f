# SPDX-License-Identifier: Apache-2.0
"""One operator of ``torch.ops.tiercel``: registration, autograd, choice and run of a backend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tiercel import _C
from tiercel.core import index_checks, invariance, platform, selection
from tiercel.core.checks import check_dense
from tiercel.core.eager import DIRECT, GRAD, TRANSFORMED, is_dynamo_compiling, route
from tiercel.core.platform import Reason

_Function = TypeVar("_Function", bound=Callable[..., Any])

_C.claim_torch_ops()
library = torch.library.Library("tiercel", "FRAGMENT")

# The operators of public ops, by the op's name.
registry: dict[str, Operator] = {}

# Every operator by its name, overloads too.
operators: dict[str, Operator] = {}

# A public op's name -> its operators, which have the same backends.
variants: dict[str, list[Operator]] = {}


@dataclass(frozen=True)
class Backend:
    """One implementation. `run` takes the operator's arguments, `why_not` says when it cannot."""

    name: str
    run: Callable[..., Any]
    description: str
    language: str
    why_not: Callable[..., Reason | None] = field(default=lambda *args: None)


@dataclass(frozen=True)
class Autograd:
    """The derivative: what the forward keeps, and the gradients of the tensor arguments."""

    save: Callable[..., None]  # (ctx, args, outputs)
    backward: Callable[..., tuple[Any, ...]]  # (ctx, *output gradients)


class ExplainRequest(str):
    """Given as ``backend``, it stops a call where the operator is reached: for ``explain``."""

    def __new__(cls, asked: str | None) -> ExplainRequest:
        request = super().__new__(cls, "explain")
        request.asked = asked
        return request

    asked: str | None


class CallIntercepted(BaseException):
    """An ExplainRequest got to this operator with these arguments."""

    def __init__(self, op: Operator, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.op = op
        self.args = args


@dataclass(frozen=True)
class Eager:
    """How `_C.EagerCall` launches sm90 without Python: see eager_call.h.

    Args:
        native: The function of `_C`; None if Python launches, with outputs made in C.
        slots: What it takes, each as ("argument", place), ("output", place),
            ("lookup", (place, table)) or ("constant", value).
        outputs: The results to allocate, see `Spec.allocation`.
        contiguous: Places of tensors that have to be contiguous.
        ranks: (place, rank) of tensors that have to have that many dimensions.
        equals: (place, dimension, place of an int argument) that have to be equal.
        returns: Whether the native function returns the results itself.
        absent: Places of optional tensors with which a call goes on to Python.
    """

    native: Callable[..., Any] | None
    slots: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[Any, ...] = ()
    contiguous: tuple[int, ...] = ()
    ranks: tuple[tuple[int, int], ...] = ()
    equals: tuple[tuple[int, int, int], ...] = ()
    returns: bool = False
    absent: tuple[int, ...] = ()


class Operator:
    """An operator of ``torch.ops.tiercel``; calling it is the fastest way that is right.

    Inside, its arguments are always positional, in one order: those of the schema, the results to
    write to (keyword-only in the schema), then ``backend``.

    Args:
        name: The name in ``torch.ops.tiercel``, with ``.out`` or another overload behind it.
        schema: Its signature: a tensor first, ``str? backend=None`` the last positional argument.
        check: Raises for arguments that no backend takes, with the public error texts.
        fake: The outputs' metadata, made from the arguments.
        sm90: The fast backend. Its ``run`` may raise NotImplementedError: ref then stands in.
        ref: The reference backend.
        autograd: The derivative, if there is one.
        defaults: Defaults that a schema cannot hold as the value itself, such as a dtype's.
        variant_of: The public op that this belongs to: its name in texts and its choice of backend.
        describe: The configuration that sm90 would launch, for ``explain``.
        load: Loads sm90's kernels on a CUDA device, for ``tiercel.load``.
        eager: How to launch sm90 without Python; by default its ``run`` is called.
        indices: The allowed values of index tensors, for TIERCEL_CHECK=1; every operator with such
            an argument has it.
        plugin: (plug-in's function, contract, *arguments) -> outputs, for a registered backend.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        check: Callable[..., None],
        fake: Callable[..., Any],
        sm90: Backend,
        ref: Backend,
        autograd: Autograd | None = None,
        defaults: dict[str, Any] | None = None,
        variant_of: str | None = None,
        describe: Callable[..., dict[str, Any]] | None = None,
        load: Callable[[int], None] | None = None,
        eager: Eager | None = None,
        indices: Callable[..., Iterable[index_checks.Index]] | None = None,
        plugin: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.variant_of = variant_of or name
        variants.setdefault(self.variant_of, []).append(self)
        self._check = check
        self.describe = describe
        self.load = load
        self._fake = fake
        self.backends = {backend.name: backend for backend in (sm90, ref)}
        self.public: Callable[..., Any] | None = None
        self.indices = indices
        self.plugin = plugin

        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        packet, _, overload = name.partition(".")
        self.overload = getattr(getattr(torch.ops.tiercel, packet), overload or "default")
        arguments = self.overload._schema.arguments
        self._positional = sum(not argument.kwarg_only for argument in arguments) - 1
        backend = arguments.pop(self._positional)
        arguments.append(backend)
        self.argument_names = tuple(sys.intern(argument.name) for argument in arguments)
        # ... for an argument that a call has to give
        self._defaults = tuple(
            (defaults or {}).get(
                argument.name, argument.default_value if argument.has_default_value() else ...
            )
            for argument in arguments
        )
        # (place, name, whether it may be None) of every tensor argument
        self._tensors = tuple(
            (i, argument.name, str(argument.type) == "Optional[Tensor]")
            for i, argument in enumerate(arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        )
        self._mutated = tuple(i for i, a in enumerate(arguments) if a.is_write)
        eager_call = functools.partial(self._eager_call, sm90.run, eager)
        # From outside; from the dispatcher, which asks autograd first; and below autograd.
        checked = indices is not None and index_checks.ENABLED
        fallbacks = (self._call, self._run_autograd, self._run_checked if checked else self._run)
        self.eager_calls = tuple(map(eager_call, fallbacks))
        self.eager = self.eager_calls[0]
        self.direct, from_dispatcher, self.below = fallbacks if checked else self.eager_calls
        self._function = _make_function(self, autograd) if autograd is not None else None

        def checked_fake(*args: Any) -> Any:
            self.check(*args)
            return fake(*args)

        library.impl(name, self._filled(self.below), "CompositeExplicitAutograd")
        library.impl(name, self._filled(from_dispatcher), "Autograd")
        torch.library.register_fake(f"tiercel::{name}", self._filled(checked_fake), lib=library)
        operators[name] = self
        self._stand_in(operators[packet])

    def _stand_in(self, default: Operator) -> None:
        """Puts `_C.EagerFilled` before the functions by which ``torch.ops`` calls the dispatcher:
        eager calls and those of compiled graphs cost what a direct call does then."""
        packet = getattr(torch.ops.tiercel, default.name)
        for op, owner in ((self, self.overload), (default, packet)):
            if isinstance(op.direct, _C.EagerCall):
                dispatcher = owner._op
                owner._op = op._filled_in_c(op.direct, dispatcher, stands_in=True)
                if owner is packet:  # TorchScript asks for its name
                    torch.jit._builtins._register_builtin(owner._op, f"tiercel::{default.name}")

    def _eager_call(
        self, run: Callable[..., Any], eager: Eager | None, fallback: Callable[..., Any]
    ) -> _C.EagerCall:
        return _C.EagerCall(
            count=len(self.argument_names),
            tensors=tuple(place for place, _, _ in self._tensors),
            mutated=self._mutated,
            ready=platform.ready,
            run=run,
            recover=self._recover,
            fallback=fallback,
            increment_version=torch._C._increment_version,
            native=None if eager is None else eager.native,
            slots=() if eager is None else eager.slots,
            outputs=() if eager is None else eager.outputs,
            contiguous=() if eager is None else eager.contiguous,
            ranks=() if eager is None else eager.ranks,
            equals=() if eager is None else eager.equals,
            returns=eager is not None and eager.returns,
            absent=() if eager is None else eager.absent,
        )

    def export(self, public: _Function) -> _Function:
        """Decorates the documented function, so that names lead from it to the operator."""
        self.public = public
        registry[self.variant_of] = self
        return public

    def pick(self) -> Callable[..., Any]:
        """The function that a call goes to; calling it costs less than calling the operator."""
        if not is_dynamo_compiling():
            return self.direct
        bool(invariance.watched)  # for its guard
        return self.call_overload

    def __call__(self, *args: Any) -> Any:
        return self.pick()(*args)

    def call_overload(self, *args: Any) -> Any:
        """Calls ``torch.ops.tiercel``'s operator, through the dispatcher."""
        first = self._positional
        if first == len(args) - 1:
            return self.overload(*args)
        outs = dict(zip(self.argument_names[first:-1], args[first:-1], strict=True))
        return self.overload(*args[:first], args[-1], **outs)

    def _given(self, args: tuple[Any, ...]) -> list[Any]:
        """The tensor arguments, and whatever stands in their place."""
        return [args[i] for i, _, optional in self._tensors if not (optional and args[i] is None)]

    def _call(self, *args: Any) -> Any:
        """A call that is not the plain case: see `_C.EagerCall`."""
        if type(args[-1]) is ExplainRequest:
            raise CallIntercepted(self, (*args[:-1], args[-1].asked))
        how = route(*self._given(args))
        if how == DIRECT:
            return self.below(*args)
        if how == GRAD:
            return self._run_grad(True, args)
        if how == TRANSFORMED:
            return self._run_transformed(args)
        return self._dispatch(args)

    def check(self, *args: Any) -> None:
        """Raises for arguments that no backend takes."""
        self.check_tensors(args)
        self._check(*args)

    def check_tensors(self, args: tuple[Any, ...]) -> None:
        """Raises where a tensor argument is no tensor, or a sparse or nested one."""
        for place, name, optional in self._tensors:
            if place >= len(args):  # `explain` knows the first ones
                break
            tensor = args[place]
            if isinstance(tensor, torch.Tensor):
                check_dense(self.variant_of, name, tensor)
            elif not (optional and tensor is None) and not hasattr(tensor, "__torch_function__"):
                raise TypeError(
                    f"{self.variant_of}: `{name}` must be a torch.Tensor{' or None' * optional}, "
                    f"got {type(tensor).__name__}"
                )

    def _dispatch(self, args: tuple[Any, ...]) -> Any:
        self.check_tensors(args)
        # torch negates what is read of such a view, but cannot do so with what is written to it.
        for i in self._mutated:
            if args[i] is not None and args[i].is_neg():
                raise ValueError(
                    f"{self.variant_of}: `{self.argument_names[i]}` must hold its own values, got "
                    "a negated view (Tensor.resolve_neg() makes a copy)"
                )
        return self.call_overload(*args)

    def _run(self, *args: Any) -> Any:
        """Runs a backend on real tensors, where `_C.EagerCall` does not launch."""
        name = args[-1]
        if name is None and selection.overriding:
            name = selection.requested(self.variant_of)
        if (name is None or name == "sm90") and args[0].get_device() in platform.ready:
            try:
                outputs = self.backends["sm90"].run(*args)
            except Exception as error:  # no cost when there is none
                outputs = self._recover(error, name, args)
        else:
            outputs = self._run_resolved(name, args)
        if self._mutated:
            torch._C._increment_version([args[i] for i in self._mutated if args[i] is not None])
        return outputs

    def check_indices(self, args: tuple[Any, ...]) -> None:
        """Raises for a wrong value in an index tensor: TIERCEL_CHECK=1."""
        if self.indices is not None:
            index_checks.check(self.variant_of, self.indices(*args))

    def _run_checked(self, *args: Any) -> Any:
        """`_run` with TIERCEL_CHECK=1."""
        if index_checks.can_look(args[0]):
            self.check(*args)
            self.check_indices(args)
        return Operator._run(self, *args)

    def _run_resolved(self, name: str | None, args: tuple[Any, ...]) -> Any:
        platform.refuse_fork(self.variant_of, args[0])
        self.check(*args)
        if args[0].is_meta:
            return self._fake(*args)
        backend, reason = self.resolve(name, args)
        if reason is not None:
            selection.fall_back(self.variant_of, *reason)
        return backend.run(*args)

    def _recover(self, error: Exception, name: str | None, args: tuple[Any, ...]) -> Any:
        self.check(*args)  # a bad argument gets the public text
        if name is not None or not isinstance(error, NotImplementedError):
            raise error
        text = str(error).removeprefix(f"{self.variant_of}: ")
        selection.fall_back(self.variant_of, NotImplementedError, text)
        return self.backends["ref"].run(*args)

    def resolve(self, name: str | None, args: tuple[Any, ...]) -> tuple[Backend, Reason | None]:
        """The backend for these arguments, and why it is ref where nobody asked for that."""
        if name is None or name == "auto":
            reason = self.backends["sm90"].why_not(*args)
            return self.backends["sm90" if reason is None else "ref"], reason
        backend = self.backends.get(name)
        if backend is None:
            known = ", ".join(sorted(self.backends))
            where = (
                "" if args[-1] == name else f" ({selection.named_in(self.variant_of)} asks for it)"
            )
            raise ValueError(f"{self.variant_of} has no backend {name!r}{where}; it has {known}")
        reason = backend.why_not(*args)
        if reason is not None:
            by = "" if args[-1] == name else f" by {selection.named_in(self.variant_of)}"
            raise reason.error(
                f"{self.variant_of}: backend {name!r} was asked for{by}, but {reason.text}"
            )
        return backend, None

    def _run_transformed(self, args: tuple[Any, ...]) -> Any:
        """Under torch.func and forward-mode AD, torch itself differentiates and batches ref."""
        self.check(*args)
        if (args[-1] or selection.requested(self.variant_of)) != "ref":
            text = "torch.func transforms and forward-mode AD see only plain PyTorch"
            selection.fall_back(self.variant_of, NotImplementedError, text)
        try:
            return self.backends["ref"].run(*args)
        except RuntimeError as error:
            # PyTorch's errors when the values of a batched tensor are read.
            if not any(word in str(error) for word in ("vmap", "doesn't have storage")):
                raise
            raise NotImplementedError(
                f"{self.variant_of}: torch.vmap is not supported for these arguments: how the work "
                "is divided depends on the values of a tensor; call it in a loop over the batch"
            ) from error

    def _run_grad(self, direct: bool, args: tuple[Any, ...]) -> Any:
        if self._function is None:
            raise RuntimeError(
                f"{self.variant_of}: there is no derivative{' for `out=`' * bool(self._mutated)}, "
                "but a tensor requires grad"
            )
        return self._function.apply(direct, *args)

    def _run_autograd(self, *args: Any) -> Any:
        """The dispatcher calls it first, unless `_C.EagerCall` can launch."""
        tensors = self._given(args)
        how = route(*tensors)
        if how == DIRECT:
            return self.below(*args)
        if how == GRAD or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return self._run_grad(how == GRAD, args)
        return self._below_autograd(args)

    def _below_autograd(self, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.call_overload(*args)

    def _filled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for the dispatcher, which leaves out trailing default values and passes the
        results to write to by name."""
        filled = self._filled_in_python(function)
        if isinstance(function, _C.EagerCall):
            return self._filled_in_c(function, filled)
        return filled

    def _filled_in_c(
        self, function: _C.EagerCall, fallback: Callable[..., Any], stands_in: bool = False
    ) -> _C.EagerFilled:
        names, outs = self.argument_names, len(self.argument_names) - 1 - self._positional
        return _C.EagerFilled(function, names, self._defaults, outs, fallback, stands_in=stands_in)

    def _filled_in_python(self, function: Callable[..., Any]) -> Callable[..., Any]:
        defaults, outs = self._defaults, self.argument_names[self._positional : -1]
        if not outs:
            return lambda *args: function(*args, *defaults[len(args) :])
        first = self._positional

        def filled(*args: Any, **named: Any) -> Any:
            backend = args[first] if len(args) > first else defaults[-1]
            values = (*args[:first], *defaults[len(args) : first])
            return function(*values, *(named[name] for name in outs), backend)

        return filled


def _make_function(op: Operator, autograd: Autograd) -> Any:
    """An autograd.Function around the operator; its first argument says: call directly."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, direct: bool, *args: Any) -> Any:
            outputs = op.below(*args) if direct else op._below_autograd(args)
            ctx.set_materialize_grads(False)
            autograd.save(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            inputs = autograd.backward(ctx, *grads)
            return None, *inputs, *[None] * (len(op.argument_names) - len(inputs))

    Function.__name__ = Function.__qualname__ = f"{op.name.replace('.', '_')}_backward"
    return Function
