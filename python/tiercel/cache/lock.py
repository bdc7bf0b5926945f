# SPDX-License-Identifier: Apache-2.0
"""A lock a key between processes and threads, which the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock; calls `waiting` first if another holds it."""
    descriptor = None
    told = False
    while descriptor is None:
        descriptor = _attempt(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            if not told:
                waiting()
                told = True
            descriptor = _attempt(path, fcntl.LOCK_EX)
    with _held(path, descriptor):
        yield


@contextlib.contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Holds the lock if nobody else does; yields whether."""
    descriptor = _attempt(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        yield False
        return
    with _held(path, descriptor):
        yield True


def _attempt(path: Path, how: int) -> int | None:
    # Not inherited by what is executed: a killed holder's compiler does not go on holding it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
        # Whoever held it before may have removed this file: then others lock a new one.
        if _is_same(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _held(path: Path, descriptor: int) -> Iterator[None]:
    process = os.getpid()
    try:
        yield
    finally:
        # A forked child shares the lock and leaves here too: it is not its to release.
        if os.getpid() == process:
            path.unlink(missing_ok=True)  # while held, so that nobody else's file goes
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
