# SPDX-License-Identifier: Apache-2.0
"""Shared by the scripts that write figures into a page."""

import os
import pathlib
import time


def page(text: str, script: str, content: str) -> str:
    """The page's text with what that script has to say between its two markers."""
    begin = f"<!-- figures: begin (written by {script} --write; do not edit) -->"
    before, found, rest = text.partition(begin)
    end = "<!-- figures: end -->"
    _, closed, after = rest.partition(end)
    assert found and closed, f"the page lacks the markers of {script}"
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def machine() -> dict:
    """Where and when: the CPUs, the day, and the load by others before anything began."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
    }


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
