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

import figures

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "fast-builds.md", ROOT / "docs" / "fast-builds.json"
SCRIPT = "ci/fast_builds.py"
SOURCE = "kernels/transpose/copy_transpose.cu"
TESTS = (
    "//tests/transpose:test_copy_transpose_cpu",
    "//tests/transpose:test_host_cp313",
)
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


def of_an_edit() -> dict[str, dict[str, float]]:
    """The least of three, each of a kernel that is really another one: more code in its cubin."""
    source = ROOT / SOURCE
    text = source.read_text()
    words = [str(ROOT / "bazelw"), "test", *TESTS]
    run(words)  # everything else is built
    took = []
    try:
        for _ in range(3):
            source.write_text(f"{text}\n__device__ long edit_{time.time_ns()} = 1;\n")
            took.append(run(words)["seconds"])
    finally:
        source.write_text(text)
    return {"Bazel: a kernel edited; one wheel, its tests without a GPU": {"seconds": min(took)}}


def rendered(found: dict) -> str:
    lines = [
        f"{found['cpus']} CPUs ({found['cpu']}), {found['nvcc']}, {found['date']}. Load by "
        f"others before it began: {found['load']}, which lengthens seconds, not CPU seconds:\n",
        "| what | seconds | CPU seconds |",
        "| --- | ---: | ---: |",
    ]
    for title, took in found["took"].items():
        cpu = f"{took['cpu_seconds']:.2f}" if "cpu_seconds" in took else ""
        lines.append(f"| {title} | {took['seconds']:.2f} | {cpu} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/fast-builds.*")
    args = parser.parse_args()
    found = figures.machine() | {"nvcc": "CUDA 13.0"}
    with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as folder:
        found["took"] = of_nvcc(pathlib.Path(folder)) | of_bazel(pathlib.Path(folder))
    found["took"] |= of_an_edit()
    print(rendered(found))
    if args.write:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        PAGE.write_text(figures.page(PAGE.read_text(), SCRIPT, rendered(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
