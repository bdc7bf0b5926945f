#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the first compile of a one-kernel file takes, and the same again in a new process.

python benchmarks/first_compile.py [--torch] [--out FILE]

Needs nvcc, no GPU. With --torch also torch.utils.cpp_extension.load of the same kernel behind a
pybind11 function, which is what people write; that needs ninja and PyTorch. Nothing is cached.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
OURS = """
import sys, time
import tiercel.jit, tiercel.jit.kernel
start = time.perf_counter()
report = tiercel.jit.cuda(sys.argv[1], "twice", arch="sm_90a").compile()
print(time.perf_counter() - start)
"""
TORCHS = """
import sys, time
from torch.utils import cpp_extension
start = time.perf_counter()
cpp_extension.load("twice", [sys.argv[1]], build_directory=sys.argv[2], extra_cuda_cflags=["-O3"])
print(time.perf_counter() - start)
"""


def seconds(code, *args, **env):
    command = [sys.executable, "-c", code, *map(str, args)]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    return float(result.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="store_true", help="PyTorch's way too")
    parser.add_argument("--out", type=Path, help="write JSON there")
    args = parser.parse_args()

    def keep(what, value):
        found[what] = value
        print(f"{what:34} {value:.3f} s", flush=True)

    found = {"date": time.strftime("%Y-%m-%d"), "cpus": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "twice.cu").write_text(KERNEL)
        (folder / "extension.cu").write_text(KERNEL + BINDING)
        (folder / "build").mkdir()
        source, cache = folder / "twice.cu", {"TIERCEL_CACHE_DIR": str(folder / "cache")}
        keep("tiercel.jit.cuda, first", seconds(OURS, source, **cache))
        keep("tiercel.jit.cuda, new process", seconds(OURS, source, **cache))
        if args.torch:
            arch = {"TORCH_CUDA_ARCH_LIST": "9.0a"}
            build = (folder / "extension.cu", folder / "build")
            keep("cpp_extension.load, first", seconds(TORCHS, *build, **arch))
            keep("cpp_extension.load, new process", seconds(TORCHS, *build, **arch))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
