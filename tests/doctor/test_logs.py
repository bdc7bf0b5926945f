# SPDX-License-Identifier: Apache-2.0
"""`tiercel doctor --log`: each of the usual failures by the words of those who print it."""

import pytest

from tiercel.workbench.doctor import logs

FAILURES = {
    "CUDA not available": [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an ...",
        "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
    ],
    "driver too old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
        "CUDA driver version is insufficient for CUDA runtime version",
        "CUDA error: the provided PTX was compiled with an unsupported toolchain.",
    ],
    "built without its CUDA code": [
        "CUDA not available, skipping CUDA extensions",
        "CUDA is not available, skipping the build of CUDA kernels",
        "Skipping CUDA extension build: no GPU was found.",
    ],
    "NVSwitch not started": [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet "
        "initialized (Triggered internally at CUDAFunctions.cpp:109.)",
        "RuntimeError: CUDA error: CUDA_ERROR_SYSTEM_NOT_READY",
    ],
    "GPU not supported by PyTorch": [
        "Tesla V100-SXM2-16GB with CUDA capability sm_70 is not compatible with the current "
        "PyTorch installation.",
        "Found GPU0 Tesla K80 which is of cuda capability 3.7.",
        "The current PyTorch install supports CUDA capabilities sm_75 sm_80 sm_90. If you want to "
        "use the Tesla V100 GPU with PyTorch, please check the instructions",
    ],
    "library of another CUDA": [
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "OSError: libcublas.so.12: cannot open shared object file: No such file or directory",
        "ImportError: libnvrtc.so.11.2: cannot open shared object file: No such file or directory",
    ],
    "PyTorch's libraries not found": [
        "ImportError: libc10.so: cannot open shared object file: No such file or directory",
        "ImportError: libtorch_cuda.so: cannot open shared object file: No such file or directory",
    ],
    "no PyTorch in the build": [
        "      ModuleNotFoundError: No module named 'torch'",
        "ModuleNotFoundError: No module named torch",
    ],
    "package of another version": [
        "ImportError: cannot import name 'custom_fwd' from 'torch.amp' (/v/torch/amp/__init__.py)",
        "ImportError: cannot import name 'GenerationMixin' from partially initialized module 'x'",
    ],
    "nvcc not found": [
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA root.",
        "/bin/sh: 1: nvcc: not found",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
        "  No CMAKE_CUDA_COMPILER could be found.",
    ],
    "unsupported architecture": [
        "nvcc fatal   : Unsupported gpu architecture 'compute_90a'",
        "ptxas fatal   : Value 'sm_90a' is not defined for option 'gpu-name'",
        "ValueError: Unknown CUDA arch (9.0b) or GPU not supported",
    ],
    "sm_90 without its a": [
        "ptxas x.ptx, line 91; error : Instruction 'wgmma.fence' not supported on .target 'sm_90'",
        "error : Feature 'wgmma' requires .target sm_90a",
    ],
    "no kernel image": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ],
    "undefined symbol": [
        "ImportError: /plugins/_C.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
    ],
    "other CUDA than PyTorch's": [
        "The detected CUDA version (12.4) mismatches the version that was used to compile PyTorch",
    ],
    "host compiler too new": [
        "#error -- unsupported GNU version! gcc versions later than 13 are not supported!",
    ],
    "host compiler too old": [
        "#error \"You're trying to build PyTorch with a too old version of GCC. We need GCC 9 or "
        'later."',
        "RuntimeError: The current installed version of g++ (4.8.5) is less than the minimum "
        "required version (6.0.0) by CUDA 12.4.",
        "c++: error: unrecognized command line option '-std=c++17'",
        "g++: error: unrecognized command-line option \u2018-std=c++20\u2019",
        "torch/all.h:4:2: error: #error C++17 or later compatible compiler is required to use "
        "PyTorch.",
        "mine.cpp:1:10: fatal error: filesystem: No such file or directory",
    ],
    "no CUTLASS headers": [
        "mine.cu:3:10: fatal error: cutlass/cutlass.h: No such file or directory",
        "mine.cu:3:10: fatal error: cutlass.h: No such file or directory",
        'mine.cu(4): error: cannot open source file "cute/tensor.hpp"',
        'mine.cu(4): catastrophic error: cannot open source file "cutlass/gemm/device/gemm.h"',
        "mine.cu:3:10: fatal error: 'cute/layout.hpp' file not found",
    ],
    "no CUDA headers": [
        "c10/cuda/CUDAStream.h:5:10: fatal error: cuda_runtime.h: No such file or directory",
        "mine.cpp:1:10: fatal error: cuda_runtime_api.h: No such file or directory",
        "ATen/cuda/CUDAContext.h:6:10: fatal error: cusparse.h: No such file or directory",
        'x.cu(1): error: could not open source file "cub/cub.cuh" (no directories in search list)',
        "mine.cpp:1:10: fatal error: cudnn.h: No such file or directory",
    ],
    "missing header": [
        "mine.cpp:2:10: fatal error: fmt/core.h: No such file or directory",
        "mine.cpp:2:10: fatal error: pybind11/pybind11.h: No such file or directory",
    ],
    "no ccache": [
        "/bin/sh: 1: ccache: not found",
        "bash: line 1: ccache: command not found",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/bin/ccache'",
    ],
    "error in the source": [
        'mine.cu(12): error: identifier "tile" is undefined',
        'csrc/kernels/mine.cuh(112): error #20: identifier "x" is undefined',
        "csrc/ops.cpp:30:5: error: 'Tensor' was not declared in this scope",
        'mine.cu:14: error: expected a ";"',
        '2 errors detected in the compilation of "mine.cu".',
        "ptxas /tmp/tmpx.ptx, line 91; error   : Unexpected instruction types specified for 'add'",
    ],
    "compiler crashed": [
        "nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)",
        "nvcc error   : 'ptxas' died with status 0xC0000005 (ACCESS_VIOLATION)",
        "mine.cpp:9:1: internal compiler error: Segmentation fault",
        "subprocess.CalledProcessError: Command '['nvcc']' died with <Signals.SIGSEGV: 11>.",
        "sh: line 1: 4711 Segmentation fault      (core dumped) cicc --c++17",
    ],
    "out of memory while compiling": [
        "Killed",
        "/bin/sh: line 1: 12345 Killed                  cicc --c++17 -O3 mine.cu",
        "make[2]: *** [CMakeFiles/mine.dir/build.make:76: mine.cu.o] Killed",
        "ninja: fatal: posix_spawn: Cannot allocate memory",
        "OSError: [Errno 12] Cannot allocate memory",
        'ERROR: process "/bin/sh -c pip install ." did not complete: exit code: 137',
        "The command '/bin/sh -c make' returned a non-zero code: 137",
        "error: command '/usr/local/cuda/bin/nvcc' failed with exit code -9",
        "subprocess.CalledProcessError: Command '['ninja']' returned non-zero exit status 137.",
        "make: *** [Makefile:3: all] Error 137",
        "  Reason:       OOMKilled",
        "subprocess.CalledProcessError: Command '['nvcc']' died with <Signals.SIGKILL: 9>.",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "out of GPU memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"],
    "disk full": ["fatal error: error writing to /tmp/cc.s: No space left on device"],
    "older C library": ["ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by"],
    "no Python headers": ["fatal error: Python.h: No such file or directory"],
    "fork after CUDA": ["RuntimeError: Cannot re-initialize CUDA in forked subprocess."],
}
SLOW = {
    "no ninja": [
        "Attempted to use ninja as the BuildExtension backend but we could not find ninja.",
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
    ],
    "many architectures": [
        "nvcc -c x.cu -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90",
        "nvcc -gencode arch=compute_75,code=sm_75 -gencode arch=compute_90a,code=sm_90a x.cu",
    ],
    "architecture not pinned": [
        "UserWarning: TORCH_CUDA_ARCH_LIST is not set, all archs for visible cards are included",
    ],
    "jobs not set": ["Allowing ninja to set a default number of workers... (overridable by ..."],
    "no cache hits": ["cache hit rate                      0.00 %", "  Hits:   1 / 240 ( 0.42%)"],
}
CASES = [(n, t, level) for kinds, level in ((FAILURES, "red"), (SLOW, "yellow"))
         for n, texts in kinds.items() for t in texts]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "level"), CASES)
