# SPDX-License-Identifier: Apache-2.0
"""The usual failures of CUDA builds and runs, and what makes builds slow, by their logs."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tiercel.doctor import RED, YELLOW


@dataclass(frozen=True)
class Finding:
    """What a line of a log means: the first such line, and how many there were."""

    name: str
    level: str  # red: a failure, yellow: it only takes longer
    line: int
    seen: str
    means: str
    do: str
    count: int = 1


@dataclass(frozen=True)
class _Kind:
    name: str
    pattern: str
    means: str
    do: str
    level: str = RED
    applies: Callable[["re.Match[str]"], bool] = lambda match: True


def _many_archs(match: "re.Match[str]") -> bool:
    return len(set(re.findall(r"-gencode[= ]\s*\"?'?arch=(compute_\w+)", match.string))) > 1


def _no_hits(match: "re.Match[str]") -> bool:
    """Of ccache's statistics: something was asked for, and next to nothing was found."""
    return float(match["percent"]) < 10


_KINDS = (
    _Kind(
        "driver too old",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|provided PTX was compiled with an unsupported toolchain"
        r"|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        r"|the NVIDIA driver supports CUDA [\d.]+, tiercel needs",
        "the driver is older than the CUDA that the code was built with",
        "install a newer NVIDIA driver (R580 or newer for CUDA 13); in a container, on the host",
    ),
    _Kind(
        "CUDA not available",
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|CUDA is not available"
        r"|no CUDA-capable device is detected|Found no NVIDIA driver on your system"
        r"|torch\.cuda\.is_available\(\) (?:is|returned) False|No CUDA runtime is found",
        "PyTorch is a CPU build, or the process sees no driver or no GPU",
        "tiercel doctor; nvidia-smi; python -c 'import torch; print(torch.version.cuda)'; for a "
        "build without a GPU set TORCH_CUDA_ARCH_LIST=9.0a and FORCE_CUDA=1",
    ),
    _Kind(
        "nvcc not found",
        r"CUDA_HOME environment variable is not set|nvcc: (?:command )?not found"
        r"|No such file or directory: '[^']*nvcc'|Could not find nvcc|Failed to find nvcc"
        r"|CMAKE_CUDA_COMPILER(?:-NOTFOUND| could be found)|Could NOT find CUDA"
        r"|No CMAKE_CUDA_COMPILER",
        "there is no CUDA compiler where the build looks for it",
        "export CUDA_HOME=/usr/local/cuda PATH=$CUDA_HOME/bin:$PATH, or pip install 'tiercel[jit]'",
    ),
    _Kind(
        "unsupported architecture",
        r"Unsupported gpu architecture|is not defined for option 'gpu-(?:name|architecture)'"
        r"|Unknown CUDA arch|CUDA_ARCHITECTURES.*(?:invalid|not supported)"
        r"|--gpu-architecture.*is not supported|unsupported arch",
        "this compiler does not know the GPU architecture that it was told",
        "export TORCH_CUDA_ARCH_LIST=9.0a for H100 and H200; sm_90a wants nvcc 12.0 or newer",
    ),
    _Kind(
        "sm_90 without its a",
        r"(?:wgmma|setmaxnreg|tcgen05)\S*.*(?:not supported on|cannot be compiled for)"
        r"|requires \.target sm_\d+a|Arch conditional MMA instruction used without targeting",
        "Hopper's own instructions are only in the target sm_90a, and this is sm_90",
        "export TORCH_CUDA_ARCH_LIST=9.0a (with nvcc: -gencode arch=compute_90a,code=sm_90a)",
    ),
    _Kind(
        "no kernel image",
        r"no kernel image is available for execution|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|cudaErrorNoKernelImageForDevice",
        "the library holds no code for this GPU: it was built for other architectures",
        "build it again with TORCH_CUDA_ARCH_LIST=9.0a; cuobjdump --list-elf FILE.so says what "
        "is in it",
    ),
    _Kind(
        "undefined symbol",
        r"undefined symbol: (?P<symbol>\S+)",
        "the extension was built against another PyTorch than the one that loads it",
        "build it again for the installed PyTorch: pip install --no-build-isolation "
        "--force-reinstall --no-cache-dir .; remove its old build folder",
    ),
    _Kind(
        "other CUDA than PyTorch's",
        r"detected CUDA version \([\d.]+\) mismatches|CUDA version mismatch",
        "nvcc's major version is not that of PyTorch",
        "export CUDA_HOME of the version in torch.version.cuda",
    ),
    _Kind(
        "host compiler too new",
        r"unsupported GNU version|gcc versions later than \d+ are not supported"
        r"|unsupported (?:clang|Microsoft Visual Studio) version",
        "nvcc does not accept this C++ compiler",
        "apt-get install g++-12; export CXX=g++-12 NVCC_PREPEND_FLAGS='-ccbin g++-12'",
    ),
    _Kind(
        "out of memory while compiling",
        r"Killed signal terminated program|fatal error: Killed|virtual memory exhausted"
        r"|(?:cicc|ptxas|cudafe\+\+|cc1plus)\S* died (?:due to|with) signal|died due to signal 9"
        r"|signal 9 \(Kill|std::bad_alloc|LLVM ERROR: out of memory|exit code -9|oom-kill"
        r"|c(?:c1plus|icc): out of memory",
        "too many compilations at once for this machine's memory",
        "export MAX_JOBS=N with about 4 GB for each (tiercel doctor says N); NVCC_THREADS=1",
    ),
    _Kind(
        "out of GPU memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
        "a program asked for more memory than the GPU has left",
        "nvidia-smi shows who holds it; smaller batches; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    _Kind(
        "disk full",
        r"No space left on device",
        "a disk is full",
        "df -h; TMPDIR=FOLDER and TORCH_EXTENSIONS_DIR=FOLDER on another disk; tiercel cache prune",
    ),
    _Kind(
        "older C library",
        r"version `?(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+'? not found",
        "the library was built on a newer system than this one",
        "build it here, or on a system as old; a newer libstdc++: apt-get install libstdc++6",
    ),
    _Kind(
        "no Python headers",
        r"Python\.h: No such file or directory",
        "the headers of Python are not installed",
        "apt-get install python3-dev, or a Python from pyenv or uv, which has them",
    ),
    _Kind(
        "fork after CUDA",
        r"Cannot re-initialize CUDA in forked subprocess|CUDA cannot be used in a forked child",
        "the driver does not work in a child that was forked after CUDA was used",
        "torch.multiprocessing.set_start_method('spawn')",
    ),
    _Kind(
        "no ninja",
        r"we could not find ninja|Ninja is required to load C\+\+ extensions|slow distutils backend"
        r"|ninja: (?:command )?not found",
        "PyTorch compiles file by file, or not at all",
        "pip install ninja",
        YELLOW,
    ),
    _Kind(
        "many architectures",
        r"-gencode",
        "each file is compiled once for every -gencode",
        "export TORCH_CUDA_ARCH_LIST=9.0a (CMake: -DCMAKE_CUDA_ARCHITECTURES=90a)",
        YELLOW,
        _many_archs,
    ),
    _Kind(
        "architecture not pinned",
        r"TORCH_CUDA_ARCH_LIST is not set, all archs|TORCH_CUDA_ARCH_LIST is not set",
        "PyTorch compiles for every GPU that it sees, or for all that it knows",
        "export TORCH_CUDA_ARCH_LIST=9.0a",
        YELLOW,
    ),
    _Kind(
        "jobs not set",
        r"Allowing ninja to set a default number of workers",
        "ninja starts a job for each CPU, whatever memory there is",
        "export MAX_JOBS=N (tiercel doctor says N)",
        YELLOW,
    ),
    _Kind(
        "no cache hits",
        r"(?i)(?:cache hit rate\s+|^\s*hits:\s+\d+\s*/\s*[1-9]\d*\s*\(\s*)(?P<percent>[\d.]+)\s*%",
        "ccache found next to nothing: it is new, too small, or the commands differ each time",
        "ccache -M 20G; export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1; build in one folder that "
        "stays (pip install --no-build-isolation)",
        YELLOW,
        _no_hits,
    ),
)
_PATTERNS = [(kind, re.compile(kind.pattern)) for kind in _KINDS]


