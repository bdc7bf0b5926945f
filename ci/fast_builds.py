#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what makes CUDA builds fast on this machine; the figures of docs/fast-builds.md.

    ci/fast_builds.py [--write]

Compiles kernels/transpose/copy_transpose.cu in the ways that docs/fast-builds.md compares, with the
pinned toolkit, and the same with and without Bazel's disk cache. --write keeps the figures in
docs/fast-builds.json and renders them into the page. ccache is measured where it is installed.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "fast-builds.md", ROOT / "docs" / "fast-builds.json"
BEGIN = "<!-- figures: begin (written by ci/fast_builds.py --write; do not edit) -->"
END = "<!-- figures: end -->"
SOURCE = "kernels/transpose/copy_transpose.cu"
MANY = ("90", "90a", "100", "120")


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*commands: list[str], env: dict[str, str] | None = None) -> dict[str, float]:
    """Runs them at the same time: seconds on the clock, and of the CPUs."""
    start, cpu = time.monotonic(), children()
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in commands
    ]
    said = [process.communicate()[0] for process in started]
    for process, text in zip(started, said, strict=True):
        if process.returncode:
            sys.exit(f"{' '.join(map(str, process.args))}\n{text.decode()[-2000:]}")
    return {
        "seconds": round(time.monotonic() - start, 2),
        "cpu_seconds": round(children() - cpu, 2),
    }


def bazelw(*words: str) -> str:
    command = [str(ROOT / "bazelw"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def nvcc() -> str:
    bazelw("build", "//kernels/transpose")
    base = pathlib.Path(bazelw("info", "output_base").strip())
    (found,) = base.glob("external/*cuda_toolkit/toolkit/bin/nvcc")
    return str(found)


def compile_with(compiler: list[str], out: pathlib.Path, archs: tuple[str, ...]) -> list[str]:
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    options = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT}", *codes]
    return [*compiler, *options, "-c", SOURCE, "-o", str(out)]


def of_nvcc(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    program = nvcc()
    found = {}

    def one(archs: tuple[str, ...], *more: str) -> list[str]:
        return [*compile_with([program], folder / "a.o", archs), *more]

    run(one(("90a",)))  # the files are in memory from here on
    found["one architecture (sm_90a)"] = run(one(("90a",)))
    found[f"{len(MANY)} architectures"] = run(one(MANY))
    found[f"{len(MANY)} architectures, nvcc --threads 0"] = run(one(MANY, "--threads", "0"))
    four = [compile_with([program], folder / f"{n}.o", ("90a",)) for n in range(4)]
    one_by_one = [run(command) for command in four]
    found["four files, one after another"] = {
        key: round(sum(took[key] for took in one_by_one), 2) for key in one_by_one[0]
    }
    found["four files, all at once"] = run(*four)
    if shutil.which("ccache"):
        env = dict(os.environ, CCACHE_DIR=str(folder / "ccache"))
        command = compile_with(["ccache", program], folder / "a.o", ("90a",))
        found["ccache, the first time"] = run(command, env=env)
        found["ccache, the same again"] = run(command, env=env)
    return found


def of_bazel(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """On the clock alone: Bazel's server does the work, and is nobody's child."""
    targets = bazelw("query", 'kind("cuda_library", //kernels/transpose:all)').split()
    words = ["build", *targets, "--output_groups=pic_objects"]
    words += [f"--disk_cache={folder / 'disk'}", "--nouse_action_cache"]
    found = {}
    for title, fresh in (
        ("Bazel: a family's kernels, compiled", True),
        ("Bazel: the same from the disk cache", True),
        ("Bazel: the same, nothing changed", False),
    ):
        if fresh:
            bazelw("shutdown")
            bazelw("build", "--nobuild", *targets)  # its start and analysis are not counted
        found[title] = {"seconds": run([str(ROOT / "bazelw"), *words])["seconds"]}
    return found


def rendered(figures: dict) -> str:
    lines = [
        f"{figures['cpus']} CPUs ({figures['cpu']}), {figures['nvcc']}, {figures['date']}. Load by "
        f"others before it began: {figures['load']}, which lengthens seconds, not CPU seconds:\n",
        "| what | seconds | CPU seconds |",
        "| --- | ---: | ---: |",
    ]
    for title, took in figures["took"].items():
        cpu = f"{took['cpu_seconds']:.2f}" if "cpu_seconds" in took else ""
        lines.append(f"| {title} | {took['seconds']:.2f} | {cpu} |")
    return "\n".join(lines) + "\n"


def page(text: str, figures: dict) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} lacks its markers"
    return f"{before}{BEGIN}\n\n{rendered(figures)}\n{END}{after}"


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/fast-builds.*")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as folder:
        took = of_nvcc(pathlib.Path(folder)) | of_bazel(pathlib.Path(folder))
    figures = {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "nvcc": "CUDA 13.0",
        "date": time.strftime("%Y-%m-%d"),
        "load": round(load, 1),
        "took": took,
    }
    print(rendered(figures))
    if args.write:
        FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
        PAGE.write_text(page(PAGE.read_text(), figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
