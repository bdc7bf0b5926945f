# SPDX-License-Identifier: Apache-2.0
"""``--plot``: a roofline of a run, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercel.workbench.bench import BenchError, limits
from tiercel.workbench.bench.records import Record

# implementation -> (x, y) of each case
Series = dict[str, list[tuple[float, float]]]


def series(rows: Sequence[Record]) -> tuple[Series, bool]:
    """Points by implementation, and whether they are TFLOP/s by intensity.

    Operators that only move data have no use for that: their points are GB/s by bytes moved.
    """
    whole = [r for r in rows if r["family"] != "limits" and "part" not in r]
    good = [r for r in whole if r["status"] == "ok" and r["gbps"]]
    compute = bool(good) and all(r["tflops"] is not None for r in good)
    found: Series = {}
    for record in good:
        moved = record["gbps"] * record["ms_median"] * 1e6
        if compute:
            flops = record["tflops"] * record["ms_median"] * 1e9
            point = (flops / moved, record["tflops"])
        else:
            point = (moved, record["gbps"])
        found.setdefault(record["impl"], []).append(point)
    return {name: sorted(points) for name, points in found.items()}, compute


def roof(found: dict[str, float], x: float, *, compute: bool) -> float:
    """The most that the run's limits allow at x."""
    copy = found["copy_gbps"]
    if compute:
        return min(x * copy / 1e3, found.get("bfloat16_tflops", float("inf")))
    # The bytes need their time, and a launch has its own.
    return x / (x / copy + found.get("launch_us", 0.0) * 1e3)


def draw(rows: Sequence[Record], path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise BenchError(
            "--plot needs matplotlib, which is not installed: pip install 'tiercel[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = limits.summary([r for r in rows if r["family"] == "limits"])
    shown, compute = series(rows)
    if not shown:
        raise BenchError("--plot: the run has no measurement to draw")
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150)
    for name, points in sorted(shown.items()):
        ours = name == "tiercel"
        style: dict[str, Any] = {"zorder": 3, "s": 26} if ours else {"s": 14, "alpha": 0.6}
        axes.scatter(*zip(*points, strict=True), label=name, **style)
    xs = [x for points in shown.values() for x, _ in points]
    steps = [min(xs) * (max(xs) / min(xs)) ** (i / 100) for i in range(101)]
    if "copy_gbps" in found:
        roofs = [roof(found, x, compute=compute) for x in steps]
        axes.plot(steps, roofs, color="black", linewidth=1, label="limit")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte" if compute else "bytes moved")
    axes.set_ylabel("TFLOP/s" if compute else "GB/s")
    axes.set_title(f"{rows[0]['gpu']}, {', '.join(sorted({r['op'] for r in rows} - _LIMITS))}")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


_LIMITS = {"copy", "launch", "gemm"}
