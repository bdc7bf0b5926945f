#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the first compile of a one-kernel file takes beside torch.utils.cpp_extension.load.

    python ci/first_compile.py [--rounds N] [--write]

Runs with the Python that has Tiercel, ninja and a CUDA build of PyTorch; needs nvcc and g++, but no
GPU. The same kernel: for tiercel.jit.cuda by itself, for PyTorch behind a pybind11 function, which
is what people write. In turn, N rounds, each in new processes and with nothing cached. --write
keeps the figures in docs/first-compile.json and renders them into docs/fast-builds.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import figures

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "fast-builds.md", ROOT / "docs" / "first-compile.json"
SCRIPT = "ci/first_compile.py"
KERNEL = """
__global__ void twice(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.0f;
}
"""
BINDING = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
void launch_twice(torch::Tensor x) {
  const int n = static_cast<int>(x.numel());
  twice<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), n);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("twice", &launch_twice); }
"""
# Seconds on the clock, and of the CPU: this process's and its children's.
CLOCK = """
import json, os, sys, time
def now():
    return time.perf_counter(), sum(os.times()[:4])
def done(start):
    print(json.dumps([after - before for before, after in zip(start, now())]))
"""
OURS = """
import tiercel.jit, tiercel.jit.kernel
start = now()
report = tiercel.jit.cuda(sys.argv[1], "twice", arch="sm_90a").compile()
done(start)
"""
TORCHS = """
from torch.utils import cpp_extension
start = now()
module = cpp_extension.load("twice", [sys.argv[1]], build_directory=sys.argv[2])
done(start)
assert module.twice
"""
WAYS = ("tiercel.jit.cuda", "torch.utils.cpp_extension.load")


def seconds(code: str, *args: Path, **env: str) -> list[float]:
    command = [sys.executable, "-c", CLOCK + code, *map(str, args)]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def toolkit(folder: Path) -> Path:
    """The toolkit of nvcc, with the link to the runtime library that NVIDIA's packages lack."""
    from tiercel.jit.toolchain import find_nvcc

    found = Path(find_nvcc()).resolve().parents[1]
    if (found / "lib64" / "libcudart.so").exists():
        return found
    (folder / "lib64").mkdir(parents=True)
    for path in (*found.iterdir(), *(found / "lib64").iterdir()):
        if path.name != "lib64":
            (folder / path.relative_to(found)).symlink_to(path)
    (runtime,) = (found / "lib64").glob("libcudart.so.*")
    (folder / "lib64" / "libcudart.so").symlink_to(runtime)
    return folder


def round_of(folder: Path, cuda: Path) -> dict[str, list[list[float]]]:
    """By way: the first time, and again in a new process."""
    (folder / "twice.cu").write_text(KERNEL)
    (folder / "extension.cu").write_text(KERNEL + BINDING)
    (folder / "build").mkdir()
    cache = {"TIERCEL_CACHE_DIR": str(folder / "cache"), "CUDA_HOME": str(cuda)}
    torchs = {"TORCH_CUDA_ARCH_LIST": "9.0a", "CUDA_HOME": str(cuda)}
    build = (folder / "extension.cu", folder / "build")
    return {
        WAYS[0]: [seconds(OURS, folder / "twice.cu", **cache) for _ in range(2)],
        WAYS[1]: [seconds(TORCHS, *build, **torchs) for _ in range(2)],
    }


def rendered(found: dict) -> str:
    lines = [
        f"{found['cpus']} CPUs ({found['cpu']}), {found['nvcc']}, PyTorch {found['torch']}, "
        f"{found['date']}, rounds: {found['rounds']}, the least. Load by others before it "
        f"began: {found['load']}, which lengthens seconds, not CPU seconds:\n",
        "| one kernel, compiled for sm_90a | first, s | CPU s | again, in a new process, s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way in WAYS:
        (first, cpu), (again, _) = found["took"][way]
        lines.append(f"| `{way}` | {first:.2f} | {cpu:.2f} | {again:.3f} |")
    clock, cpu = found["ratios"]
    lines += [
        "",
        f"The first time takes {cpu:.0f} times less CPU, {clock:.0f} times less by the clock.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into docs/")
    args = parser.parse_args()
    import torch

    found = figures.machine() | {"nvcc": "CUDA 13.0", "torch": torch.__version__}
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        cuda = toolkit(Path(name, "cuda"))
        for number in range(args.rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            rounds.append(round_of(folder, cuda))
            print(rounds[-1], flush=True)
    found["rounds"] = args.rounds
    found["took"] = {
        way: [
            [round(min(one[way][n][clock] for one in rounds), 4) for clock in range(2)]
            for n in range(2)
        ]
        for way in WAYS
    }
    ours, torchs = (found["took"][way][0] for way in WAYS)
    found["ratios"] = [round(b / a, 1) for a, b in zip(ours, torchs, strict=True)]
    print(rendered(found))
    if args.write:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        PAGE.write_text(figures.page(PAGE.read_text(), SCRIPT, rendered(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
