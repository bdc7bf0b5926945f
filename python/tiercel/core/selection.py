# SPDX-License-Identifier: Apache-2.0
"""The choice of a backend outside of the call, and the warning where ref stands in.

`tiercel.backends` is the face of this for users.
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

from tiercel.core.invariance import is_batch_invariant
from tiercel.core.log import logger


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

# False lets an operator skip the look-up; `_C` has a copy for calls that run no Python.
overriding = bool(_environment)


def publish() -> None:
    """Tells `_C` whether a backend was asked for outside of the call."""
    from tiercel import _C

    _C.set_overriding(overriding)


def _update(opened: int) -> None:
    global _contexts, overriding
    _contexts += opened
    overriding = bool(_environment or _process or _contexts)
    publish()


def requested(op: str) -> str | None:
    """The backend that was asked for outside of the call, or None."""
    for choices in (_context.get(), _process, _environment):
        if choices:
            name = choices.get(op) or choices.get(None)
            if name is not None:
                return None if name == "auto" else name
    return None


def named_in(op: str) -> str:
    """The place outside of the call that named an operator's backend, for messages."""
    for choices, where in (
        (_context.get(), "use_backend"),
        (_process, "set_backend"),
        (_environment, "TIERCEL_BACKEND"),
    ):
        if choices and (choices.get(op) or choices.get(None)) is not None:
            return where
    return "backend="


def warn_of_unknown_names(known: Iterable[str]) -> None:
    """Logs the entries of TIERCEL_BACKEND that name no operator."""
    for op, name in _environment.items():
        if not name or op not in (None, *known):
            logger.warning(
                "TIERCEL_BACKEND: %r=%r is ignored: no such operator or backend", op, name
            )


def choose_for_process(op: str | None, name: str | None) -> None:
    """The work of `tiercel.set_backend`."""
    with _lock:
        if name is None:
            _process.pop(op, None)
        else:
            _process[op] = name
        _update(0)


@contextlib.contextmanager
def choose_for_block(op: str | None, name: str) -> Iterator[None]:
    """The work of `tiercel.use_backend`."""
    token = _context.set({**(_context.get() or {}), op: name})
    with _lock:
        _update(+1)
    try:
        yield
    finally:
        with _lock:
            _update(-1)
        _context.reset(token)


_warned: set[str] = set()


def fall_back(op: str, error: type[Exception], text: str, stand_in: str = "ref") -> None:
    """Warns, once a reason, that something slower runs; raises in the batch-invariant mode, and
    under TIERCEL_STRICT=1."""
    if is_batch_invariant():
        raise error(f"{op}: {text} (in the batch-invariant mode {stand_in} does not stand in)")
    if os.environ.get("TIERCEL_STRICT", "0").lower() not in ("", "0", "false", "no", "off"):
        raise error(f"{op}: {text} (TIERCEL_STRICT is set, so {stand_in} does not stand in)")
    # Sizes in the sentence do not make it another reason.
    key = re.sub(r"\d+", "#", f"{op}: {text}")
    if key in _warned:
        return
    _warned.add(key)
    message = f"{op} runs on the slower '{stand_in}' backend: {text}"
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
