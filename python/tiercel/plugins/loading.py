# SPDX-License-Identifier: Apache-2.0
"""Loading backends from files, folders and installed packages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tiercel.plugins.registration import Plugin, registering_from

GROUP = "tiercel.backends"
_loaded: set[tuple[str, str]] = set()  # entry points, by name and value


def load_path(path: str | os.PathLike[str], *, replace: bool = False) -> list[str]:
    """Runs a Python file that registers backends.

    Modules beside it can be imported by it.

    Args:
        path: The file.
        replace: Let it take the place of registered backends, for example those of its last
            version.

    Returns:
        The names that it registered.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It registers nothing, or a name that is taken. If it fails, then with its own
            exception, and nothing of it stays registered.
    """
    return [plugin.name for plugin in load_file(path, replace)]


def load_folder(path: str | os.PathLike[str], *, replace: bool = False) -> list[str]:
    """Runs all Python files of a folder but those whose names begin with ``_`` or ``test_``.

    Returns, raises:
        As `load_path`; of several files, the first that fails ends it.
    """
    files = files_of(path)
    if not files:
        raise ValueError(f"{path} has no Python files to load")
    return [name for file in files for name in load_path(file, replace=replace)]


def load_entry_points(*names: str) -> list[str]:
    """Loads what installed packages offer in the entry-point group ``tiercel.backends``.

    An entry point names a module that registers backends, or a function that does so when it is
    called. One that is loaded already is left out.

    Args:
        *names: Of entry points; by default all of them.

    Returns:
        The names of the backends that were registered.

    Raises:
        ValueError: No such entry point, or it registers nothing, or a name that is taken.
    """
    found = entry_points()
    for name in names:
        if all(point.name != name for point in found):
            known = ", ".join(sorted(point.name for point in found)) or "none"
            raise ValueError(f"no entry point {name!r} in the group {GROUP!r}; there is {known}")
    chosen = [point for point in found if not names or point.name in names]
    return [plugin.name for point in chosen for plugin in load_entry_point(point)]


def entry_points() -> list[importlib.metadata.EntryPoint]:
    """The installed plug-ins, by name; nothing is loaded."""
    points = {(p.name, p.value): p for p in importlib.metadata.entry_points(group=GROUP)}
    return [points[key] for key in sorted(points)]


def load_entry_point(point: importlib.metadata.EntryPoint) -> list[Plugin]:
    key = (point.name, point.value)
    if key in _loaded:
        return []
    with registering_from(f"entry point {point.name} ({point.value})", False) as source:
        made = point.load()
        if callable(made):
            made()
        if not source.plugins:
            raise ValueError(
                f"the entry point {point.name} ({point.value}) registers no backend; a module that "
                "was imported before registers nothing again: name a function"
            )
    _loaded.add(key)
    return source.plugins


def load_file(path: str | os.PathLike[str], replace: bool = False) -> list[Plugin]:
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: load it with load_folder")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    file = file.resolve()
    with registering_from(str(file), replace) as source:
        _execute(file)
        if not source.plugins:
            raise ValueError(f"{file} registers no backend; see tiercel.backends.register")
    return source.plugins


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """The Python files of a folder that are for loading."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    files = sorted(folder.glob("*.py"))
    return [file for file in files if not file.name.startswith(("_", "test_"))]


def _execute(file: Path) -> ModuleType:
    # A name of its own for each file, so that two of one name do not meet.
    tag = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"_tiercel_plugin_{file.stem}_{tag}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _importable(file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Last on the path, so that nothing that is installed is hidden by it."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