def test_it_is_recognised(name, text, level):
    found = logs.diagnose(["running build_ext\n", f"{text}\n", "error: command failed\n"])
    assert [(f.name, f.level, f.line) for f in found] == [(name, level, 2)]
    assert found[0].means and found[0].do and found[0].seen in text


def test_every_kind_has_its_log():
    assert {kind.name for kind in logs._KINDS} == {name for name, _, _ in CASES}


@pytest.mark.parametrize(
    "text",
    [
        "nvcc -c x.cu -gencode=arch=compute_90a,code=sm_90a -O3",
        "nvcc -gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_90a,code=compute_90a",
        "cache hit rate                     97.30 %",
        "  Hits:   0 / 0 ( 0.00%)",
        "  Hits:   1 / 240 ( 0..42%)",
        "checking for error.h: yes; compiling error.cpp, exit status 0, 137 tests passed",
        "Exception: No module named 'torchvision'",
        "No module named 'torch.utils.mine'",
        'mine.cu(12): warning #177-D: variable "error" was declared but never referenced',
        "[ 50%] Building CUDA object CMakeFiles/error.dir/error.cu.o -Werror -DNAME=ccache",
        "Killed 3 stale workers before the start",
        "-- CUDA extensions: sm_90a",
        "[12/40] c++ -MMD -MF main.o.d -c main.cpp",
        "tests passed; ninja: no work to do.",
        "",
    ],
)
def test_a_good_line_means_nothing(text):
    assert logs.diagnose([text]) == []


