# SPDX-License-Identifier: Apache-2.0
"""The JSON Lines of results: one record a measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tiercel._terminal import line, plain
from tiercel.workbench.bench import BenchError, stats
from tiercel.workbench.bench.cases import DTYPES, Case
from tiercel.workbench.bench.ops import OpBench
from tiercel.workbench.bench.runner import Result, Settings

Record = dict[str, Any]

_RUN = ("run", "date", "commit", "gpu", "driver", "torch")
TEXT = (*_RUN, "family", "op", "case", "dtype", "impl", "version", "timing", "status")
NUMBERS = ("ms_median", "ms_p10", "ms_p90", "gbps", "tflops", "limit_frac", "rel_err")
TIMINGS = ("graph", "events", "host")


# Names that become parts of a path: no separator, nothing hidden.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._()+-]{0,99}")
_MOST_TEXT = 4000


def problems(record: Any) -> list[str]:
    """The faults of a record; empty if it follows the schema."""
    if not isinstance(record, dict):
        return ["is no JSON object"]
    found = [f"`{name}` is no text" for name in TEXT if not isinstance(record.get(name), str)]
    optional = ("command", "part", "reason")
    found += [f"`{n}` is no text" for n in optional if not isinstance(record.get(n, ""), str)]
    for name in NUMBERS:
        value = record.get(name, "missing")
        if value is not None and not _is_number(value):
            found.append(f"`{name}` is no number or null")
    if found:
        return found
    for name, text in record.items():
        if isinstance(text, str) and (len(text) > _MOST_TEXT or plain(text) != text):
            return [f"`{line(name)}` is no plain text of up to {_MOST_TEXT} letters"]
    if record["status"] != "ok":
        return ["`ms_median` is set though `status` is not ok"] * (record["ms_median"] is not None)
    found += [f"`{name}` is empty" for name in ("op", "case", "impl") if not record[name]]
    if record["timing"] not in TIMINGS:
        found.append(f"`timing` is {record['timing']!r}, not one of {', '.join(TIMINGS)}")
    if record["family"] == "limits":
        return found + _limit_problems(record)
    if record["ms_median"] is None:
        found.append("`ms_median` is null though `status` is ok")
    elif not record["ms_median"] > 0:
        found.append("`ms_median` is not positive")
    if record["dtype"] not in DTYPES:
        found.append(f"`dtype` is {line(record['dtype'])!r}, not one of {', '.join(DTYPES)}")
    if not isinstance(record.get("exact"), bool):
        found.append("`exact` is neither true nor false")
    ratio = record.get("ratio")
    if ratio is not None and not (_is_number(ratio) and ratio > 0):
        found.append("`ratio` is no positive number or null")
    if record["timing"] != "host" and record["gbps"] is None:
        found.append("`gbps` is null though `status` is ok")
    return found


def _limit_problems(record: Mapping[str, Any]) -> list[str]:
    figure = {"copy": "gbps", "launch": "ms_median", "gemm": "tflops"}.get(record["op"])
    if figure is not None and record[figure] is None:
        return [f"`{figure}` is null though it is what {record['op']} is measured for"]
    return []


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -1e15 < value < 1e15  # not NaN either


def file_name(text: str, what: str) -> str:
    """A GPU's or a family's name as a part of a path.

    Raises:
        BenchError: It would lead elsewhere.
    """
    if _NAME.fullmatch(text) is None:
        raise BenchError(f"`{what}` is no name for a file: {line(text)!r}")
    return text.replace(" ", "_")


def from_result(
    common: Mapping[str, Any],
    bench: OpBench,
    case: Case,
    result: Result,
    settings: Settings,
    limits: Mapping[str, float],
) -> Record:
    record: Record = {**common, "family": case.family, "op": case.op, "case": case.name}
    record |= {"dtype": case.dtype, "impl": result.impl.name, "version": result.impl.version}
    record |= {"timing": result.timing, "status": result.status}
    record |= dict.fromkeys(NUMBERS)
    if result.status != "ok":
        return record | {"reason": result.reason}
    times = result.summary
    record |= {"ms_median": times.median, "ms_p10": times.p10, "ms_p90": times.p90}
    launch = result.launch
    if result.timing != "host":
        work = rates(bench, case, times.median, limits)
        record |= work | {"launches_per_graph": result.launches, "input_sets": result.sets}
        assert result.error is not None
        record |= {"rel_err": result.error.rms, "max_err": result.error.maximum}
        record["differing"] = result.error.differing
    record |= {"exact": launch.exact if launch else True, "ratio": result.ratio}
    record["round_ms"] = stats.medians(result.rounds)
    record |= {"rounds": settings.rounds, "iterations": len(result.rounds[0])}
    record |= launch.details if launch else {}
    return {name: rounded(value) for name, value in record.items()}


def rates(bench: OpBench, case: Case, ms: float, limits: Mapping[str, float]) -> Record:
    """GB/s, TFLOP/s, and the fraction of what the limits measured in the same run allow."""
    moved = bench.bytes_moved(case)
    flops = bench.flops(case) if bench.flops else None
    floors = []
    if "copy_gbps" in limits:
        floors.append(moved / limits["copy_gbps"] / 1e6)
    if flops is not None and f"{case.dtype}_tflops" in limits:
        floors.append(flops / limits[f"{case.dtype}_tflops"] / 1e9)
    return {
        "gbps": moved / ms / 1e6,
        "tflops": None if flops is None else flops / ms / 1e9,
        "limit_frac": max(floors) / ms if floors else None,
    }


def rounded(value: Any) -> Any:
    """Six digits: files stay readable, and nothing measured here is finer."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [rounded(v) for v in value] if isinstance(value, list) else value


