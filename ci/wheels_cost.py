#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what one graph for all Pythons saves: CPU seconds of cold builds, for docs/releasing.md.

    ci/wheels_cost.py [--write] [--pythons 3.10,3.11]

Builds //python:wheels with no cache, then each Python's wheel alone, each time with its kernels
compiled, and compares the sums; by Bazel's own accounts of its actions. About 20 CPU-minutes.
--pythons builds only some of them alone and takes their mean for each; the result says so.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "releasing.md", ROOT / "docs" / "wheels-cost.json"
BEGIN = "<!-- cost: begin (written by ci/wheels_cost.py --write; do not edit) -->"
END = "<!-- cost: end -->"
BAR = 2.5


def bazelw(*words: str) -> str:
    command = [str(ROOT / "bazelw"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def cpu_seconds(events: str) -> dict[str, float]:
    """User and system time of a build's actions, by kind."""
    found: dict[str, float] = collections.defaultdict(float)
    for line in events.splitlines():
        metrics = json.loads(line).get("buildMetrics", {})
        for action in metrics.get("actionSummary", {}).get("actionData", ()):
            times = [action.get(kind, "0s") for kind in ("userTime", "systemTime")]
            found[action["mnemonic"]] += sum(float(time.removesuffix("s")) for time in times)
    return {kind: round(seconds, 1) for kind, seconds in sorted(found.items()) if seconds}


def measure(target: str) -> dict[str, float]:
    bazelw("shutdown")  # what the server has in memory, no flag makes it forget
    with tempfile.TemporaryDirectory() as folder:
        events = pathlib.Path(folder, "events.json")
        flags = ["--disk_cache=", "--remote_cache=", "--nouse_action_cache"]
        flags += ["--experimental_record_metrics_for_all_mnemonics"]
        bazelw("build", *flags, f"--build_event_json_file={events}", target)
        return cpu_seconds(events.read_text())


def rendered(figures: dict) -> str:
    lines = ["| cold build | CPU seconds | of them kernels |", "| --- | ---: | ---: |"]

    def row(title: str, kinds: dict[str, float], times: float = 1) -> None:
        kernels = sum(kinds.get(kind, 0) for kind in ("CudaCompile", "CuteCompile"))
        total = sum(kinds.values())
        lines.append(f"| {title} | {times * total:.0f} | {times * kernels:.0f} |")

    row("`//python:wheels`, four wheels of one graph", figures["graph"])
    for python, kinds in figures["alone"].items():
        row(f"the wheel for Python {python} alone", kinds)
    count, of = len(figures["alone"]), figures["pythons"]
    measured = "measured" if count == of else f"{count} measured, their mean taken for the others"
    lines.append("")
    lines.append(
        f"{of} builds of one Python each ({measured}) cost {figures['ratio']:.2f} times the CPU of"
        f" the one graph (the bar is {BAR}). {figures['cpus']} CPUs, {figures['date']}, commit"
        f" {figures['commit']}; load by others before it began: {figures['load']}."
    )
    return "\n".join(lines) + "\n"


def page(text: str, figures: dict) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} lacks its markers"
    return f"{before}{BEGIN}\n\n{rendered(figures)}\n{END}{after}"


def main() -> int:
    listed = re.search(r"PYTHON_VERSIONS = \[(.*?)\]", (ROOT / "MODULE.bazel").read_text(), re.S)[1]
    supported = re.findall(r'"([\d.]+)"', listed)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/releasing.md")
    parser.add_argument("--pythons", default=",".join(supported), help="default: all")
    args = parser.parse_args()
    commit = ["git", "describe", "--always", "--dirty", "--match="]
    figures = {
        "cpus": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.check_output(commit, cwd=ROOT, text=True).strip(),
        "load": round(os.getloadavg()[0], 1),
        "pythons": len(supported),
        "graph": measure("//python:wheels"),
        "alone": {},
    }
    for python in args.pythons.split(","):
        target = f"//python:wheel_cp{python.replace('.', '')}"
        figures["alone"][python] = measure(target)
    sums = [sum(kinds.values()) for kinds in figures["alone"].values()]
    mean = sum(sums) / len(sums)
    figures["ratio"] = round(mean * len(supported) / sum(figures["graph"].values()), 2)
    print(rendered(figures))
    if args.write:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), figures))
    return int(figures["ratio"] < BAR)


if __name__ == "__main__":
    sys.exit(main())
