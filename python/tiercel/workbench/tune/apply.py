# SPDX-License-Identifier: Apache-2.0
"""``tiercel tune apply``: winners become the files that operators read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel._terminal import line
from tiercel.core import tuned
from tiercel.workbench.tune import TuneError
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.results import write


def apply(data: Mapping[str, Any], tunable: Tunable, folder: Path) -> list[tuple[Path, int]]:
    """Writes one file a problem, with what it had for other numbers of tokens; (path, entries).

    Only kernels that the wheel has are written: a faster one that has to be compiled first is a
    proposal for the precompiled set, which the sweep's table shows.
    """
    if tunable.op not in tuned.OPS:
        raise TuneError(f"{tunable.op} reads no configurations")
    try:
        files = _files(data, tunable)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        lacks = isinstance(error, KeyError)
        said = f"lack {line(error)}" if lacks else f"are none of tiercel tune: {line(error)}"
        raise TuneError(f"the results {said}") from None
    folder = folder / tunable.op
    # All of them first, so that a bad problem leaves no half of the others.
    merged = {folder / name: _merged(folder / name, new, tunable.op) for name, new in files.items()}
    for path, content in merged.items():
        write(path, content)
    return [(path, len(files[path.name]["configs"])) for path in merged]


def _files(data: Mapping[str, Any], tunable: Tunable) -> dict[str, dict[str, Any]]:
    """A sweep's results by file name; each entry has its source, which `_merged` moves out."""
    device = data["gpu"]
    if not isinstance(device, str) or not 0 < len(device) <= 100:
        raise TuneError(f"`gpu` must be a device's name, got {tuned.shown(device)}")
    facts = ("command", "date", "gpu", "driver", "torch", "tiercel", "commit")
    source = {name: _text(name, data[name]) for name in facts}
    found: dict[str, dict[str, Any]] = {}
    for row in data["results"]:
        problem, winner, tokens = row["problem"], row["best_precompiled"], row["tokens"]
        if winner is None:
            continue
        named = {size: problem[size] for size in tunable.sizes} | {"dtype": problem["dtype"]}
        if type(tokens) is not int:
            raise TuneError(f"`tokens` must be an int, got {tuned.shown(tokens)}")
        candidate = tunable.config(winner["candidate"])
        config = {name: candidate[name] for name in tuned.OPS[tunable.op].fields}
        measured = {"us": _round(winner["us"]), "before_us": _round(row["today_us"])}
        head = {"schema": tuned.SCHEMA, "op": tunable.op, "problem": named, "device": device}
        entry = config | measured | {"source": source}
        # An entry that no operator could read is not written.
        dtype, sizes, _ = tuned.check(head | {"configs": {str(tokens): entry}}, tunable.op)
        name = tuned.file_name(tunable.op, sizes, dtype, device)
        found.setdefault(name, head | {"configs": {}})["configs"][str(tokens)] = entry
    return found


def _merged(path: Path, new: Mapping[str, Any], op: str) -> dict[str, Any]:
    """With what the file has for other numbers of tokens."""
    configs = _before(path, op) | new["configs"]
    ordered = {tokens: configs[tokens] for tokens in sorted(configs, key=int)}
    return {**new, **_sources(ordered)}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TuneError(f"`{name}` must be a text, got {tuned.shown(value)}")
    return value


def _round(us: float | None) -> float | None:
    if us is None:
        return None
    if isinstance(us, bool) or not isinstance(us, (int, float)) or not math.isfinite(us):
        raise TuneError(f"a time must be a finite number, got {tuned.shown(us)}")
    return round(float(us), 3)


def _before(path: Path, op: str) -> dict[str, Any]:
    """The entries of the file, each with its source."""
    try:
        if not path.exists():
            return {}
        tuned.read(path, op)
        data = json.loads(path.read_text(encoding="utf-8"))
        sources = data["sources"]
        return {t: {**c, "source": sources[c["source"]]} for t, c in data["configs"].items()}
    except tuned.ConfigError as error:
        raise TuneError(f"{error}: remove or mend it first") from None
    except OSError as error:
        raise TuneError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, IndexError, TypeError) as error:
        text = f"{path}: {type(error).__name__}: {line(error)}: remove or mend it first"
        raise TuneError(text) from None


def _sources(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Each source once; entries name it by its place."""
    sources: list[Any] = []
    numbered = {}
    for tokens, config in configs.items():
        if config["source"] not in sources:
            sources.append(config["source"])
        numbered[tokens] = {**config, "source": sources.index(config["source"])}
    return {"sources": sources, "configs": numbered}
