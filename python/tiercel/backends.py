# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator runs on.

Every operator has the backends ``sm90`` (the precompiled kernels) and ``ref`` (plain PyTorch, any
device). Unless told otherwise it takes sm90 where that applies and ref, with one warning a reason,
where it does not; with TIERCEL_STRICT=1 that is an error instead.

What is asked for is looked up inside the operator on every call, so it also holds for graphs that
torch.compile has compiled before. In order: the call's ``backend=``,
``with use_backend(op=..., name=...)``, ``set_backend(op=..., name=...)``, the environment's
TIERCEL_BACKEND (``ref``, or ``topk_softmax=ref,...``; read when the operators are first used). A
backend that was asked for and does not apply is an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

from tiercel._log import logger
from tiercel.plugins.loading import load_entry_points, load_folder, load_path
from tiercel.plugins.registration import register, unregister

__all__ = [
    "FallbackWarning",
    "load_entry_points",
    "load_folder",
    "load_path",
    "register",
    "set_backend",
    "unregister",
    "use_backend",
]


class FallbackWarning(UserWarning):
    """An operator ran on its reference implementation; the message says why."""


# Op name (None: every op) -> backend.
_Choices = dict["str | None", str]


def _parse(text: str) -> _Choices:
    choices: _Choices = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, equals, name = part.rpartition("=")
        choices[op.strip() if equals else None] = name.strip()
    return choices


_environment = _parse(os.environ.get("TIERCEL_BACKEND", ""))
_process: _Choices = {}
_context: contextvars.ContextVar[_Choices | None] = contextvars.ContextVar("tiercel", default=None)

_lock = threading.Lock()
_contexts = 0  # `use_backend` blocks that are open, in any thread

# False lets an operator skip the look-up.
overriding = bool(_environment)


def _update(opened: int) -> None:
    global _contexts, overriding
    _contexts += opened
    overriding = bool(_environment or _process or _contexts)


def requested(op: str) -> str | None:
    """The backend that was asked for outside of the call, or None."""
    for choices in (_context.get(), _process, _environment):
        if choices:
            name = choices.get(op) or choices.get(None)
            if name is not None:
                return None if name == "auto" else name
    return None


def named_in(op: str) -> str:
    """Where an operator's backend was named outside of the call, for messages."""
    for choices, where in (
        (_context.get(), "use_backend"),
        (_process, "set_backend"),
        (_environment, "TIERCEL_BACKEND"),
    ):
        if choices and (choices.get(op) or choices.get(None)) is not None:
            return where
    return "backend="


def warn_of_unknown_names(known: Iterable[str]) -> None:
    """Logs what TIERCEL_BACKEND says of operators that there are none of."""
    for op, name in _environment.items():
        if not name or op not in (None, *known):
            logger.warning(
                "TIERCEL_BACKEND: %r=%r is ignored: no such operator or backend", op, name
            )


def set_backend(op: str | None = None, name: str | None = None) -> None:
    """Sets the backend of one operator for the whole process.

    Best called by keyword, as `use_backend` is, whose positional order is the other one.

    Args:
        op: The operator's name, such as ``"topk_softmax"``; None for every operator.
        name: The backend's name, or None to go back to the default.

    Raises:
        ValueError: No such operator or backend.

    Example:
        >>> tiercel.set_backend(op="topk_softmax", name="ref")
    """
    _check_names(op, name)
    with _lock:
        if name is None:
            _process.pop(op, None)
        else:
            _process[op] = name
        _update(0)


@contextlib.contextmanager
def use_backend(name: str, op: str | None = None) -> Iterator[None]:
    """Runs operators on a backend inside a ``with`` block, in this thread or task only.

    Args:
        name: The backend's name.
        op: One operator's name; by default every operator.

    Raises:
        ValueError: No such operator or backend.

    Example:
        >>> with tiercel.use_backend(op="topk_softmax", name="ref"):
        ...     tiercel.topk_softmax(scores, 8)
    """
    _check_names(op, name)
    token = _context.set({**(_context.get() or {}), op: name})
    with _lock:
        _update(+1)
    try:
        yield
    finally:
        with _lock:
            _update(-1)
        _context.reset(token)


def _check_names(op: str | None, name: str | None) -> None:
    from tiercel import ops as ops  # fills the registry
    from tiercel._op import registry

    if op is not None and op not in registry:
        swapped = f" (did you mean op={name!r}, name={op!r}?)" if name in registry else ""
        known_ops = ", ".join(sorted(registry))
        raise ValueError(f"tiercel has no operator {op!r}{swapped}; it has {known_ops}")
    known = {b for o in registry.values() if op in (None, o.name) for b in o.backends} | {"auto"}
    if name is not None and name not in known:
        raise ValueError(
            f"no operator has a backend {name!r}" if op is None else f"{op} has no backend {name!r}"
        )


_warned: set[str] = set()


def fall_back(op: str, error: type[Exception], text: str) -> None:
    """Warns, once a reason, that an operator runs on ref; raises under TIERCEL_STRICT=1."""
    if os.environ.get("TIERCEL_STRICT", "0").lower() not in ("", "0", "false", "no", "off"):
        raise error(f"{op}: {text} (TIERCEL_STRICT is set, so ref does not stand in)")
    # Sizes in the sentence do not make it another reason.
    key = re.sub(r"\d+", "#", f"{op}: {text}")
    if key in _warned:
        return
    _warned.add(key)
    message = f"{op} runs on the slower 'ref' backend: {text}"
    logger.info(message)
    warnings.warn(message, FallbackWarning, stacklevel=callers_level())


def callers_level() -> int:
    """The stacklevel of the first frame outside of tiercel and torch, seen from the caller."""
    level, frame = 1, sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("tiercel", "torch"):
            return level
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return 2
