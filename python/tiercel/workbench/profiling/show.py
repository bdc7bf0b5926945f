# SPDX-License-Identifier: Apache-2.0
"""Figures of a report as text."""

import re
from collections.abc import Mapping
from typing import Any


def as_text(entry: Mapping[str, Any]) -> str:
    if "share" in entry:
        return (
            f"{entry['share']:5.1f} %  {entry['us']:9.2f} us  {entry['calls']:6}  {entry['kernel']}"
        )
    time = "" if entry["us"] is None else f"  {entry['us']:.2f} us"
    lines = [f"{_name(entry['kernel'])}  grid {entry['grid']} block {entry['block']}{time}"]

    def add(title: str, text: str) -> None:
        if text:
            lines.append(f"  {title:<12}{text}")

    add("throughput", _percents(entry["throughput"]))
    add("pipes", _percents(dict(list(entry["pipes"].items())[:5])))
    stalls = {n: v for n, v in list(entry["stalls"].items())[:4] if v >= 0.05}
    add(
        "stalls",
        ", ".join(f"{n} {v:.2f}" for n, v in stalls.items()) + " warps an issue" * bool(stalls),
    )
    add("occupancy", _occupancy(entry))
    add("bytes", _bytes(entry))
    return "\n".join(lines)


def _name(kernel: str, width: int = 100) -> str:
    """Without parameters and what every name has; the JSON has it whole."""
    name = re.sub(r"\([^()]*\)$", "", kernel.removeprefix("void "))
    name = name.replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _percents(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f} %" for name, value in values.items())


def _occupancy(entry: Mapping[str, Any]) -> str:
    words = []
    have = entry["occupancy"]
    if "achieved" in have:
        possible = f" of {have['possible']:.0f} %" if "possible" in have else ""
        words.append(f"{have['achieved']:.0f} %{possible}")
    if "registers" in entry:
        words.append(f"{entry['registers']:.0f} registers")
    if "shared_bytes" in entry:
        words.append(f"{entry['shared_bytes'] / 1024:.1f} KB shared")
    if entry["limits"]:
        least = min(entry["limits"].values())
        by = [name for name, value in entry["limits"].items() if value == least]
        words.append(f"{least:.0f} blocks an SM by {', '.join(by)}")
    return ", ".join(words)


def _bytes(entry: Mapping[str, Any]) -> str:
    moved = entry["dram_bytes"]
    if moved is None:
        return ""
    text = f"{moved / 1e6:.2f} MB"
    if entry["us"]:
        text += f", {moved / entry['us'] / 1e3:.0f} GB/s"
    if entry.get("of_floor") is not None:
        text += f", {entry['of_floor']:.2f} times the floor of {entry['floor_bytes'] / 1e6:.2f} MB"
        text += f" ({entry['floor_gbps']:.0f} GB/s of it)"
    return text