def dump(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)


def read(path: Path) -> list[Record]:
    """All records of a file; says which line is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is no UTF-8 text: {error.reason}") from None
    found = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BenchError(f"{path}:{number}: no JSON: {line(error)}") from None
        wrong = problems(record)
        if wrong:
            raise BenchError(f"{path}:{number}: {wrong[0]}")
        found.append(record)
    return found


def read_tree(folder: Path) -> list[Record]:
    """The records of all .jsonl files under a folder, in the order of their names."""
    return [record for path in sorted(folder.rglob("*.jsonl")) for record in read(path)]


def kind(record: Record) -> str:
    """The kind of timing. A peer's call that no graph holds stands beside ours that one does."""
    return "host" if record["timing"] == "host" else "GPU"


def latest(records: Iterable[Record]) -> list[Record]:
    """Each problem's newest run that measured ours; a peer that it lacked, of its newest run.

    Such a peer's record says so in `other_run`, and its ratio is that of the medians."""
    groups: dict[tuple[str, ...], dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        fields = ("gpu", "family", "op", "case", "dtype")
        problem = (*(record[field] for field in fields), kind(record))
        runs = groups.setdefault(problem, {})
        runs.setdefault((record["date"], record["run"]), []).append(record)
    chosen = []
    for runs in groups.values():
        ours = {run: row for run, rows in runs.items() for row in rows if _is_ours(row)}
        if not ours:
            continue
        newest = max(ours)
        chosen += [row for row in runs[newest] if row["status"] == "ok"]
        known = {row["impl"] for row in runs[newest]}
        for run in sorted(runs, reverse=True):
            for row in runs[run]:
                if row["status"] == "ok" and row["impl"] not in known:
                    ratio = rounded(row["ms_median"] / ours[newest]["ms_median"])
                    chosen.append(row | {"ratio": ratio, "other_run": True})
            known |= {row["impl"] for row in runs[run]}
    return chosen


def _is_ours(record: Record) -> bool:
    return record["impl"] == "tiercel" and record["status"] == "ok"
