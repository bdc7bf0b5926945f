# SPDX-License-Identifier: Apache-2.0
"""``tiercel tune apply``: winners become the files that operators read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel import _tuned
from tiercel.tune import TuneError
from tiercel.tune.ops import Tunable
from tiercel.tune.results import write


def apply(data: Mapping[str, Any], tunable: Tunable, folder: Path) -> list[tuple[Path, int]]:
    """Writes one file a problem, with what it had for other numbers of tokens; (path, entries).

    Only kernels that the wheel has are written: a faster one that has to be compiled first is a
    proposal for the precompiled set, which the sweep's table shows.
    """
    if tunable.op not in _tuned.OPS:
        raise TuneError(f"{tunable.op} reads no configurations")
    try:
        device = data["gpu"]
        names = tunable.sizes
        rows: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
        for row in data["results"]:
            p, winner = row["problem"], row["best_precompiled"]
            sizes = tuple(int(p[name]) for name in names)
            configs = rows.setdefault((sizes, p["dtype"]), {})
            if winner is not None:
                config = tunable.config(winner["candidate"])
                measured = {"us": _round(winner["us"]), "before_us": _round(row["today_us"])}
                configs[str(row["tokens"])] = config | measured
        facts = ("command", "date", "gpu", "driver", "torch", "tiercel", "commit")
        source = {name: data[name] for name in facts}
    except (KeyError, TypeError) as error:
        raise TuneError(f"the results lack {error}") from None
    written = []
    for (sizes, dtype), configs in rows.items():
        if not configs:
            continue
        path = folder / tunable.op / _tuned.file_name(tunable.op, sizes, dtype, device)
        merged = _before(path, tunable.op) | {t: c | {"source": source} for t, c in configs.items()}
        ordered = {tokens: merged[tokens] for tokens in sorted(merged, key=int)}
        problem = {**dict(zip(names, sizes, strict=True)), "dtype": dtype}
        head = {"schema": _tuned.SCHEMA, "op": tunable.op, "problem": problem, "device": device}
        write(path, head | _sources(ordered))
        _tuned.read(path, tunable.op)  # what no operator could read must not be left unsaid
        written.append((path, len(configs)))
    return written


def _round(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def _before(path: Path, op: str) -> dict[str, Any]:
    """What the file has, each entry with its source."""
    if not path.exists():
        return {}
    try:
        _tuned.read(path, op)
    except _tuned.ConfigError as error:
        raise TuneError(f"{error}: remove or mend it first") from None
    data = json.loads(path.read_text(encoding="utf-8"))
    sources = data["sources"]
    return {t: {**c, "source": sources[c["source"]]} for t, c in data["configs"].items()}


def _sources(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Each source once; entries name it by its place."""
    sources: list[Any] = []
    numbered = {}
    for tokens, config in configs.items():
        if config["source"] not in sources:
            sources.append(config["source"])
        numbered[tokens] = {**config, "source": sources.index(config["source"])}
    return {"sources": sources, "configs": numbered}
