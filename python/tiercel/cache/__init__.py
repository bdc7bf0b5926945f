# SPDX-License-Identifier: Apache-2.0
"""One cache for everything that Tiercel compiles; needs nothing but Python.

    path = cache.get_or_build({"kind": "cuda", "source": text, "nvcc": "13.0.88"}, compile_to)

`compile_to(path)` writes the file; it runs once a key, however many processes ask for it at once.
A key is made of everything that the result depends on. Entries hold their length and hash, which
every read checks: one that was cut short or altered is removed and built again.

The folder is TIERCEL_CACHE_DIR, else ``tiercel/compiled`` in XDG_CACHE_HOME or ``~/.cache``. Above
TIERCEL_CACHE_SIZE (2GiB) the entries that were used longest ago are evicted. Where the folder
cannot be used (a full or read-only disk, one that others can write to), a warning says so and what
is compiled is kept for the process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiercel.cache.folder import CacheError, CacheUnusable, default_folder, size_limit
from tiercel.cache.keys import digest, key_of
from tiercel.cache.private import instead_of
from tiercel.cache.store import Cache

__all__ = ["Cache", "CacheError", "default", "digest", "get_or_build", "key_of", "read_or_build"]


def default() -> Cache:
    """The user's cache; the folder is made when something is stored."""
    return Cache(default_folder(), size_limit())


def get_or_build(fields: Mapping[str, Any], build: Callable[[Path], object]) -> Path:
    """The path of the file for this key, see :meth:`Cache.get_or_build`."""
    try:
        return default().get_or_build(fields, build)
    except CacheUnusable as error:
        return instead_of(error).get_or_build(fields, build)


def read_or_build(fields: Mapping[str, Any], build: Callable[[Path], object]) -> bytes:
    """The contents of the file for this key, see :meth:`Cache.read_or_build`."""
    try:
        return default().read_or_build(fields, build)
    except CacheUnusable as error:
        return instead_of(error).read_or_build(fields, build)
