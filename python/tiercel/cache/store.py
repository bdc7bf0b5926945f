# SPDX-License-Identifier: Apache-2.0
"""The cache's folder on disk.

v1/entries/ab/abcd…/data, about.json     one entry; a folder appears whole, by a rename
v1/locks/abcd….lock                      held by whoever builds or removes that entry
v1/making/abcd….XXXX/                    entries before they are whole, and after they are gone
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.cache.folder import CacheError, explained, is_full, prepare, prepare_inside
from tiercel.cache.keys import SCHEMA, digest, key_of
from tiercel.cache.lock import locked, locked_now
from tiercel.core.log import logger

_DATA, _ABOUT = "data", "about.json"


@dataclass(frozen=True)
class Entry:
    key: str
    path: Path
    size: int
    used: float  # when, seconds since the epoch

    def about(self) -> dict[str, Any]:
        """When it was built and from what, in short; nothing for a damaged entry."""
        with contextlib.suppress(OSError, ValueError):
            about = json.loads((self.path / _ABOUT).read_bytes())
            if isinstance(about, dict) and isinstance(about.get("fields"), dict):
                return {"built": about.get("built"), "fields": about["fields"]}
        return {"built": None, "fields": {}}


class Cache:
    """A cache in a folder.

    Args:
        folder: Where; it is made for its user alone, and refused if others could write to it.
        limit: Bytes above which what was used longest ago is evicted.
        spare: Entries used in the last so many seconds are not evicted by a build: a path that
            was just returned stays for a while.
    """

    def __init__(self, folder: Path, limit: int, spare: float = 600) -> None:
        self.folder = folder
        self.limit = limit
        self.spare = spare
        self._root = folder / f"v{SCHEMA}"
        self._entries = self._root / "entries"
        self._locks = self._root / "locks"
        self._making = self._root / "making"

    def get_or_build(self, fields: Mapping[str, Any], build: Callable[[Path], object]) -> Path:
        """The path of the file for this key; `build(path)` writes it if there is none.

        One caller builds, the others wait for it. If the build raises, so does this, nothing is
        kept, and the next caller builds. Do not write to the returned file. It may be evicted
        once it was not asked for in the last ten minutes.

        Raises:
            CacheError: The folder cannot be used, or `build` wrote no file.
            TypeError: A field is nothing that a key can be made of.
        """
        return self._get(fields, build)[0]

    def read_or_build(self, fields: Mapping[str, Any], build: Callable[[Path], object]) -> bytes:
        """Like get_or_build, but returns the file's contents, whatever becomes of the entry."""
        while True:
            path, size, sha256 = self._get(fields, build)
            with contextlib.suppress(FileNotFoundError):  # evicted in between
                content = path.read_bytes()
                if len(content) == size and digest(content) == sha256:
                    return content

    def _get(
        self, fields: Mapping[str, Any], build: Callable[[Path], object]
    ) -> tuple[Path, int, str]:
        key = key_of(fields)
        self._prepare()
        path = self._path(key)
        found = _verified(path)
        if found is None:
            try:
                found = self._get_locked(key, fields, build)
            except _OfBuild as error:  # the build's own errors are passed on as they are
                raise error.error from error.error.__cause__
            except OSError as error:
                raise explained(error, self.folder) from None
            with contextlib.suppress(OSError):  # it is built, whatever becomes of older ones
                self._evict(key)
        else:
            _touch(path)
        return (path / _DATA, *found)

    def _get_locked(
        self, key: str, fields: Mapping[str, Any], build: Callable[[Path], object]
    ) -> tuple[int, str]:
        with self._locked(key):
            found = _verified(self._path(key))  # by another, while this one waited
            if found is None:
                self._remove(key)
                found = self._build(key, fields, build)
            return found

    def _build(
        self, key: str, fields: Mapping[str, Any], build: Callable[[Path], object]
    ) -> tuple[int, str]:
        logger.debug("cache: building %s", key)
        making = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self._making))
        try:
            data = making / _DATA
            try:
                build(data)
            except OSError as error:
                if is_full(error):  # the cache's disk
                    raise
                raise _OfBuild(error) from None
            if not data.is_file() or data.is_symlink():
                raise CacheError(f"the build of {_brief(fields)} wrote no file to {data}")
            for leftover in making.iterdir():  # a compiler's other files
                if leftover != data:
                    _remove_any(leftover)
            size, sha256 = data.stat().st_size, digest(data)
            about = {"schema": SCHEMA, "key": key, "size": size, "sha256": sha256}
            about |= {"built": time.time(), "fields": _brief(fields)}
            (making / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
            for name in (data, making / _ABOUT, making):
                _sync(name)
            path = self._path(key)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            making.rename(path)
            _sync(path.parent)
            return size, sha256
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """All entries, the one used longest ago first; their contents are not checked."""
        found = []
        for path in self._entries.glob("??/*"):
            with contextlib.suppress(OSError):  # just evicted
                size = sum(file.stat().st_size for file in path.iterdir())
                used = (path / _ABOUT).stat().st_mtime if (path / _ABOUT).exists() else 0.0
                found.append(Entry(path.name, path, size, used))
        return sorted(found, key=lambda entry: entry.used)

    def clear(self) -> int:
        """Removes all entries but those that are being built; returns how many."""
        return self.prune(limit=-1)

    def prune(self, limit: int | None = None, unused_days: float | None = None) -> int:
        """Removes damaged entries, what killed builds left, and then down to a size and age.

        Args:
            limit: Bytes to get below; by default the cache's own limit.
            unused_days: Remove what was not used for so many days, too.

        Returns:
            How many entries were removed.

        Raises:
            CacheError: The folder cannot be used.
            ValueError: `unused_days` is negative.
        """
        if unused_days is not None and not unused_days >= 0:
            raise ValueError(f"unused_days must be at least 0, got {unused_days}")
        if not self.folder.exists():
            return 0
        self._prepare()
        self._tidy()
        damaged = [entry for entry in self.entries() if _verified(entry.path) is None]
        removed = sum(self._remove_free(entry, damaged=True) for entry in damaged)
        if unused_days is not None:
            before = time.time() - unused_days * 86400
            old = [entry for entry in self.entries() if entry.used < before]
            removed += sum(map(self._remove_free, old))
        return removed + self._shrink(self.limit if limit is None else limit, math.inf)

    def _evict(self, keep: str) -> None:
        """After a build: below nine tenths of the limit, so that not each build evicts."""
        entries = self.entries()
        if sum(entry.size for entry in entries) > self.limit:
            self._shrink(self.limit * 9 // 10, time.time() - self.spare, keep)

    def _shrink(self, limit: int, before: float, keep: str = "") -> int:
        entries, removed = self.entries(), 0
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit or entry.used > before:
                break
            if entry.key != keep and self._remove_free(entry):
                total -= entry.size
                removed += 1
        return removed

    def _tidy(self) -> None:
        """Removes earlier versions, and what killed builds left."""
        for path in self.folder.glob("v[0-9]*"):
            if path.name[1:].isdecimal() and int(path.name[1:]) < SCHEMA and _is_cache(path):
                shutil.rmtree(path, ignore_errors=True)
        left = {path.name.partition(".")[0] for path in self._making.iterdir()}
        for key in left | {path.stem for path in self._locks.iterdir()}:
            with locked_now(self._locks / f"{key}.lock") as free:
                if free:
                    self._forget(key)

    def _remove_free(self, entry: Entry, damaged: bool = False) -> bool:
        with locked_now(self._locks / f"{entry.key}.lock") as free:
            if free and not (damaged and _verified(entry.path) is not None):
                self._remove(entry.key)
                return True
        return False

    # The two below: only with the key's lock.

    def _remove(self, key: str) -> None:
        path = self._path(key)
        if path.exists():
            # First out of sight, in one step.
            path.rename(Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self._making)))
        self._forget(key)

    def _forget(self, key: str) -> None:
        for left in self._making.glob(f"{key}.*"):
            shutil.rmtree(left, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        def tell() -> None:
            logger.info("cache: waiting for another process that builds %s", key)

        with locked(self._locks / f"{key}.lock", tell):
            yield

    def _path(self, key: str) -> Path:
        return self._entries / key[:2] / key

    def _prepare(self) -> None:
        prepare(self.folder)
        for path in (self._root, self._entries, self._locks, self._making):
            prepare_inside(path)


class _OfBuild(Exception):
    """An OSError of the caller's build, which is not the cache's."""

    def __init__(self, error: OSError) -> None:
        self.error = error


def _is_cache(root: Path) -> bool:
    """True if a folder has the layout of an earlier version's cache, and nothing else."""
    if root.is_symlink() or not root.is_dir():
        return False
    names = {path.name: path for path in root.iterdir()}
    if not names or names.keys() - {"entries", "locks", "making"}:
        return False
    inside = [
        path.name for folder in names.values() if folder.is_dir() for path in folder.iterdir()
    ]
    return all(re.fullmatch(r"[0-9a-f]{2}|[0-9a-f]{8,64}\.[\w-]+", name) for name in inside)


def _verified(path: Path) -> tuple[int, str] | None:
    """The length and hash of an entry that is whole, else None."""
    try:
        about = json.loads((path / _ABOUT).read_bytes())
        size, sha256 = about["size"], about["sha256"]
        if about["schema"] == SCHEMA and about["key"] == path.name:
            if (path / _DATA).stat().st_size == size and digest(path / _DATA) == sha256:
                return size, sha256
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    logger.warning("cache: the entry %s is damaged", path.name)
    return None


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # evicted in between, or a read-only disk
        about = path / _ABOUT
        if time.time() - about.stat().st_mtime > 30:
            os.utime(about)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_any(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _brief(fields: Mapping[str, Any]) -> dict[str, str]:
    """For people: which entry is this."""
    texts = {
        name: value if isinstance(value, str) else repr(value) for name, value in fields.items()
    }
    return {name: t if len(t) <= 120 else f"{t[:100]}…" for name, t in texts.items()}
