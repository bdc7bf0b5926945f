# SPDX-License-Identifier: Apache-2.0
"""The lines that tell what is wrong in the logs of CUDA builds and runs, and what mends it.

A pattern is searched in pieces of lines, which anyone may have written: no repetition in it is
without a bound.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tiercel.workbench.doctor import RED, YELLOW


@dataclass(frozen=True)
class Kind:
    """A usual failure and the line that tells it.

    Args:
        name: Its name.
        pattern: A regular expression for its line.
        means: The line in plain words.
        do: The mend, commands where there are some.
        level: red for a failure, yellow for something that only takes longer.
        applies: Tells whether a match counts.
        rest: Counts only where no other failure fits the line.
    """

    name: str
    pattern: str
    means: str
    do: str
    level: str = RED
    applies: Callable[["re.Match[str]"], bool] = lambda match: True
    rest: bool = False


def _many_archs(match: "re.Match[str]") -> bool:
    return len(set(re.findall(r"-gencode[= ]\s?\"?'?arch=(compute_\w{1,8})", match.string))) > 1


def _no_hits(match: "re.Match[str]") -> bool:
    """True if ccache's statistics show requests and next to no hits."""
    try:
        return float(match["percent"]) < 10
    except ValueError:
        return False


_HEADER = r"fatal error: '?{0}'?(?:: No such file or directory| file not found)"
_SOURCE = r'|(?:cannot|could not) open source file "{0}"'


def _missing(names: str) -> str:
    """The words of gcc, clang and nvcc for a header that is not found."""
    return _HEADER.format(names) + _SOURCE.format(names)