def diagnose(lines: Iterable[str]) -> list[Finding]:
    """Each kind once, by its first line; failures first."""
    found: dict[str, Finding] = {}
    for number, line in enumerate(lines, 1):
        for kind, pattern in _PATTERNS:
            match = pattern.search(line)
            if match is None or not kind.applies(match):
                continue
            if kind.name in found:
                earlier = found[kind.name]
                found[kind.name] = replace(earlier, count=earlier.count + 1)
            else:
                seen = _shortened(line, match.start())
                facts = (kind.name, kind.level, number, seen, kind.means, kind.do)
                found[kind.name] = Finding(*facts)
    return sorted(found.values(), key=lambda f: (f.level != RED, f.line))


def _shortened(line: str, start: int, width: int = 160) -> str:
    text = line.rstrip()
    if len(text) <= width:
        return text.strip()
    first = max(min(start - width // 4, len(text) - width), 0)
    return f"{'...' if first else ''}{text[first : first + width].strip()}..."


def as_text(found: list[Finding], name: str) -> str:
    if not found:
        return f"{name}: none of the usual failures. What came first is most telling, not last."
    parts = []
    for finding in found:
        times = f", {finding.count} times" if finding.count > 1 else ""
        parts.append(
            f"{finding.level:<6}  {finding.name} (line {finding.line}{times})\n"
            f"        {finding.seen}\n"
            f"        means: {finding.means}\n"
            f"        do:    {finding.do}"
        )
    return "\n\n".join(parts)
