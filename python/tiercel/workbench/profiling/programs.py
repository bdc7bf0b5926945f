# SPDX-License-Identifier: Apache-2.0
"""Finds the profilers on this machine, or says how to get them."""

import os
import shutil
from pathlib import Path

from tiercel.workbench.profiling import ProfileError

_GET = {
    "ncu": "Nsight Compute: apt-get install nsight-compute, or it comes with the CUDA toolkit",
    "nsys": "Nsight Systems: apt-get install nsight-systems, or it comes with the CUDA toolkit",
    "compute-sanitizer": "it comes with the CUDA toolkit: apt-get install cuda-sanitizer-13-0",
}
_ELSEWHERE = {
    "ncu": ("nsight-compute/*/ncu",),
    "nsys": ("nsight-systems/*/bin/nsys", "nsight-systems/*/target-linux-x64/nsys"),
    "compute-sanitizer": (),
}


def find(name: str, opt: Path = Path("/opt/nvidia")) -> str:
    """PATH, then the CUDA toolkit, then where the packages put them; the newest."""
    found = shutil.which(name)
    if found:
        return found
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    for home in [*filter(None, homes), "/usr/local/cuda"]:
        path = Path(home, "bin", name)
        if os.access(path, os.X_OK):
            return str(path)
    for pattern in _ELSEWHERE[name]:
        paths = [path for path in sorted(opt.glob(pattern)) if os.access(path, os.X_OK)]
        if paths:
            return str(paths[-1])
    raise ProfileError(f"{name} not found (PATH, CUDA_HOME/bin, {opt}). {_GET[name]}")
