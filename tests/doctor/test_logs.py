# SPDX-License-Identifier: Apache-2.0
"""`tiercel doctor --log`: each of the usual failures by the words of those who print it."""

import pytest

from tiercel.doctor import logs

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
    "out of memory while compiling": [
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