KINDS = (
    Kind(
        "driver too old",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|provided PTX was compiled with an unsupported toolchain"
        r"|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        r"|the NVIDIA driver supports CUDA [\d.]{1,12}, tiercel needs",
        "the driver is older than the CUDA that the code was built with",
        "install a newer NVIDIA driver (R580 or newer for CUDA 13); in a container, on the host. "
        "For data-centre GPUs NVIDIA has cuda-compat-13-x packages for older drivers: something "
        "to try, not tested by us",
    ),
    Kind(
        "CUDA not available",
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available"
        r"|CUDA is not available(?!, (?:skipping|not building|disabling))"
        r"|no CUDA-capable device is detected|Found no NVIDIA driver on your system"
        r"|torch\.cuda\.is_available\(\) (?:is|returned) False|No CUDA runtime is found"
        r"|libcuda\.so\.1: cannot open shared object file",
        "PyTorch is a CPU build, or the process sees no driver or no GPU",
        "tiercel doctor; nvidia-smi; python -c 'import torch; print(torch.version.cuda)'; for a "
        "build without a GPU set TORCH_CUDA_ARCH_LIST=9.0a and FORCE_CUDA=1",
    ),
    Kind(
        "built without its CUDA code",
        r"CUDA (?:is )?not available, (?:skipping|not building|disabling)"
        r"|[Ss]kipping (?:the )?(?:build of )?CUDA (?:extension|kernel|build|op)",
        "the build saw no CUDA and left its kernels out: it installs, and fails when it is used",
        "a CUDA build of PyTorch and CUDA_HOME where it is built; FORCE_CUDA=1 and "
        "TORCH_CUDA_ARCH_LIST=9.0a where that machine has no GPU; then build it again",
    ),
    Kind(
        "NVSwitch not started",
        r"[Ee]rror 802\b|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY"
        r"|cudaErrorSystemNotReady",
        "the GPUs of a machine with NVSwitch wait for NVIDIA's fabric manager",
        "on the host: systemctl status nvidia-fabricmanager; its version must be the driver's",
    ),
    Kind(
        "GPU not supported by PyTorch",
        r"with CUDA capability sm_\d{1,4}a? is not compatible"
        r"|which is of cuda capability \d{1,3}\.\d|no longer supports this GPU because it is too"
        r"|CUDA capabilities sm_[\w ]{1,200}\. If you want to use",
        "this build of PyTorch has no code for this GPU",
        "a build of PyTorch for it: a newer one for a newer GPU, an older one (or one for an older "
        "CUDA) for an older GPU; pytorch.org has the list",
    ),
    Kind(
        "nvcc not found",
        r"CUDA_HOME environment variable is not set|nvcc: (?:command )?not found"
        r"|No such file or directory: '[^'\n]{0,400}nvcc'|Could not find nvcc|Failed to find nvcc"
        r"|CMAKE_CUDA_COMPILER(?:-NOTFOUND| could be found)|Could NOT find CUDA"
        r"|No CMAKE_CUDA_COMPILER",
        "there is no CUDA compiler where the build looks for it",
        "export CUDA_HOME=/usr/local/cuda; export PATH=$CUDA_HOME/bin:$PATH, or "
        "pip install 'tiercel[jit]'",
    ),
    Kind(
        "unsupported architecture",
        r"Unsupported gpu architecture|is not defined for option 'gpu-(?:name|architecture)'"
        r"|Unknown CUDA arch|CUDA_ARCHITECTURES[^\n]{0,200}?(?:invalid|not supported)"
        r"|--gpu-architecture[^\n]{0,200}? is not supported|unsupported arch",
        "this compiler does not know the GPU architecture that it was told",
        "export TORCH_CUDA_ARCH_LIST=9.0a for H100 and H200; sm_90a wants nvcc 12.0 or newer",
    ),
    Kind(
        "sm_90 without its a",
        r"(?:wgmma|setmaxnreg|tcgen05)[^\n]{0,120}?(?:not supported on|cannot be compiled for)"
        r"|requires \.target sm_\d{1,4}a"
        r"|Arch conditional MMA instruction used without targeting",
        "Hopper's own instructions are only in the target sm_90a, and this is sm_90",
        "export TORCH_CUDA_ARCH_LIST=9.0a (with nvcc: -gencode arch=compute_90a,code=sm_90a)",
    ),
    Kind(
        "no kernel image",
        r"no kernel image is available for execution|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|cudaErrorNoKernelImageForDevice",
        "the library holds no code for this GPU: it was built for other architectures",
        "build it again with TORCH_CUDA_ARCH_LIST=9.0a; cuobjdump --list-elf FILE.so says what "
        "is in it",
    ),
    Kind(
        "undefined symbol",
        r"undefined symbol: (?P<symbol>\S)",
        "the extension was built against another PyTorch than the one that loads it",
        "build it again for the installed PyTorch: pip install --no-build-isolation "
        "--force-reinstall --no-cache-dir .; remove its old build folder",
    ),
    Kind(
        "library of another CUDA",
        r"lib(?:cudart|cublas|cublasLt|cudnn|cudnn_\w{1,40}|cufft|curand|cusolver|cusparse"
        r"|cusparseLt|nvrtc|nvJitLink|nvToolsExt|nccl|nvrtc-builtins|cupti)\.so[.\d]{0,16}"
        r": cannot open shared object file",
        "an extension was built for another CUDA than the installed one, whose library has "
        "another number, or it is loaded before PyTorch, which brings these libraries",
        "a build of it for the CUDA in torch.version.cuda, or build it here (pip install "
        "--no-build-isolation --no-cache-dir); import torch before it",
    ),
    Kind(
        "PyTorch's libraries not found",
        r"lib(?:c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python)\.so[.\d]{0,16}"
        r": cannot open shared object file",
        "the extension needs PyTorch's libraries and was loaded before them",
        "import torch before it",
    ),
    Kind(
        "no PyTorch in the build",
        r"No module named '?torch'?(?![\w.])",
        "pip builds in an environment of its own, which has no PyTorch, or none is installed",
        "pip install torch, then pip install --no-build-isolation .",
    ),
    Kind(
        "package of another version",
        r"cannot import name '[^'\n]{1,200}' from",
        "two packages do not fit together: one wants what the other does not have yet, or any more",
        "pip check; install both anew, in the versions that go together; a file of your own may "
        "have a package's name",
    ),
    Kind(
        "other CUDA than PyTorch's",
        r"detected CUDA version \([\d.]{1,12}\) mismatches|CUDA version mismatch",
        "nvcc's major version is not that of PyTorch",
        "export CUDA_HOME of the version in torch.version.cuda",
    ),
    Kind(
        "host compiler too new",
        r"unsupported GNU version|gcc versions later than \d{1,3} are not supported"
        r"|unsupported (?:clang|Microsoft Visual Studio) version"
        r"|is greater than the maximum required version",
        "nvcc does not accept this C++ compiler",
        "apt-get install g++-12; export CXX=g++-12 NVCC_PREPEND_FLAGS='-ccbin g++-12'",
    ),
    Kind(
        "host compiler too old",
        r"too old version of GCC|We need GCC \d{1,2} or later"
        r"|is less than the minimum required version|C\+\+\d\d or later compatible compiler is"
        r"|unrecognized command[ -]line option ['\"\u2018]-std="
        r"|You need C\+\+\d\d to compile|nvcc[^\n]{0,80}unsupported C\+\+\d\d"
        r"|" + _missing(r"(?:filesystem|charconv|span|concepts|optional|variant|string_view)"),
        "this C++ compiler is older than the C++ of PyTorch's headers",
        "apt-get install g++-12 (RHEL: dnf install gcc-toolset-12); export CC=gcc-12 CXX=g++-12 "
        "NVCC_PREPEND_FLAGS='-ccbin g++-12'",
    ),
    Kind(
        "out of memory while compiling",
        r"Killed signal terminated program|fatal error: Killed|virtual memory exhausted"
        r"|(?:cicc|ptxas|cudafe\+\+|cc1plus|nvlink)[^\s]{0,8} died (?:due to|with) signal 9\b"
        r"|died due to signal 9\b"
        r"|signal 9 \(Kill|std::bad_alloc|LLVM ERROR: out of memory|oom-kill"
        r"|c(?:c1plus|icc): out of memory|Signals\.SIGKILL"
        r"|OOMKilled|^\s{0,16}Killed\s{0,4}$|line \d{1,9}:\s{1,8}\d{1,9} Killed\s|\] Killed\s{0,4}$"
        r"|Killed \(program "
        r"|(?:posix_spawn|fork|vfork|execvp?|clone)\W[^\n]{0,60}Cannot allocate memory"
        r"|\[Errno 12\] Cannot allocate memory|fork: retry: Resource temporarily unavailable"
        r"|(?:exit(?:ed)?(?: with)?|returned(?: a)?(?: non-zero)?)"
        r"(?: exit)?(?: code| status)?:? (?:137|-9)\b|\] Error 137\b",
        "the machine, or the container at its limit, had no memory left: mostly too many "
        "compilations at once",
        "export MAX_JOBS=N with about 4 GB for each (tiercel doctor says N); NVCC_THREADS=1",
    ),
    Kind(
        "compiler crashed",
        r"died (?:due to|with) signal (?!9\b)\d|internal compiler error|died with status 0x"
        r"|Signals\.SIGSEGV|signal 11 \(|PLEASE submit a bug report to"
        r"|Segmentation fault[^\n]{0,80}(?:cicc|ptxas|nvcc|cc1plus|cudafe)"
        r"|(?:cicc|ptxas|nvcc|cc1plus|cudafe\+\+)[^\n]{0,80}Segmentation fault"
        r"|terminated by signal SIGSEGV",
        "the compiler itself has a fault, or a damaged file; it is not short of memory",
        "run it once more: if it stays, another CUDA 12 or 13 release, ulimit -s unlimited, or "
        "less in that file; if it moves from file to file, look at the machine's memory",
    ),
    Kind(
        "out of GPU memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
        "a program asked for more memory than the GPU has left",
        "nvidia-smi shows who holds it; smaller batches; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    Kind(
        "disk full",
        r"No space left on device",
        "a disk is full",
        "df -h; TMPDIR=FOLDER and TORCH_EXTENSIONS_DIR=FOLDER on another disk; tiercel cache prune",
    ),
    Kind(
        "older C library",
        r"version `?(?:GLIBC|GLIBCXX|CXXABI)_[\d.]{1,12}'? not found",
        "the library was built on a newer system than this one",
        "build it here, or on a system as old; a newer libstdc++: apt-get install libstdc++6",
    ),
    Kind(
        "no Python headers",
        _missing(r"(?:[\w./]{0,60}/)?Python\.h"),
        "the headers of Python are not installed",
        "apt-get install python3-dev, or a Python from pyenv or uv, which has them",
    ),
    Kind(
        "no CUTLASS headers",
        _missing(r"(?:cutlass|cute)/[\w./]{1,120}") + "|" + _missing(r"cutlass\.h"),
        "CUTLASS, which is headers only, is not where the build looks for it",
        "git submodule update --init --recursive in the project; or git clone "
        "https://github.com/NVIDIA/cutlass and CPATH=FOLDER/include:FOLDER/tools/util/include",
    ),
    Kind(
        "no CUDA headers",
        _missing(
            r"(?:(?:cuda|cublas|cublasLt|cusparse|cusolver\w{0,4}|curand|cufft|nvrtc|nvml|nvtx3?|thrust"
            r"|cub|cooperative_groups|nvToolsExt|device_launch|vector_types|driver_types|crt|math_const"
            r"|cudnn|nccl)[\w./]{0,120})"
        ),
        "the compiler finds no headers of CUDA (cuDNN's and NCCL's come in packages of their own)",
        "export CUDA_HOME=/usr/local/cuda; export CPATH=$CUDA_HOME/include:$CPATH; or install what "
        "is missing: apt-get install cuda-cudart-dev-13-0 cuda-cccl-13-0 libcublas-dev-13-0",
    ),
    Kind(
        "missing header",
        _missing(r"[^\s'\":]{1,200}"),
        "a header that the source includes is not where the compiler looks",
        "the -dev package that has it, or its folder by CPATH=FOLDER; of a submodule: "
        "git submodule update --init --recursive",
        rest=True,
    ),
    Kind(
        "no ccache",
        r"ccache: (?:command )?not found|No such file or directory: '[^'\n]{0,400}ccache'"
        r"|ccache: No such file or directory|ccache\" is not a full path",
        "a setting puts ccache before the compiler, and it is not installed",
        "apt-get install ccache; or unset PYTORCH_NVCC CMAKE_CXX_COMPILER_LAUNCHER "
        "CMAKE_CUDA_COMPILER_LAUNCHER, and CXX where it says ccache",
    ),
    Kind(
        "fork after CUDA",
        r"Cannot re-initialize CUDA in forked subprocess|CUDA cannot be used in a forked child",
        "the driver does not work in a child that was forked after CUDA was used",
        "torch.multiprocessing.set_start_method('spawn')",
    ),
    Kind(
        "error in the source",
        r"\.(?:cu|cuh|cpp|cc|cxx|c|h|hpp|inl|inc)(?:\(\d{1,7}\)|:\d{1,7}(?::\d{1,6})?):"
        r" {0,2}(?:fatal )?error\b|\bptxas [^\n]{0,200}?\berror {0,4}:|^nvcc error {0,4}:"
        r"|^\s{0,8}error: static assertion failed|\d{1,6} errors? detected in the compilation of",
        "the compiler does not take the source; the first such line counts, the others mostly "
        "follow from it",
        "mend that line. Source that compiled elsewhere: another CUDA, PyTorch or C++ standard "
        "(-std=c++17), or headers of another version",
        rest=True,
    ),
    Kind(
        "no ninja",
        r"we could not find ninja|Ninja is required to load C\+\+ extensions|slow distutils backend"
        r"|ninja: (?:command )?not found",
        "PyTorch compiles file by file, or not at all",
        "pip install ninja",
        YELLOW,
    ),
    Kind(
        "many architectures",
        r"-gencode",
        "each file is compiled once for every -gencode",
        "export TORCH_CUDA_ARCH_LIST=9.0a (CMake: -DCMAKE_CUDA_ARCHITECTURES=90a)",
        YELLOW,
        _many_archs,
    ),
    Kind(
        "architecture not pinned",
        r"TORCH_CUDA_ARCH_LIST is not set",
        "PyTorch compiles for every GPU that it sees, or for all that it knows",
        "export TORCH_CUDA_ARCH_LIST=9.0a",
        YELLOW,
    ),
    Kind(
        "jobs not set",
        r"Allowing ninja to set a default number of workers",
        "ninja starts a job for each CPU, whatever memory there is",
        "export MAX_JOBS=N (tiercel doctor says N)",
        YELLOW,
    ),
    Kind(
        "no cache hits",
        r"(?:[Cc]ache hit rate\s{1,60}"
        r"|^\s{0,40}[Hh]its:\s{1,60}\d{1,12}\s{0,8}/\s{0,8}[1-9]\d{0,11}\s{0,8}\(\s{0,8})(?P<percent>[\d.]{1,8})\s{0,4}%",
        "ccache found next to nothing: it is new, too small, or the commands differ each time",
        "ccache -M 20G; export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1; build in one folder that "
        "stays (pip install --no-build-isolation)",
        YELLOW,
        _no_hits,
    ),
)

