# SPDX-License-Identifier: Apache-2.0
"""Facts to findings: what is well, what is missing, and the command that mends it."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.workbench.doctor import GREEN, RED, YELLOW, Check
from tiercel.workbench.doctor.tools import JOB_BYTES, jobs

Facts = Mapping[str, Any]
ARCH = "9.0a"  # as PyTorch spells what the kernels are built for
DSL = "4.8.1"
_NAMED = {"hopper": "9.0"}  # names that TORCH_CUDA_ARCH_LIST may have
_FREE_BYTES = 2 << 30
_DRIVER = "install the NVIDIA driver R580 or newer; a container: start it with --gpus all"
# NVIDIA's forward compatibility; nobody here has run the kernels on it.
_COMPAT = (
    "; or, for a data-centre GPU and not tested by us, NVIDIA's cuda-compat-13-x package: apt-get "
    "install cuda-compat-13-0; export LD_LIBRARY_PATH=/usr/local/cuda-13.0/compat:$LD_LIBRARY_PATH"
)


def runtime(facts: Facts) -> list[Check]:
    """Checks of the needs of the precompiled kernels."""
    return [_python(facts), _wheel(facts), _torch(facts), _driver(facts), _gpu(facts), _run(facts)]


def development(facts: Facts, tools: Facts) -> list[Check]:
    """Checks of the needs of compiling your own kernels, and of what makes it fast."""
    return [
        _nvcc(facts, tools),
        _compiler(tools),
        _found(tools, "ninja", "without it PyTorch compiles file by file", "pip install ninja"),
        _found(tools, "ccache", "every build compiles anew", "apt-get install ccache"),
        _dsl(tools),
        _arch(facts, tools),
        _jobs(tools),
        *_caches(tools),
    ]


def _python(facts: Facts) -> Check:
    return Check("Python", GREEN, facts["python"])


def _wheel(facts: Facts) -> Check:
    if facts["machine"] != "linux x86_64":
        text = f"the wheels are for Linux on x86_64, this is {facts['machine']}"
        return Check("wheel", RED, text, "use a Linux machine with x86_64, or build from source")
    name, _, version = facts["libc"].partition(" ")
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name != "glibc" or number < (2, 34):
        text = f"the wheels need glibc 2.34 or newer, this is {facts['libc'] or 'another libc'}"
        return Check("wheel", RED, text, "use Debian 12, Ubuntu 22.04, RHEL 9 or newer")
    tag = f"{facts['wheel_tag']}-manylinux_2_34_x86_64 fits ({facts['libc']})"
    return Check("wheel", GREEN, tag)


def _torch(facts: Facts) -> Check:
    problem = facts["torch_problem"]
    if problem:
        reason, _, mend = problem.partition(": pip ")
        return Check("PyTorch", RED, reason, f"pip {mend}" if mend else "pip install -U torch")
    if facts["torch_hip"]:
        text = f"{facts['torch']} is for ROCm, the kernels are for NVIDIA GPUs"
        return Check("PyTorch", RED, text, "none: ops run on the `ref` backend here")
    if facts["torch_cuda"] is None:
        text = f"{facts['torch']} is built without CUDA"
        return Check("PyTorch", RED, text, "pip install --force-reinstall torch")
    return Check("PyTorch", GREEN, f"{facts['torch']}, CUDA {facts['torch_cuda']}")


def _driver(facts: Facts) -> Check:
    if facts["driver_problem"]:
        old = facts["driver_cuda"] is not None and float(facts["driver_cuda"]) < 13
        mend = _DRIVER + _COMPAT if old else _DRIVER
        return Check("driver", RED, facts["driver_problem"], mend)
    return Check("driver", GREEN, f"supports CUDA {facts['driver_cuda']}")


def _gpu(facts: Facts) -> Check:
    gpus = facts["gpus"]
    if not gpus:
        return Check("GPU", RED, "none found", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES")
    listed = ", ".join(
        f"{gpu['index']}: {gpu['name'] or 'name unknown'} ({gpu['capability']})" for gpu in gpus
    )
    if all(gpu["capability"] != "9.0" for gpu in gpus):
        text = f"{listed}: none has compute capability 9.0 (H100, H200)"
        return Check("GPU", RED, text, "none: ops run on the `ref` backend here")
    return Check("GPU", GREEN, listed)


def _run(facts: Facts) -> Check:
    if facts["sm90_kernels_run"]:
        return Check("sm90 kernels", GREEN, "run here")
    return Check("sm90 kernels", RED, f"do not run here: {facts['why_not']}", "see above")


def _nvcc(facts: Facts, tools: Facts) -> Check:
    found, cuda, named = tools["nvcc"], facts["torch_cuda"], tools.get("nvcc_missing") or {}
    if named:
        text = ", ".join(f"{name}={value}" for name, value in named.items())
        text += " has no nvcc that runs" + (f"; there is {found['path']}" if found else "")
        return Check("nvcc", YELLOW, text, _instead(named, found))
    if found is None:
        text = "not found: no CUDA C++ can be compiled here"
        mend = "pip install 'tiercel[jit]', or export CUDA_HOME=/usr/local/cuda where a toolkit is"
        return Check("nvcc", YELLOW, text, mend)
    text = f"{found['release']} ({found['path']})"
    if cuda and found["release"].split(".")[0] != cuda.split(".")[0]:
        text += f", but PyTorch is for CUDA {cuda}: its extensions refuse another major version"
        return Check("nvcc", YELLOW, text, f"export CUDA_HOME=/usr/local/cuda-{cuda}")
    return Check("nvcc", GREEN, text)


def _instead(named: Mapping[str, str], found: "Mapping[str, str] | None") -> str:
    """Exports and unsets that make builds take the nvcc that there is."""
    home = "" if found is None else str(Path(found["path"]).parents[1])
    words = []
    for name in named:
        value = found["path"] if found is not None and name == "CUDACXX" else home
        words.append(f"export {name}={shlex.quote(value)}" if value else f"unset {name}")
    return "; ".join(words)


def _compiler(tools: Facts) -> Check:
    if tools["cxx"] is None:
        return Check("C++ compiler", YELLOW, "not found", "apt-get install g++")
    return Check("C++ compiler", GREEN, tools["cxx"])


def _found(tools: Facts, name: str, without: str, mend: str) -> Check:
    if tools[name] is None:
        return Check(name, YELLOW, f"not found: {without}", mend)
    return Check(name, GREEN, tools[name])


def _dsl(tools: Facts) -> Check:
    version, mend = tools["cutlass_dsl"], f"pip install nvidia-cutlass-dsl=={DSL}"
    if version is None:
        return Check("CuTe DSL", YELLOW, "not installed: no DSL kernel can be compiled here", mend)
    target = tools["environment"].get("CUTE_DSL_ARCH", "sm_90a")
    if target != "sm_90a":
        text = f"{version}, and CUTE_DSL_ARCH={target} is not what H100 and H200 run"
        return Check("CuTe DSL", YELLOW, text, "export CUTE_DSL_ARCH=sm_90a")
    if version != DSL:
        return Check("CuTe DSL", YELLOW, f"{version}; {DSL} is the tested one", mend)
    return Check("CuTe DSL", GREEN, version)


def pinned(facts: Facts) -> str:
    """TORCH_CUDA_ARCH_LIST for the GPUs here: one arch."""
    found = {gpu["capability"] for gpu in facts["gpus"]}
    return ARCH if not found or "9.0" in found else max(found, key=float)


def _arch(facts: Facts, tools: Facts) -> Check:
    wanted = pinned(facts)
    mend = f"export TORCH_CUDA_ARCH_LIST={wanted}"
    name, value = "arch pinning", tools["environment"].get("TORCH_CUDA_ARCH_LIST")
    if value is None:
        text = "TORCH_CUDA_ARCH_LIST is not set: PyTorch compiles extensions for what it sees"
        return Check(name, YELLOW, text, mend)
    listed = [arch for arch in re.split(r"[;\s]+", value) if arch]
    have = {_NAMED.get(arch.lower(), arch).removesuffix("+PTX") for arch in listed}
    plain = wanted.rstrip("af")
    if wanted == plain:  # any of its variants will do
        have = {arch.rstrip("af") for arch in have}
    if wanted not in have and plain in have:
        text = f"{value!r} lacks the a of {wanted}: code for sm_90 has no wgmma and no setmaxnreg"
        return Check(name, YELLOW, text, mend)
    if wanted not in have:
        whose = "the GPU here" if facts["gpus"] else "what H100 and H200 run"
        return Check(name, YELLOW, f"{value!r} leaves out {wanted}, {whose}", mend)
    if len(listed) > 1 or value.endswith("+PTX"):
        text = f"{value!r}: each file is compiled {len(listed)} times"
        return Check(name, YELLOW, text + (", and PTX" if "+PTX" in value else ""), mend)
    return Check(name, GREEN, value)


def _jobs(tools: Facts) -> Check:
    fit = jobs(tools["cpus"], tools["memory"])
    have = f"{tools['cpus']} CPUs, {tools['memory'] / 2**30:.0f} GB free"
    value, mend = tools["environment"].get("MAX_JOBS"), f"export MAX_JOBS={fit}"
    if value is None:
        started = tools["cpus"] + 2  # ninja's own number
        if started * JOB_BYTES <= tools["memory"]:
            return Check(
                "MAX_JOBS", GREEN, f"not set, and {have} are enough for ninja's own number"
            )
        text = f"not set: ninja starts {started} at once, and {have} bear {fit}"
        return Check("MAX_JOBS", YELLOW, text, mend)
    if not value.isdigit() or int(value) < 1:
        return Check("MAX_JOBS", YELLOW, f"{value!r} is no number", mend)
    if int(value) > fit + 2:
        return Check("MAX_JOBS", YELLOW, f"{value}, and {have} bear {fit}", mend)
    if int(value) * 2 <= fit:
        return Check("MAX_JOBS", YELLOW, f"{value}, though {have} bear {fit}", mend)
    return Check("MAX_JOBS", GREEN, f"{value} ({have})")


def _caches(tools: Facts) -> list[Check]:
    found = []
    for name, cache in tools["caches"].items():
        folder, free = cache["folder"], cache["free"]
        if folder.startswith(("/tmp/", "/dev/shm/")):
            text = f"{folder} is gone after a restart"
            found.append(Check(f"cache: {name}", YELLOW, text, "choose a folder that stays"))
        elif free is not None and free < _FREE_BYTES:
            text = f"{folder}: {free / 2**30:.1f} GB free" if free else f"{folder} is not writable"
            mend = "tiercel cache prune" if name == "tiercel" else f"df -h {folder}"
            found.append(Check(f"cache: {name}", YELLOW, text, mend))
        else:
            found.append(Check(f"cache: {name}", GREEN, folder))
    return found
