# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ source files: text or a path, and which headers of the user's own they include."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercel.cache import digest

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
_SUFFIXES = (".cu", ".cuh", ".cc", ".cpp", ".cxx", ".c", ".h", ".hpp")


@dataclass(frozen=True)
class SourceFile:
    """A source file; `path` is None for text that was given as such."""

    text: str
    path: Path | None

    @property
    def label(self) -> str:
        return str(self.path) if self.path is not None else "the source"


def read(source: str | Path) -> SourceFile:
    """Text, or the contents of a path; a str is a path if it is one line that ends like one.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: It is neither.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"`source` must be CUDA C++ text or a path, got {type(source).__name__}")
    is_path = isinstance(source, Path) or ("\n" not in source and source.endswith(_SUFFIXES))
    if not is_path:
        return SourceFile(str(source), None)
    path = Path(source).absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no source file {path}")
    return SourceFile(path.read_text(encoding="utf-8"), path)


def included(source: SourceFile, folders: Iterable[str | Path]) -> dict[str, str]:
    """Path and hash of every header that is found beside the files or in `folders`.

    The compiler's own headers are not among them. Conditional includes count; a name that a macro
    makes is not seen.
    """
    search = [Path(folder).absolute() for folder in folders]
    found: dict[str, str] = {}
    beside = [source.path.parent] if source.path is not None else []
    todo: list[tuple[str, Sequence[Path]]] = [(source.text, beside)]
    while todo:
        text, here = todo.pop()
        for bracket, name in _INCLUDE.findall(text):
            for folder in [*(here if bracket == '"' else ()), *search]:
                path = folder / name
                if str(path) in found:
                    break
                if path.is_file():
                    content = path.read_bytes()
                    found[str(path)] = digest(content)
                    todo.append((content.decode(errors="replace"), [path.parent]))
                    break
    return found
