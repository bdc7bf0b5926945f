# SPDX-License-Identifier: Apache-2.0
"""Adding a backend to an operator."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

_F = TypeVar("_F", bound=Callable[..., Any])

# Languages whose kernels run on a GPU only.
_GPU_LANGUAGES = ("cuda", "cute", "triton")


@dataclass(frozen=True)
class Plugin:
    """A registered backend: what `register` was told, and where from."""

    op: str
    name: str
    fn: Callable[..., Any]
    description: str
    language: str
    origin: str

    def as_dict(self) -> dict[str, str]:
        names = ("op", "name", "description", "language", "origin")
        return {name: getattr(self, name) for name in names}


# By operator and name.
registered: dict[tuple[str, str], Plugin] = {}
_lock = threading.RLock()


@dataclass
class Source:
    """Where registrations come from while a file or an entry point is loaded."""

    origin: str
    replace: bool
    plugins: list[Plugin] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)


_source: contextvars.ContextVar[Source | None] = contextvars.ContextVar("source", default=None)


@overload
def register(
    *,
    op: str,
    name: str,
    fn: None = None,
    description: str = "",
    language: str = "",
    replace: bool = False,
) -> Callable[[_F], _F]: ...
@overload
def register(
    *,
    op: str,
    name: str,
    fn: _F,
    description: str = "",
    language: str = "",
    replace: bool = False,
) -> _F: ...
def register(
    *,
    op: str,
    name: str,
    fn: Any = None,
    description: str = "",
    language: str = "",
    replace: bool = False,
) -> Any:
    """Makes a function a backend of an operator, for this process.

    It is then chosen like ours, by ``backend=``, `use_backend`, `set_backend` or TIERCEL_BACKEND,
    and never without being asked for. The operator checks the arguments first and the outputs
    after; gradients, ``out=`` and torch.compile work as for ours.

    Args:
        op: The operator, such as ``"topk_softmax"``.
        name: The backend's name: letters, digits, ``_``, ``-`` and ``.``.
        fn: The function, with the arguments that the operator's contract names, in its order.
            Without it this is a decorator.
        description: One line on how it works.
        language: ``torch``, ``triton``, ``cuda``, ``cute`` or another. A backend in one of the
            last three of these says so when it is asked for with tensors that are not on a GPU.
        replace: Take the place of a registered backend of that name.

    Returns:
        `fn`, unchanged.

    Raises:
        ValueError: No such operator, a bad name, or one that is taken.
        TypeError: `fn` does not have the contract's signature; the message says what is wrong.

    Example:
        >>> @tiercel.backends.register(op="topk_softmax", name="mine", language="torch")
        ... def mine(scores, k, softmax_first, renormalize, indices_dtype): ...
    """

    def add(fn: _F) -> _F:
        _add(op, name, fn, description, language, replace)
        return fn

    return add if fn is None else add(fn)


def _add(op: str, name: str, fn: Any, description: str, language: str, replace: bool) -> None:
    from tiercel.core.dispatch import Backend, variants
    from tiercel.ops import _register as _register  # fills the registry
    from tiercel.plugins.contracts import contract_of
    from tiercel.plugins.signature import conform

    contract = contract_of(op)
    who = f"{op}: backend {name!r}"
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII) is None:
        raise ValueError(f"{who}: a name is made of letters, digits, '_', '-' and '.'")
    call = conform(who, fn, contract.names)
    source = _source.get()
    with _lock:
        present = registered.get((op, name))
        if name == "auto" or (present is None and name in variants[op][0].backends):
            raise ValueError(f"{who}: that name is Tiercel's own")
        if present is not None and not (replace or (source is not None and source.replace)):
            raise ValueError(
                f"{who} is registered already, from {present.origin}; replace=True takes its place"
            )
        origin = source.origin if source is not None else _defined_in(fn)
        plugin = Plugin(op, name, fn, description, language, origin)
        undo = []
        for variant in variants[op]:
            run = _runner(contract, variant, who, call)
            backend = Backend(name, run, description, language, _why_not(language))
            undo.append(_put(variant.backends, name, backend))
        undo.append(_put(registered, (op, name), plugin))
        if source is not None:
            source.plugins.append(plugin)
            source.undo += undo


def _put(target: dict[Any, Any], key: Any, value: Any) -> Callable[[], None]:
    """Puts it there; returns what takes it back."""
    before = target.get(key)
    target[key] = value

    def undo() -> None:
        if before is None:
            target.pop(key, None)
        else:
            target[key] = before

    return undo


def unregister(op: str, name: str) -> None:
    """Takes a registered backend away again.

    Raises:
        ValueError: There is none of that name.
    """
    from tiercel.core.dispatch import variants

    with _lock:
        if registered.pop((op, name), None) is None:
            raise ValueError(f"{op} has no registered backend {name!r}")
        for variant in variants[op]:
            variant.backends.pop(name, None)


@contextlib.contextmanager
def registering_from(origin: str, replace: bool) -> Iterator[Source]:
    """Registrations inside count as from there; if it fails, none of them stays."""
    source = Source(origin, replace)
    token = _source.set(source)
    try:
        yield source
    except BaseException:
        with _lock:
            for undo in reversed(source.undo):
                undo()
        raise
    finally:
        _source.reset(token)


def _defined_in(fn: Any) -> str:
    return getattr(fn, "__module__", None) or "code"


def _runner(contract: Any, variant: Any, who: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> tuple[Any, ...]:
        checked: tuple[Any, ...] = contract.check_outputs(who, values, fn(*values))
        return checked

    return lambda *args: variant.plugin(call, contract, *args[:-1])  # without `backend`


def _why_not(language: str) -> Callable[..., Any]:
    from tiercel.core.platform import Reason

    def why_not(*args: Any) -> Any:
        device = args[0].device.type
        interpreted = language == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if language not in _GPU_LANGUAGES or device == "cuda" or interpreted:
            return None
        text = f"it is a {language} kernel and needs CUDA tensors, these are on {device}"
        return Reason(RuntimeError, text)

    return why_not