def test_failures_come_first_and_each_once():
    lines = ["Allowing ninja to set a default number of workers\n"]
    lines += ["c++: fatal error: Killed signal terminated program cc1plus\n"] * 3
    found = logs.diagnose(lines)
    assert [(f.name, f.count) for f in found] == [
        ("out of memory while compiling", 3),
        ("jobs not set", 1),
    ]
    text = logs.as_text(found, "build.log")
    assert "out of memory while compiling (line 2, 3 times)" in text and "MAX_JOBS" in text


BUILD = """
running build_ext
UserWarning: Attempted to use ninja as the BuildExtension backend but we could not find ninja.
nvcc -I/v/torch/include -c mine.cu -o mine.o -gencode=arch=compute_90a,code=sm_90a -std=c++17
mine.cu(41): error: no instance of function template "scale" matches the argument list
mine.cu(57): error: expression must have a constant value
2 errors detected in the compilation of "mine.cu".
error: command '/usr/local/cuda/bin/nvcc' failed with exit code 1
"""
CONTAINER = """
#12 [8/9] RUN pip install --no-build-isolation .
#12 812.1 [14/60] nvcc -c flash.cu -o flash.o -gencode arch=compute_80,code=sm_80
#12 901.7 Killed
#12 901.9 ninja: build stopped: subcommand failed.
#12 902.0 subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.
#12 ERROR: process "/bin/sh -c pip install ." did not complete successfully: exit code: 137
"""
ISOLATED = """
  x Getting requirements to build wheel did not run successfully.
  │ exit code: 1
  ╰─> [20 lines of output]
      Traceback (most recent call last):
        File "<string>", line 15, in <module>
      ModuleNotFoundError: No module named 'torch'
      [end of output]
"""


@pytest.mark.parametrize(
    ("log", "names"),
    [
        (BUILD, ["error in the source", "no ninja"]),
        (CONTAINER, ["out of memory while compiling"]),
        (ISOLATED, ["no PyTorch in the build"]),
    ],
)
def test_whole_logs(log, names):
    found = logs.diagnose(log.splitlines(keepends=True))
    assert [finding.name for finding in found] == names


def test_the_mend_for_a_missing_nvcc_is_shell_that_works(run_command):
    """Where CUDA_HOME was not set before, too."""
    (found,) = logs.diagnose(["/bin/sh: 1: nvcc: not found"])
    command, _, _ = found.do.partition(", or")
    script = f"unset CUDA_HOME; {command}; echo $CUDA_HOME; echo $PATH"
    home, path = run_command(["bash", "-euc", f"unset CUDA_HOME; set +u; {script}"]).stdout.split()
    assert home == "/usr/local/cuda" and path.startswith("/usr/local/cuda/bin:")


def test_an_old_driver_s_mend_names_what_may_serve_a_data_centre_gpu():
    (found,) = logs.diagnose(["CUDA driver version is insufficient for CUDA runtime version"])
    assert "cuda-compat-13" in found.do and "not tested by us" in found.do


def test_a_long_line_is_shown_where_it_matters():
    line = "x" * 5000 + " undefined symbol: _ZN3c10 " + "y" * 5000
    (found,) = logs.diagnose([line])
    assert "undefined symbol" in found.seen and len(found.seen) < 200


def test_nothing_found():
    assert "none of the usual failures" in logs.as_text([], "build.log")


def test_a_large_log_takes_seconds():
    import time

    line = (
        "[1/9] nvcc -MD -c kernel.cu -o kernel.o -gencode=arch=compute_90a,code=sm_90a " + "-I" * 99
    )
    start = time.process_time()
    assert logs.diagnose([line] * 20000) == []
    assert time.process_time() - start < 20
