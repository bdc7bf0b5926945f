# SPDX-License-Identifier: Apache-2.0
"""Speeds of models as an SVG picture, from the same records as the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tiercel.workbench.models import WAYS, label

_COLOURS = dict(
    zip(WAYS, ("#9aa0a6", "#5f6368", "#8ab4f8", "#1a73e8", "#0b8043", "#f29900"), strict=True)
)
_BAR, _GAP, _LEFT, _WIDTH = 16, 14, 250, 420


def draw(cases: Iterable[tuple[str, Sequence[dict[str, Any]]]]) -> str:
    """(title, records) of each case: bars of the speed, to the uncompiled model's. A case's fastest
    way fills the width; a case of one way alone is not drawn."""
    parts: list[str] = []
    top = 8.0
    shown: list[tuple[str, list[tuple[dict[str, Any], float]]]] = []
    for title, records in cases:
        good = {r["way"]: r for r in records if r["status"] == "ok"}
        if (base := good.get("transformers")) is not None and len(good) > 1:
            bars = [good[way] for way in WAYS if way in good]
            shown.append((title, [(r, base["ms_median"] / r["ms_median"]) for r in bars]))
    y = top
    for title, bars in shown:
        most = max(speed for _, speed in bars)
        y += _BAR
        parts.append(f'<text x="4" y="{y:.0f}" font-weight="bold">{escape(title)}</text>')
        y += 6
        for record, speed in bars:
            width = _WIDTH * speed / most
            middle = y + _BAR - 4
            name = escape(label(record))
            parts.append(
                f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{name}</text>'
                f'<rect x="{_LEFT}" y="{y:.0f}" width="{width:.1f}" height="{_BAR - 3}" '
                f'fill="{_COLOURS[record["way"]]}"/>'
                f'<text x="{_LEFT + width + 6:.1f}" y="{middle:.0f}">{speed:.2f}</text>'
            )
            y += _BAR
        y += _GAP
    size = f'width="{_LEFT + _WIDTH + 60}" height="{y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
    lines = [
        head + 'font-size="12" fill="#202124">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>", ""])