# One of a kind's words is in every line that its pattern fits. They are looked for first: most
# lines have none.
WORDS = {
    "driver too old": ("driver", "unsupported toolchain", "DRIVER_MISMATCH"),
    "CUDA not available": ("CUDA", "NVIDIA driver", "is_available", "libcuda.so.1"),
    "built without its CUDA code": ("CUDA",),
    "NVSwitch not started": (
        "rror 802",
        "not yet initialized",
        "SYSTEM_NOT_READY",
        "SystemNotReady",
    ),
    "GPU not supported by PyTorch": ("capabilit", "no longer supports"),
    "nvcc not found": ("CUDA_HOME", "nvcc", "CMAKE_CUDA_COMPILER", "find CUDA"),
    "unsupported architecture": (
        "nsupported",
        "not defined",
        "Unknown CUDA",
        "CUDA_ARCHITECTURES",
        "--gpu-architecture",
    ),
    "sm_90 without its a": (
        "not supported on",
        "cannot be compiled",
        "requires",
        "Arch conditional",
    ),
    "no kernel image": ("no kernel image", "NO_BINARY_FOR_GPU", "NoKernelImage"),
    "undefined symbol": ("undefined symbol",),
    "library of another CUDA": ("cannot open shared object",),
    "PyTorch's libraries not found": ("cannot open shared object",),
    "no PyTorch in the build": ("No module named",),
    "package of another version": ("cannot import name",),
    "other CUDA than PyTorch's": ("mismatch",),
    "host compiler too new": ("unsupported", "not supported", "maximum required"),
    "host compiler too old": (
        "GCC",
        "required",
        "compatible compiler",
        "line option",
        "You need C++",
        "unsupported C++",
        "fatal error",
        "open source file",
    ),
    "out of memory while compiling": (
        "Killed",
        "exhausted",
        "died ",
        "signal 9",
        "bad_alloc",
        "out of memory",
        "oom-kill",
        "SIGKILL",
        "Cannot allocate",
        "fork: retry",
        "137",
        " -9",
        ":-9",
        "(program ",
    ),
    "compiler crashed": (
        "died ",
        "internal compiler",
        "SIGSEGV",
        "signal 11",
        "submit a bug",
        "Segmentation",
    ),
    "out of GPU memory": ("CUDA out of memory", "OutOfMemory", "OUT_OF_MEMORY"),
    "disk full": ("No space left",),
    "older C library": ("not found",),
    "no Python headers": ("Python.h",),
    "no CUTLASS headers": ("cut",),
    "no CUDA headers": ("fatal error", "open source file"),
    "missing header": ("fatal error", "open source file"),
    "no ccache": ("ccache",),
    "fork after CUDA": ("forked",),
    "error in the source": ("error",),
    "no ninja": ("ninja", "Ninja", "distutils"),
    "many architectures": ("-gencode",),
    "architecture not pinned": ("TORCH_CUDA_ARCH_LIST",),
    "jobs not set": ("Allowing ninja",),
    "no cache hits": ("hit rate", "its:"),
}
