# SPDX-License-Identifier: Apache-2.0
"""The tour as a picture: time of PyTorch over ours, an operator a bar."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiercel.workbench.demo.tour import Stop

ENDINGS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def problem(path: Path) -> str | None:
    """Why no picture can be written there, before there is one."""
    if path.suffix.lower() not in ENDINGS:
        return f"--plot must end in one of {', '.join(ENDINGS)}, got {path}"
    if path.is_dir():
        return f"--plot must be a file, and {path} is a folder"
    if not path.parent.is_dir():
        return f"--plot: there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"--plot: {path} cannot be written"
    return None


def draw(stops: Sequence[Stop], path: Path, title: str) -> bool:
    """True if there was a matplotlib to draw with."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    accelerated = [stop for stop in stops if stop.speedup is not None]
    shown = accelerated or [stop for stop in stops if stop.ms is not None]
    values = [stop.speedup or stop.ms or 0.0 for stop in shown]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(shown)), dpi=150)
    bars = axes.barh([stop.op for stop in shown], values, color="#2a6f97")
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.invert_yaxis()
    if accelerated:
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel("PyTorch's time over ours (above 1: ours is faster)")
    else:
        axes.set_xlabel("milliseconds, in plain PyTorch: nothing is accelerated here")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
