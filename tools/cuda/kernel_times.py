#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what the cold build of every kernel costs, and writes kernels/budget.json.

    tools/cuda/kernel_times.py [--check] [FAMILY...]

CPU seconds of the compilers, by Bazel's own accounts of a build without caches, a family at a time;
how many kernels that was and their code, by //python:kernel_list. --check writes nothing and fails
when all of them together are beyond the limit.

One machine's CPU seconds differ by half from hour to hour, and machines by more. So a fixed piece
of work, //tools/cuda/reference, is compiled before and after each family, and all figures are in
seconds of a machine that takes budget.json's reference_cpu_seconds for it.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGET = ROOT / "kernels" / "budget.json"
REFERENCE = ["//tools/cuda/reference"]
MNEMONICS = ("CudaCompile", "CuteCompile")


def bazelw(*words: str) -> str:
    command = [str(ROOT / "bazelw"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def cpu_seconds(events: str) -> float:
    """Of the kernels' compilers, in a build's events: user and system time."""
    total = 0.0
    for line in events.splitlines():
        metrics = json.loads(line).get("buildMetrics", {})
        for action in metrics.get("actionSummary", {}).get("actionData", ()):
            if action["mnemonic"] in MNEMONICS:
                times = [action.get(kind, "0s") for kind in ("userTime", "systemTime")]
                total += sum(float(time.removesuffix("s")) for time in times)
    return total


def targets(family: str) -> list[str]:
    pattern = f'kind("cuda_library|_compiled_kernels", //kernels/{family}/...)'
    found = bazelw("query", "--ui_event_filters=-info", pattern).split()
    return found or sys.exit(f"kernels/{family} has no kernels")


def measure(targets: list[str]) -> float:
    bazelw("shutdown")  # what the server has in memory, no flag makes it forget
    with tempfile.TemporaryDirectory() as folder:
        events = pathlib.Path(folder, "events.json")
        flags = ["--disk_cache=", "--remote_cache=", "--nouse_action_cache"]
        flags += ["--output_groups=pic_objects,cubins", f"--build_event_json_file={events}"]
        bazelw("build", *flags, *targets)
        return cpu_seconds(events.read_text())


def kernels() -> list[dict]:
    bazelw("build", "//python:kernel_list")
    return json.loads((ROOT / "bazel-bin/python/tiercel/_kernels.json").read_text())["kernels"]


def main() -> int:
    words = sys.argv[1:]
    check = "--check" in words
    budget = json.loads(BUDGET.read_text())
    found = kernels()
    families = [word for word in words if word != "--check"]
    for family in families or sorted({kernel["family"] for kernel in found}):
        before, here, after = (measure(built) for built in (REFERENCE, targets(family), REFERENCE))
        seconds = here * budget["reference_cpu_seconds"] / ((before + after) / 2)
        mine = [kernel for kernel in found if kernel["family"] == family]
        budget["families"][family] = {
            "kernels": len(mine),
            "code_bytes": sum(kernel["bytes"] for kernel in mine),
            "cpu_seconds": round(seconds, 1),
        }
        print(
            f"{family:<12}{len(mine):>5} kernels {seconds:8.1f} CPU s (here {here:.1f})", flush=True
        )
    total = sum(family["cpu_seconds"] for family in budget["families"].values())
    print(f"{'in all':<25} {total:8.1f} CPU s of {budget['limit_cpu_seconds']}")
    if not check:
        budget["families"] = dict(sorted(budget["families"].items()))
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n")
    return int(total > budget["limit_cpu_seconds"])


if __name__ == "__main__":
    sys.exit(main())
