# SPDX-License-Identifier: Apache-2.0
"""Where the cache is, how large it may get, and whether its folder is the user's own."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

DEFAULT_SIZE = 2 * 1024**3
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_HINT = "set TIERCEL_CACHE_DIR to a folder of your own"


class CacheError(RuntimeError):
    """The cache folder cannot be used; the message says why and what to do."""


def default_folder() -> Path:
    named = os.environ.get("TIERCEL_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):  # its specification: ignore relative paths
        return Path(base) / "tiercel" / "compiled"
    try:
        return Path.home() / ".cache" / "tiercel" / "compiled"
    except RuntimeError:
        raise CacheError(f"the cache has no place, as this user has no home: {_HINT}") from None


def size_limit() -> int:
    text = os.environ.get("TIERCEL_CACHE_SIZE")
    if not text:
        return DEFAULT_SIZE
    try:
        return parse_size(text)
    except ValueError as error:
        raise CacheError(f"TIERCEL_CACHE_SIZE: {error}") from None


def parse_size(text: str) -> int:
    """Bytes from ``500MB``, ``2GiB``, ``1.5G`` or ``1000``; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def prepare(path: Path) -> None:
    """Makes the folder for its user alone. Compiled code is run: nobody else may write it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check(path)
    except OSError as error:
        raise CacheError(f"cannot use the cache folder {path}: {error.strerror}; {_HINT}") from None


def check(path: Path) -> None:
    """Refuses a folder that someone else could have put files in."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache folder {path} is not a folder; {_HINT}")
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"the cache folder {path} belongs to user {status.st_uid}, not to you "
            f"({os.geteuid()}), so what is in it is not trusted; {_HINT}"
        )
    if status.st_mode & 0o022:
        raise CacheError(
            f"the cache folder {path} is writable by others (mode {status.st_mode & 0o777:o}), so "
            f"what is in it is not trusted: chmod 700 {path}, after a look at what is in it"
        )
