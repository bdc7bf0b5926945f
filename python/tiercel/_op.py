# SPDX-License-Identifier: Apache-2.0
"""The operator layer: an operator is declared once and gets registration, autograd, backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tiercel import _C, _index_checks, _platform, backends
from tiercel._checks import check_dense
from tiercel._eager import DIRECT, GRAD, TRANSFORMED, is_dynamo_compiling, route
from tiercel._platform import Reason

_Function = TypeVar("_Function", bound=Callable[..., Any])

library = torch.library.Library("tiercel", "FRAGMENT")

# Public operators by name.
registry: dict[str, Op] = {}

# A public operator's name -> it and its variants, which have the same backends.
families: dict[str, list[Op]] = {}


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


class Probe(str):
    """As ``backend``, it stops a call where the operator is reached: for ``explain``."""

    def __new__(cls, asked: str | None) -> Probe:
        probe = super().__new__(cls, "probe")
        probe.asked = asked
        return probe

    asked: str | None


class Reached(BaseException):
    """A Probe got to this operator with these arguments."""

    def __init__(self, op: Op, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.op = op
        self.args = args


class Op:
    """An operator of ``torch.ops.tiercel``; calling it is the fastest way that is right.

    Args:
        name: The name in ``torch.ops.tiercel``.
        schema: Its signature: tensors first, ``str? backend`` last.
        check: Raises for arguments that no backend takes, with the public error texts.
        fake: The outputs' metadata, made from the arguments.
        sm90: The fast backend. Its ``run`` may raise NotImplementedError: ref then stands in.
        ref: The reference backend.
        autograd: The derivative, if there is one.
        defaults: Defaults that a schema cannot hold as the value itself, such as a dtype's.
        family: The public operator that this is a variant of, whose backend choice it follows.
        describe: The configuration that sm90 would launch, for ``explain``.
        load: Loads sm90's kernels on a CUDA device, for ``tiercel.load``.
        launch: sm90's ``run`` as one function of ``_C``, which takes all arguments but ``backend``:
            a call then goes to it without Python in between.
        indices: What the arguments that hold places in others may hold, for TIERCEL_CHECK=1; every
            operator with such an argument has it.
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
        family: str | None = None,
        describe: Callable[..., dict[str, Any]] | None = None,
        load: Callable[[int], None] | None = None,
        launch: Callable[..., Any] | None = None,
        indices: Callable[..., Iterable[_index_checks.Index]] | None = None,
    ) -> None:
        self.name = name
        self.family = family or name
        families.setdefault(self.family, []).append(self)
        self._check = check
        self.describe = describe
        self.load = load
        self._fake = fake
        self.backends = {backend.name: backend for backend in (sm90, ref)}
        self.public: Callable[..., Any] | None = None
        self.indices = indices

        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.tiercel, name).default
        arguments = self.overload._schema.arguments
        self.argument_names = tuple(argument.name for argument in arguments)
        self._defaults = tuple(
            (defaults or {}).get(argument.name, argument.default_value) for argument in arguments
        )
        self._tensors = sum(isinstance(a.type, torch.TensorType) for a in arguments)
        # (place, name, whether it may be None) of every tensor argument
        self._every_tensor = tuple(
            (i, argument.name, i >= self._tensors)
            for i, argument in enumerate(arguments)
            if i < self._tensors or str(argument.type) == "Optional[Tensor]"
        )
        self._mutated = tuple(i for i, a in enumerate(arguments) if a.is_write)
        self.direct: Callable[..., Any] = _C.Direct(
            count=len(arguments),
            tensors=self._tensors,
            mutated=self._mutated,
            ready=_platform.ready,
            overrides=vars(backends),
            run=launch or sm90.run,
            recover=self._recover,
            otherwise=self._call,
            increment_version=torch._C._increment_version,
            without_backend=launch is not None,
        )
        if indices is not None and _index_checks.ENABLED:
            self.direct = self._call
            self._run = self._run_checked  # type: ignore[method-assign]
        self._function = _make_function(self, autograd) if autograd is not None else None

        def checked_fake(*args: Any) -> Any:
            self.check(*args)
            return fake(*args)

        library.impl(name, self._filled(self._run), "CompositeExplicitAutograd")
        library.impl(name, self._filled(self._run_autograd), "Autograd")
        torch.library.register_fake(f"tiercel::{name}", self._filled(checked_fake), lib=library)

    def export(self, public: _Function) -> _Function:
        """Decorates the documented function, so that names lead from it to the operator."""
        self.public = public
        registry[self.name] = self
        return public

    def pick(self) -> Callable[..., Any]:
        """What a call goes to. Calling that costs a little less than calling the operator."""
        return self.overload if is_dynamo_compiling() else self.direct

    def __call__(self, *args: Any) -> Any:
        return self.pick()(*args)

    def _call(self, *args: Any) -> Any:
        """A call that is not the plain case: see `_C.Direct`."""
        if type(args[-1]) is Probe:
            raise Reached(self, (*args[:-1], args[-1].asked))
        how = route(*args[: self._tensors])
        if how == DIRECT:
            return self._run(*args)
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
        for place, name, optional in self._every_tensor:
            if place >= len(args):  # `explain` knows the first ones
                break
            tensor = args[place]
            if isinstance(tensor, torch.Tensor):
                check_dense(self.family, name, tensor)
            elif not (optional and tensor is None) and not hasattr(tensor, "__torch_function__"):
                raise TypeError(
                    f"{self.family}: `{name}` must be a torch.Tensor{' or None' * optional}, got "
                    f"{type(tensor).__name__}"
                )

    def _dispatch(self, args: tuple[Any, ...]) -> Any:
        self.check_tensors(args)
        # torch negates what is read of such a view, but cannot do so with what is written to it.
        for i in self._mutated:
            if args[i].is_neg():
                raise ValueError(
                    f"{self.family}: `{self.argument_names[i]}` must hold its own values, got a "
                    "negated view (Tensor.resolve_neg() makes a copy)"
                )
        return self.overload(*args)

    def _run(self, *args: Any) -> Any:
        """Runs a backend on real tensors; what the dispatcher calls below autograd."""
        name = args[-1]
        if name is None and backends.overriding:
            name = backends.requested(self.family)
        if (name is None or name == "sm90") and args[0].get_device() in _platform.ready:
            try:
                outputs = self.backends["sm90"].run(*args)
            except Exception as error:  # no cost when there is none
                outputs = self._recover(error, name, args)
        else:
            outputs = self._run_resolved(name, args)
        if self._mutated:
            torch._C._increment_version([args[i] for i in self._mutated])
        return outputs

    def check_indices(self, args: tuple[Any, ...]) -> None:
        """Raises for what TIERCEL_CHECK=1 finds wrong in the operator's arguments."""
        if self.indices is not None:
            _index_checks.check(self.family, self.indices(*args))

    def _run_checked(self, *args: Any) -> Any:
        """`_run` with TIERCEL_CHECK=1."""
        if _index_checks.can_look(args[0]):
            self.check(*args)
            self.check_indices(args)
        return Op._run(self, *args)

    def _run_resolved(self, name: str | None, args: tuple[Any, ...]) -> Any:
        _platform.refuse_fork(self.family, args[0])
        self.check(*args)
        if args[0].is_meta:
            return self._fake(*args)
        backend, reason = self.resolve(name, args)
        if reason is not None:
            backends.fall_back(self.family, *reason)
        return backend.run(*args)

    def _recover(self, error: Exception, name: str | None, args: tuple[Any, ...]) -> Any:
        self.check(*args)  # a bad argument gets the public text
        if name is not None or not isinstance(error, NotImplementedError):
            raise error
        text = str(error).removeprefix(f"{self.family}: ")
        backends.fall_back(self.family, NotImplementedError, text)
        return self.backends["ref"].run(*args)

    def resolve(self, name: str | None, args: tuple[Any, ...]) -> tuple[Backend, Reason | None]:
        """The backend for these arguments, and why it is ref where nobody asked for that."""
        if name is None or name == "auto":
            reason = self.backends["sm90"].why_not(*args)
            return self.backends["sm90" if reason is None else "ref"], reason
        backend = self.backends.get(name)
        if backend is None:
            known = ", ".join(sorted(self.backends))
            where = "" if args[-1] == name else f" ({backends.named_in(self.family)} asks for it)"
            raise ValueError(f"{self.family} has no backend {name!r}{where}; it has {known}")
        reason = backend.why_not(*args)
        if reason is not None:
            by = "" if args[-1] == name else f" by {backends.named_in(self.family)}"
            raise reason.error(
                f"{self.family}: backend {name!r} was asked for{by}, but {reason.text}"
            )
        return backend, None

    def _run_transformed(self, args: tuple[Any, ...]) -> Any:
        """Under torch.func and forward-mode AD, torch itself differentiates and batches ref."""
        self.check(*args)
        if (args[-1] or backends.requested(self.family)) != "ref":
            text = "torch.func transforms and forward-mode AD see only plain PyTorch"
            backends.fall_back(self.family, NotImplementedError, text)
        try:
            return self.backends["ref"].run(*args)
        except RuntimeError as error:
            # PyTorch's errors when the values of a batched tensor are read.
            if not any(word in str(error) for word in ("vmap", "doesn't have storage")):
                raise
            raise NotImplementedError(
                f"{self.family}: torch.vmap is not supported for these arguments: how the work is "
                "divided depends on the values of a tensor; call it in a loop over the batch"
            ) from error

    def _run_grad(self, direct: bool, args: tuple[Any, ...]) -> Any:
        if self._function is None:
            raise RuntimeError(
                f"{self.family}: there is no derivative{' for `out=`' if self._mutated else ''}, "
                "but a tensor requires grad"
            )
        return self._function.apply(direct, *args)

    def _run_autograd(self, *args: Any) -> Any:
        """What the dispatcher calls first."""
        tensors = args[: self._tensors]
        how = route(*tensors)
        if how == DIRECT:
            return self._run(*args)
        if how == GRAD or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return self._run_grad(how == GRAD, args)
        return self._below_autograd(args)

    def _below_autograd(self, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)

    def _filled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch leaves out trailing arguments that have their default value."""
        defaults = self._defaults

        def filled(*args: Any) -> Any:
            return function(*args, *defaults[len(args) :])

        return filled


def _make_function(op: Op, autograd: Autograd) -> Any:
    """An autograd.Function around the operator; its first argument says: call directly."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, direct: bool, *args: Any) -> Any:
            outputs = op._run(*args) if direct else op._below_autograd(args)
            ctx.set_materialize_grads(False)
            autograd.save(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            inputs = autograd.backward(ctx, *grads)
            return None, *inputs, *[None] * (len(op.argument_names) - len(inputs))

    Function.__name__ = Function.__qualname__ = f"{op.name}_backward"
    return Function
