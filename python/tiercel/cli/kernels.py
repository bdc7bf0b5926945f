# SPDX-License-Identifier: Apache-2.0
"""``tiercel kernels``: what is compiled into this wheel."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HELP = "Lists the precompiled kernels of this wheel: registers, shared memory, size, users."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="only kernels with this in their name")
    parser.add_argument("--family", help="only this family's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    text = "only a line a family: kernels, size, most registers and shared memory"
    parser.add_argument("--summary", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    try:
        listed = load()
    except OSError:
        print("tiercel kernels: this installation has no list of its kernels", file=sys.stderr)
        return 1
    families = sorted({kernel["family"] for kernel in listed["kernels"]})
    if args.family is not None and args.family not in families:
        there = ", ".join(families)
        print(f"tiercel kernels: no family {args.family!r}; there are {there}", file=sys.stderr)
        return 2
    chosen = [
        kernel
        for kernel in listed["kernels"]
        if args.name in kernel["name"] and args.family in (None, kernel["family"])
    ]
    if args.json:
        print(json.dumps(listed | {"kernels": chosen}, indent=2))
    elif not chosen:
        of = f" of the family {args.family}" if args.family is not None else ""
        print(f"tiercel kernels: no kernel{of} has {args.name!r} in its name", file=sys.stderr)
    else:
        print(summary(chosen) if args.summary else table(chosen))
        size = sum(kernel["bytes"] for kernel in chosen)
        print(f"{len(chosen)} kernels for {listed['arch']}, {size / 1e6:.2f} MB of code")
    return 0 if chosen else 1


def load() -> dict[str, Any]:
    """The build's list, with the tuned configurations that name a kernel."""
    package = Path(__file__).parent.parent
    listed: dict[str, Any] = json.loads((package / "_kernels.json").read_text(encoding="utf-8"))
    users: dict[str, list[str]] = {}
    for path in sorted((package / "configs").rglob("*.json")):
        for word in _words(json.loads(path.read_text(encoding="utf-8"))):
            users.setdefault(word, []).append(path.stem)
    for kernel in listed["kernels"]:
        kernel["configurations"] = users.get(kernel["name"], [])
    return listed


def _words(value: Any) -> set[str]:
    """All texts in a configuration: one may be a kernel's name."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(_words, value)) if isinstance(value, list) else set()


def table(kernels: list[dict[str, Any]]) -> str:
    lines = [f"{'registers':>9} {'shared KB':>9} {'code KB':>8}  kernel"]
    family = None
    for kernel in kernels:
        if kernel["family"] != family:
            family = kernel["family"]
            lines.append(f"{family}:")
        shared, code = kernel["shared"] / 1024, kernel["bytes"] / 1024
        line = f"{kernel['registers']:9} {shared:9.1f} {code:8.1f}  {kernel['name']}"
        if "block" in kernel:
            line += f"  block {_size(kernel['block'])}"
            cluster = _size(kernel["cluster"])
            line += f", cluster {cluster}" if cluster != "1" else ""
        if kernel["configurations"]:
            line += f"  used by {', '.join(kernel['configurations'])}"
        lines.append(line)
    return "\n".join(lines)


def _size(extents: list[Any]) -> str:
    """1-3 numbers or expressions without the ones at the end."""
    words = [str(extent) for extent in extents]
    while len(words) > 1 and words[-1] == "1":
        words.pop()
    return "x".join(words)


def summary(kernels: list[dict[str, Any]]) -> str:
    lines = [f"{'family':<12} {'kernels':>7} {'code KB':>8} {'registers':>9} {'shared KB':>9}  by"]
    for family in sorted({kernel["family"] for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel["family"] == family]
        code = sum(kernel["bytes"] for kernel in mine) / 1024
        registers = max(kernel["registers"] for kernel in mine)
        shared = max(kernel["shared"] for kernel in mine) / 1024
        by = ", ".join(sorted({kernel["language"] for kernel in mine}))
        lines.append(f"{family:<12} {len(mine):7} {code:8.0f} {registers:9} {shared:9.1f}  {by}")
    return "\n".join(lines)
