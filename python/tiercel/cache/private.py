# SPDX-License-Identifier: Apache-2.0
"""A cache for this process alone, where the user's cannot be used."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

from tiercel.cache.folder import DEFAULT_SIZE, CacheUnusable
from tiercel.cache.store import Cache

_lock = threading.Lock()
_caches: dict[int, Cache] = {}  # by process: a forked child has its own
_told: set[str] = set()


def instead_of(error: CacheUnusable) -> Cache:
    """Says once why the user's cache is not used; the folder is removed when the process ends.

    Raises:
        CacheUnusable: There is no room for temporary files either.
    """
    text = str(error)
    process = os.getpid()
    with _lock:
        first = text not in _told
        _told.add(text)
        found = _caches.get(process)
        if found is None:
            try:
                folder = Path(tempfile.mkdtemp(prefix="tiercel-"))
            except OSError:
                raise error from None
            found = _caches[process] = Cache(folder, DEFAULT_SIZE)
            atexit.register(_remove, folder, process)
    if first:
        told = f"{text}. What is compiled is kept for this process alone."
        warnings.warn(told, RuntimeWarning, stacklevel=3)
    return found


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
