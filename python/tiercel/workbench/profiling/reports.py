# SPDX-License-Identifier: Apache-2.0
"""Figures out of a report: of Nsight Compute by kernel, of the others as they sum up themselves."""

import csv
import io
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tiercel._terminal import line
from tiercel.workbench.profiling import ProfileError, programs

_PERCENT = "avg.pct_of_peak_sustained_elapsed"
_THROUGHPUT = {
    "sm": f"sm__throughput.{_PERCENT}",
    "memory": f"gpu__compute_memory_throughput.{_PERCENT}",
    "dram": f"gpu__dram_throughput.{_PERCENT}",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2": f"lts__throughput.{_PERCENT}",
}
_LAUNCH = {
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "waves": "launch__waves_per_multiprocessor",
}
_PIPE = re.compile(r"sm__(?:inst_executed_pipe|pipe)_(\w+?)(?:_cycles_active)?\.avg\.pct_of_peak")
_STALL = re.compile(
    r"smsp__average_warps?_(?:issue|latency_issue)_stalled_(\w+?)(?:_per_issue_a|_n|\.)"
)
_LIMIT = re.compile(r"launch__occupancy_limit_(\w+)")


def read(path: Path, kernel: "str | None" = None) -> list[dict[str, Any]]:
    """One entry a kernel launch, in order; `kernel` is part of its name."""
    if not path.is_file():
        raise ProfileError(f"{path} is no file")
    if path.suffix == ".csv":
        text = _text(path)
    elif path.suffix == ".ncu-rep":
        words = ["--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]
        text = _said([programs.find("ncu"), *words])
    elif path.suffix in (".nsys-rep", ".sqlite"):
        return _named(from_nsys(_sum_of_nsys(path)), kernel)
    else:
        raise ProfileError(
            f"{path} is none of .ncu-rep, .nsys-rep and .csv (of `ncu --csv --page raw`)"
        )
    return _named(from_ncu(text), kernel)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from None


def _named(found: list[dict[str, Any]], kernel: "str | None") -> list[dict[str, Any]]:
    chosen = [entry for entry in found if kernel is None or kernel in entry["kernel"]]
    if not chosen:
        there = ", ".join(sorted({entry["kernel"] for entry in found})) or "none"
        if kernel is None:
            raise ProfileError("the report holds no kernels")
        raise ProfileError(f"no kernel named {kernel!r} in the report; there are: {there}")
    return chosen


def _sum_of_nsys(path: Path) -> str:
    """The kernels' summary. It was renamed in 2023, and for an unknown name nsys does not fail."""
    words = [programs.find("nsys"), "stats", "--format", "csv", "--quiet", str(path), "--report"]
    try:
        return _said([*words, "cuda_gpu_kern_sum"])
    except ProfileError:
        return _said([*words, "gpukernsum"])


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or "could not be found" in done.stderr:
        last = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ProfileError(f"{Path(command[0]).name} could not read the report: {line(last[-1])}")
    return done.stdout


def from_ncu(text: str) -> list[dict[str, Any]]:
    """Reads `ncu --csv --page raw --print-units base`: names, then units, then a line a launch."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ProfileError("the report holds no kernels")
    rows = _rows(lines[start:])
    if len(rows) < 2 or "Kernel Name" not in rows[0] or len(rows[0]) != len(rows[1]):
        raise ProfileError("the report holds no kernels: its head is damaged or cut short")
    names, units = rows[0], rows[1]
    scale = [_SCALES.get(unit, 1.0) for unit in units]
    found = []
    for row in rows[2:]:
        if len(row) != len(names):
            continue
        values = dict(zip(names, row, strict=True))
        figures = {
            name: number * factor
            for name, value, factor in zip(names, row, scale, strict=True)
            if (number := _number(value)) is not None
        }
        found.append(_kernel(values, figures))
    return found


def _rows(lines: list[str]) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO("\n".join(lines))))
    except csv.Error as error:
        raise ProfileError(f"the report is no CSV: {error}") from None


# To bytes and nanoseconds, for reports whose units are not base ones.
_SCALES = {
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "usecond": 1e3,
    "us": 1e3,
    "msecond": 1e6,
    "ms": 1e6,
    "second": 1e9,
    "s": 1e9,
    "Kbyte/block": 1e3,
}


def _number(text: str) -> "float | None":
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None  # not NaN either


def _kernel(values: Mapping[str, str], figures: Mapping[str, float]) -> dict[str, Any]:
    nanoseconds = figures.get("gpu__time_duration.sum")
    found: dict[str, Any] = {
        "kernel": line(values["Kernel Name"], 4000),
        "grid": line(values.get("Grid Size", "")),
        "block": line(values.get("Block Size", "")),
        "us": None if nanoseconds is None else nanoseconds / 1e3,
        "throughput": {name: figures[m] for name, m in _THROUGHPUT.items() if m in figures},
        "pipes": _by(_PIPE, figures, leave=("pred_on_any",)),
        "stalls": _by(_STALL, figures, leave=("selected",)),  # those that wait for nothing
        "occupancy": {
            name: figures[metric]
            for name, metric in (
                ("achieved", "sm__warps_active.avg.pct_of_peak_sustained_active"),
                ("possible", "sm__maximum_warps_per_active_cycle_pct"),
            )
            if metric in figures
        },
        "limits": _by(_LIMIT, figures),
    }
    found |= {name: figures[metric] for name, metric in _LAUNCH.items() if metric in figures}
    moved = [figures.get(f"dram__bytes_{way}.sum") for way in ("read", "write")]
    found["dram_bytes"] = None if None in moved else sum(filter(None, moved))
    return found


def _by(
    pattern: "re.Pattern[str]", figures: Mapping[str, float], leave: tuple[str, ...] = ()
) -> dict[str, float]:
    """The largest first; a pipe that has several metrics by its largest."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        match = pattern.match(name)
        if match and not match[1].endswith(leave or ("\0",)):
            found[match[1]] = max(value, found.get(match[1], 0.0))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def from_nsys(text: str) -> list[dict[str, Any]]:
    """Reads `nsys stats --report cuda_gpu_kern_sum --format csv`: kernels by share of time."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("Time (%)")), None)
    if start is None:
        raise ProfileError("the report holds no kernels: none ran on a GPU under nsys")
    rows = _rows(lines[start:])
    wanted = ("Name", "Time (%)", "Instances", "Med (ns)")
    if not rows or not set(wanted) <= set(rows[0]):
        raise ProfileError(f"the report lacks a column of {', '.join(wanted)}")
    found = []
    for row in rows[1:]:
        values = dict(zip(rows[0], row))  # noqa: B905 - one that is cut short lacks some
        name, share, calls, median = (values.get(column, "") for column in wanted)
        figures = [_number(text) for text in (share, calls, median)]
        if None in figures:
            continue
        part, count, nanoseconds = (float(figure or 0) for figure in figures)
        entry = {"kernel": line(name, 4000), "share": part}
        found.append(entry | {"calls": int(count), "us": nanoseconds / 1e3})
    return found


def from_sanitizer(text: str) -> dict[str, Any]:
    """The tool's own count of errors, and the first few."""
    counted = re.search(r"ERROR SUMMARY: (\d{1,18}) error", text)
    hazards = re.search(r"RACECHECK SUMMARY: (\d{1,18}) hazard", text)
    total = sum(int(match[1]) for match in (counted, hazards) if match)
    first = re.findall(
        r"^={1,32} (?=Invalid|Error|Program hit|Uninitialized|Race|Barrier)(.*)", text, re.M
    )
    shown = [line(text) for text in first[:5]]
    return {"errors": total, "finished": bool(counted or hazards), "first": shown}


def floors(found: Iterable[dict[str, Any]], floor_bytes: float) -> list[dict[str, Any]]:
    """With what a kernel has to move, beside what it did."""
    return [
        entry
        | {
            "floor_bytes": floor_bytes,
            "of_floor": entry["dram_bytes"] / floor_bytes if entry.get("dram_bytes") else None,
            "floor_gbps": floor_bytes / entry["us"] / 1e3 if entry.get("us") else None,
        }
        for entry in found
    ]
