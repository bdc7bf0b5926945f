# SPDX-License-Identifier: Apache-2.0
"""Runs a command under a profiler: fast defaults, a dated report, and its errors in plain words."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tiercel.workbench.profiling import ProfileError, programs

# No more metrics than `extract` reads: a kernel is replayed about ten times for it, not forty.
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__bytes.sum.per_second",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
_ERRORS = {
    "ERR_NVGPUCTRPERM": (
        "this user may not read the GPU's performance counters. Run it as root (sudo), start a "
        "container with --cap-add=SYS_ADMIN, or on the host: echo 'options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf and restart"
    ),
    "failed to connect to the CUDA driver": (
        "ncu finds no NVIDIA driver here, or the command loads a stand-in for libcuda.so.1; "
        "`tiercel doctor` says which. nsys works without a GPU too"
    ),
    "Importer error": (
        "nsys recorded, but its importer, which makes a report of the .qdstrm, does not start: "
        "install the whole of nsight-systems, not only its target part"
    ),
    "LibraryNotLoaded": "the profiler could not be loaded here: a virtual GPU, or gVisor",
    "No kernels were profiled": (
        "no kernel ran, or --kernel-name left all out (it is a name, or regex:PATTERN)"
    ),
    "Device not supported": "compute-sanitizer does not support this GPU or this kind of container",
}


def arguments(tool: str, options: Sequence[str], report: Path) -> list[str]:
    """The profiler's own: what was asked for, with defaults for what was not."""
    given = {word.partition("=")[0] for word in options if word.startswith("-")}

    def default(names: Sequence[str], words: Sequence[str]) -> list[str]:
        return [] if given & set(names) else list(words)

    if tool == "ncu":
        sections = [word for name in SECTIONS for word in ("--section", name)]
        sections += ["--metrics", ",".join(METRICS)]
        return [
            *default(["-o", "--export"], ["--export", str(report.with_suffix(""))]),
            *default(["--target-processes"], ["--target-processes", "all"]),
            *default(["-c", "--launch-count"], ["--launch-count", "10"]),
            *default(["--set", "--section", "--metrics", "--section-folder"], sections),
            *options,
        ]
    if tool == "nsys":
        return [
            "profile",
            *default(["-o", "--output"], ["--output", str(report.with_suffix(""))]),
            *default(["-t", "--trace"], ["--trace=cuda,nvtx"]),
            *default(["-s", "--sample"], ["--sample=none"]),
            *default(["--cpuctxsw"], ["--cpuctxsw=none"]),
            *options,
        ]
    return [
        *default(["--log-file"], ["--log-file", str(report)]),
        *default(["--error-exitcode"], ["--error-exitcode", "1"]),
        *options,
    ]


PROGRAMS = {"ncu": "ncu", "nsys": "nsys", "sanitizer": "compute-sanitizer"}
_ENDINGS = {"ncu": ".ncu-rep", "nsys": ".nsys-rep", "sanitizer": ".sanitizer.txt"}


def report_path(tool: str, folder: Path, now: "float | None" = None) -> Path:
    """A new name by date and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    for number in range(1, 1000):
        more = f"-{number}" if number > 1 else ""
        path = folder / f"tiercel-{tool}-{stamp}{more}{_ENDINGS[tool]}"
        if not path.exists():
            return path
    raise ProfileError(f"{folder} is full of reports")


def run(
    tool: str, options: Sequence[str], command: Sequence[str], folder: Path
) -> tuple[int, Path]:
    """The command's status, and where the report is (named by the user, or dated)."""
    program = programs.find(PROGRAMS[tool])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"cannot write to {folder}: {error.strerror}") from None
    report = _named(options, _ENDINGS[tool]) or report_path(tool, folder)
    full = [program, *arguments(tool, options, report), *command]
    said = _stream(full)
    for word, meaning in _ERRORS.items():
        if any(word in line for line in said.problems):
            raise ProfileError(meaning)
    if not report.exists():
        raise ProfileError(
            f"{PROGRAMS[tool]} ended with status {said.status} and left no report; "
            f"its command was: {' '.join(full)}"
        )
    return said.status, report


def _named(options: Sequence[str], ending: str) -> "Path | None":
    """The report where the user said so."""
    for place, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name in ("-o", "--export", "--output", "--log-file"):
            value = value if equals else options[place + 1] if place + 1 < len(options) else ""
            if name == "--log-file" or value.endswith(ending):
                return Path(value)
            return Path(value + ending)
    return None


class _Said:
    def __init__(self) -> None:
        self.status = 0
        self.problems: list[str] = []


def _stream(command: Sequence[str]) -> _Said:
    """Runs it with its output passed on; keeps the lines that a profiler complains in."""
    said = _Said()
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise ProfileError(f"{command[0]} does not start: {error.strerror}") from None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if re.match(
                r"\s*=+\s*(==)?(ERROR|WARNING)?|.*(not supported|LibraryNotLoaded)|Importer error",
                line,
            ):
                said.problems.append(line)
        said.status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    return said
