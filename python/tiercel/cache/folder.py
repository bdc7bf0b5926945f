# SPDX-License-Identifier: Apache-2.0
"""Where the cache is, how large it may get, and whether its folder is the user's own."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from pathlib import Path

from tiercel._terminal import line
from tiercel.cache.ancestors import unsafe

DEFAULT_SIZE = 2 * 1024**3
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_HINT = "set TIERCEL_CACHE_DIR to a folder of your own"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINTS = {
    **dict.fromkeys(_FULL, "tiercel cache prune, df -h and df -i; or set TIERCEL_CACHE_DIR"),
    errno.EROFS: "set TIERCEL_CACHE_DIR to a folder that can be written",
    **dict.fromkeys(
        (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS),
        "this file system has no locks: set TIERCEL_CACHE_DIR to a folder on a local disk",
    ),
}
_OURS = re.compile(r"v\d+|entries|locks|making|[0-9a-f]{2}")


class CacheError(RuntimeError):
    """The cache folder cannot be used; the message says why and what to do."""


class CacheUnusable(CacheError):
    """It is the folder or its disk: what is compiled can do without."""


def default_folder() -> Path:
    named = os.environ.get("TIERCEL_CACHE_DIR")
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError:
            user = line(named.partition("/")[0])
            raise CacheError(f"TIERCEL_CACHE_DIR: there is no home of {user}") from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):  # its specification: ignore relative paths
        return Path(base) / "tiercel" / "compiled"
    try:
        return Path.home() / ".cache" / "tiercel" / "compiled"
    except RuntimeError:
        text = f"the cache has no place, as this user has no home: {_HINT}"
        raise CacheUnusable(text) from None


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
    size = math.inf if match is None else float(match[1]) * _UNITS[match[2]]
    if size >= 1 << 63:
        raise ValueError(f"{line(text, 40)!r} is no size such as 500MB or 2GiB")
    return int(size)


def show_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def explained(error: OSError, path: Path) -> CacheUnusable:
    """The error for what the system refused, with a hint."""
    hint = _HINTS.get(error.errno or 0, _HINT)
    return CacheUnusable(f"cannot use the cache folder {path}: {error.strerror}; {hint}")


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


def prepare(path: Path) -> None:
    """Makes the folder and its parents for its user alone. Compiled code is run: nobody else may
    write it, or a folder on the way to it.

    Raises:
        CacheUnusable: Someone else could, or the system does not make it.
    """
    try:
        if path.is_dir():
            check(path)
        check_way(path)
        if _make(path):
            check(path)
            check_way(path)
    except OSError as error:
        raise explained(error, path) from None


def prepare_inside(path: Path) -> None:
    """Prepares a folder inside of one that `prepare` has returned."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        check(path)
    except OSError as error:
        raise explained(error, path) from None


def _make(path: Path) -> bool:
    """Returns True if a folder was made."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if missing == [] and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return bool(missing)


def check_way(path: Path) -> None:
    """Refuses a folder that someone else could put another in the place of."""
    found = unsafe(path)
    if found is not None:
        raise CacheUnusable(
            f"{found}, so what is in the cache folder {path} is not trusted; {_HINT}"
        )


def check(path: Path) -> None:
    """Refuses a folder that someone else could have put files in."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise CacheUnusable(f"the cache folder {path} is not a folder; {_HINT}")
    if status.st_uid != os.geteuid():
        raise CacheUnusable(
            f"the cache folder {path} belongs to user {status.st_uid}, not to you "
            f"({os.geteuid()}), so what is in it is not trusted; {_HINT}"
        )
    if status.st_mode & 0o022:
        # A folder that holds anything else, such as /tmp, has a mode that is not ours to advise on.
        names = [entry.name for entry in path.iterdir()]
        ours = all(map(_OURS.fullmatch, names)) and (names or not status.st_mode & stat.S_ISVTX)
        mend = f"chmod 700 {path}, after a look at what is in it" if ours else _HINT
        raise CacheUnusable(
            f"the cache folder {path} is writable by others (mode {status.st_mode & 0o777:o}), so "
            f"what is in it is not trusted: {mend}"
        )
