# SPDX-License-Identifier: Apache-2.0
"""results.json: the winners of a sweep beside what ran before, and how they are shown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel._terminal import line
from tiercel.workbench.tune import TuneError
from tiercel.workbench.tune.board import Record
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import name_of
from tiercel.workbench.tune.worker import TODAY, Final

SCHEMA = 1


def collect(
    tunable: Tunable,
    groups: Sequence[tuple[Final, Record]],
    counts: Mapping[str, int],
    facts: Mapping[str, str],
    command: str,
    date: str,
) -> dict[str, Any]:
    rows = [_row(tunable, group, record) for group, record in groups]
    head = {"schema": SCHEMA, "op": tunable.op, "command": command, "date": date, **facts}
    return {**head, "trials": dict(counts), "results": rows}


def _row(tunable: Tunable, group: Final, record: Record) -> dict[str, Any]:
    times: dict[str, float] = record["us"]
    candidates = record["candidates"]
    best = min((n for n in candidates), key=lambda n: (times[n], n), default=None)
    ours = [n for n in candidates if tunable.precompiled(candidates[n])]
    kept = min(ours, key=lambda n: (times[n], n), default=None)
    return {
        "problem": group.problem.to_dict(),
        "tokens": group.tokens,
        "today_us": times.get(TODAY),
        "best": _winner(record, best),
        "best_precompiled": _winner(record, kept),
        "problems": record["problems"],
    }


def _winner(record: Record, name: str | None) -> dict[str, Any] | None:
    if name is None:
        return None
    return {
        "candidate": record["candidates"][name],
        "us": record["us"][name],
        "spread_us": record["spread_us"][name],
    }


def write(path: Path, data: Any) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise TuneError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = data["schema"]
        _ = data["results"], data["op"]
    except OSError as error:
        raise TuneError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TuneError(f"{path} is no result of tiercel tune") from None
    if schema != SCHEMA:
        raise TuneError(f"{path} has schema {line(schema)}, this version reads {SCHEMA}")
    return data


def table(data: Mapping[str, Any]) -> str:
    lines = [f"{'problem':<38} {'T':>6} {'today µs':>9} {'best µs':>9} {'ratio':>6}  configuration"]
    for row in data["results"]:
        p, best, today = row["problem"], row["best_precompiled"], row["today_us"]
        sizes = " ".join(f"{name}={size}" for name, size in p.items() if name != "dtype")
        name = f"{sizes} {p['dtype']}"
        lines.append(_line(name, row["tokens"], today, best))
        faster = row["best"]
        if best is not None and faster["us"] < 0.98 * best["us"]:
            lines.append(_line("  if it were precompiled", row["tokens"], today, faster))
    return "\n".join(lines)


def _line(name: str, tokens: int, today: float | None, best: Mapping[str, Any] | None) -> str:
    head = f"{name:<38} {tokens:>6} {f'{today:.2f}' if today else '-':>9}"
    if best is None:
        return f"{head} {'-':>9} {'':>6}  no candidate ran"
    ratio = f"{today / best['us']:.2f}" if today else "-"
    return f"{head} {best['us']:>9.2f} {ratio:>6}  {name_of(best['candidate'])}"
