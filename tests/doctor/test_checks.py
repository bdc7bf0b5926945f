# SPDX-License-Identifier: Apache-2.0
"""Facts in, findings out: the diagnosis of each machine, and the command that mends it."""

import pytest

from tiercel.workbench import doctor
from tiercel.workbench.doctor import checks, show, tools

GB = 1 << 30


@pytest.fixture
def facts():
    """An H200 on which all is well."""
    return {
        "python": "3.12.3 (/usr/bin/python3)",
        "machine": "linux x86_64",
        "libc": "glibc 2.36",
        "wheel_tag": "cp312",
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "torch_hip": None,
        "torch_problem": None,
        "torch_sees_gpu": True,
        "driver_cuda": "13.0",
        "driver_problem": None,
        "gpus": [{"index": 0, "capability": "9.0", "name": "NVIDIA H200"}],
        "sm90_kernels_run": True,
        "why_not": None,
    }


@pytest.fixture
def made():
    return {
        "nvcc": {"path": "/usr/local/cuda/bin/nvcc", "release": "13.0"},
        "cxx": "g++ 12.2.0",
        "ninja": "1.11.1",
        "ccache": "ccache version 4.8",
        "cutlass_dsl": "4.8.1",
        "cpus": 16,
        "memory": 128 * GB,
        "environment": {"TORCH_CUDA_ARCH_LIST": "9.0a", "MAX_JOBS": "16"},
        "caches": {"torch extensions": {"folder": "/caches/te", "free": 100 * GB}},
    }


def find(name, found):
    (check,) = [check for check in found if check.name == name]
    return check


def test_all_green(facts, made):
    found = checks.runtime(facts) + checks.development(facts, made)
    assert {check.level for check in found} == {"green"}
    assert "mend" not in show.as_text(found)
    assert show.conclusion(found) == "14 green, 0 yellow, 0 red"


@pytest.mark.parametrize(
    ("change", "name", "text", "mend"),
    [
        (
            {"torch_problem": "tiercel needs PyTorch 2.9 or newer, found 2.8: pip install torch"},
            "PyTorch",
            "found 2.8",
            "pip install torch",
        ),
        ({"torch_problem": "PyTorch does not import: x"}, "PyTorch", "import: x", "pip install"),
        ({"torch_cuda": None}, "PyTorch", "without CUDA", "--force-reinstall torch"),
        ({"torch_hip": "6.4", "torch_cuda": None}, "PyTorch", "ROCm", "`ref`"),
        ({"driver_problem": "no NVIDIA driver: x"}, "driver", "no NVIDIA driver", "R580"),
        ({"gpus": []}, "GPU", "none found", "CUDA_VISIBLE_DEVICES"),
        (
            {"gpus": [{"index": 0, "capability": "8.0", "name": "NVIDIA A100"}]},
            "GPU",
            "NVIDIA A100 (8.0): none has compute capability 9.0",
            "`ref`",
        ),
        ({"sm90_kernels_run": False, "why_not": "no luck"}, "sm90 kernels", "here: no luck", "see"),
        ({"libc": "glibc 2.31"}, "wheel", "2.34 or newer, this is glibc 2.31", "Debian 12"),
        ({"libc": ""}, "wheel", "another libc", "Debian 12"),
        ({"machine": "linux aarch64"}, "wheel", "this is linux aarch64", "x86_64"),
    ],
)
def test_what_keeps_the_kernels_from_running_is_red(facts, change, name, text, mend):
    check = find(name, checks.runtime(facts | change))
    assert check.level == "red" and text in check.text and mend in check.mend
    assert f"mend: {check.mend}" in show.as_text([check])


@pytest.mark.parametrize(
    ("change", "name", "text", "mend"),
    [
        ({"nvcc": None}, "nvcc", "not found", "tiercel[jit]"),
        (
            {"nvcc": {"path": "/n", "release": "12.4"}},
            "nvcc",
            "PyTorch is for CUDA 13.0",
            "export CUDA_HOME=/usr/local/cuda-13.0",
        ),
        ({"cxx": None}, "C++ compiler", "not found", "apt-get install g++"),
        ({"ninja": None}, "ninja", "file by file", "pip install ninja"),
        ({"ccache": None}, "ccache", "anew", "apt-get install ccache"),
        ({"cutlass_dsl": None}, "CuTe DSL", "not installed", "nvidia-cutlass-dsl==4.8.1"),
        ({"cutlass_dsl": "4.2.0"}, "CuTe DSL", "4.8.1 is the tested one", "==4.8.1"),
        (
            {"environment": {"CUTE_DSL_ARCH": "sm_100a"}},
            "CuTe DSL",
            "CUTE_DSL_ARCH=sm_100a",
            "export CUTE_DSL_ARCH=sm_90a",
        ),
        ({"environment": {}}, "arch pinning", "is not set", "TORCH_CUDA_ARCH_LIST=9.0a"),
        (
            {"environment": {"TORCH_CUDA_ARCH_LIST": "8.0;8.6;9.0a+PTX"}},
            "arch pinning",
            "compiled 3 times, and PTX",
            "TORCH_CUDA_ARCH_LIST=9.0a",
        ),
        (
            {"environment": {"TORCH_CUDA_ARCH_LIST": "8.0"}},
            "arch pinning",
            "leaves out 9.0a",
            "=9.0a",
        ),
        (
            {"environment": {"TORCH_CUDA_ARCH_LIST": "9.0"}},
            "arch pinning",
            "'9.0' lacks the a of 9.0a",
            "=9.0a",
        ),
        (
            {"environment": {"TORCH_CUDA_ARCH_LIST": "Hopper"}},
            "arch pinning",
            "'Hopper' lacks the a",
            "=9.0a",
        ),
        (
            {"nvcc_missing": {"CUDA_HOME": "/nonexistent"}, "nvcc": None},
            "nvcc",
            "CUDA_HOME=/nonexistent has no nvcc that runs",
            "unset CUDA_HOME",
        ),
        (
            {"nvcc_missing": {"CUDA_HOME": "/gone", "CUDACXX": "/gone/nvcc"}},
            "nvcc",
            "CUDA_HOME=/gone, CUDACXX=/gone/nvcc has no nvcc that runs; there is /usr/local",
            "export CUDA_HOME=/usr/local/cuda; export CUDACXX=/usr/local/cuda/bin/nvcc",
        ),
        ({"environment": {}, "memory": 16 * GB}, "MAX_JOBS", "18 at once", "export MAX_JOBS=4"),
        (
            {"environment": {"MAX_JOBS": "64"}},
            "MAX_JOBS",
            "64, and 16 CPUs, 128 GB free bear 16",
            "export MAX_JOBS=16",
        ),
        ({"environment": {"MAX_JOBS": "1"}}, "MAX_JOBS", "though", "export MAX_JOBS=16"),
        ({"environment": {"MAX_JOBS": "all"}}, "MAX_JOBS", "no number", "export MAX_JOBS=16"),
        (
            {"caches": {"tiercel": {"folder": "/data/c", "free": GB}}},
            "cache: tiercel",
            "1.0 GB free",
            "tiercel cache prune",
        ),
        (
            {"caches": {"ccache": {"folder": "/data/c", "free": 0}}},
            "cache: ccache",
            "not writable",
            "df -h /data/c",
        ),
        (
            {"caches": {"triton": {"folder": "/tmp/triton", "free": 100 * GB}}},
            "cache: triton",
            "gone after a restart",
            "stays",
        ),
    ],
)
def test_what_makes_builds_slow_or_fail_is_yellow(facts, made, change, name, text, mend):
    check = find(name, checks.development(facts, made | change))
    assert check.level == "yellow" and text in check.text and mend in check.mend


def test_another_gpu_is_pinned_to_its_own_arch(facts, made):
    facts["gpus"] = [{"index": 0, "capability": "8.6", "name": None}]
    check = find("arch pinning", checks.development(facts, made | {"environment": {}}))
    assert check.mend == "export TORCH_CUDA_ARCH_LIST=8.6"


def test_any_variant_of_another_gpu_s_arch_will_do(facts, made):
    facts["gpus"] = [{"index": 0, "capability": "10.0", "name": None}]
    made["environment"]["TORCH_CUDA_ARCH_LIST"] = "10.0a"
    assert find("arch pinning", checks.development(facts, made)).level == "green"


def test_without_a_gpu_nothing_speaks_of_one_here(facts, made):
    made["environment"]["TORCH_CUDA_ARCH_LIST"] = "8.0"
    check = find("arch pinning", checks.development(facts | {"gpus": []}, made))
    assert check.text == "'8.0' leaves out 9.0a, what H100 and H200 run"
    assert "the GPU here" in find("arch pinning", checks.development(facts, made)).text


def test_an_older_driver_has_something_to_try(facts):
    problem = {"driver_problem": "the NVIDIA driver supports CUDA 12.8", "driver_cuda": "12.8"}
    mend = find("driver", checks.runtime(facts | problem)).mend
    assert mend.startswith("install the NVIDIA driver R580 or newer")
    assert "cuda-compat-13" in mend and "not tested by us" in mend and "data-centre" in mend
    none = {"driver_problem": "no NVIDIA driver", "driver_cuda": None}
    assert "compat" not in find("driver", checks.runtime(facts | none)).mend


@pytest.mark.parametrize(
    ("levels", "code"),
    [([], 0), (["green"], 0), (["green", "yellow"], 1), (["red", "yellow", "green"], 2)],
)
def test_the_exit_status_is_the_worst_level(levels, code):
    assert doctor.status(levels) == code


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "CUDACXX"])
def test_a_toolkit_that_is_not_there_is_said(facts, made, variable, tmp_path):
    found = tools.examine({variable: "/nonexistent", "HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert found["nvcc_missing"] == {variable: "/nonexistent"}
    check = find("nvcc", checks.development(facts, made | {"nvcc_missing": found["nvcc_missing"]}))
    assert check.level == "yellow" and f"{variable}=/nonexistent" in check.text


@pytest.mark.parametrize(
    ("cpus", "memory", "jobs"),
    [(16, 128 * GB, 16), (16, 30 * GB, 7), (64, 2 * GB, 1), (2, 0, 2), (1, 128 * GB, 1)],
)
def test_jobs_fit_into_memory(cpus, memory, jobs):
    assert tools.jobs(cpus, memory) == jobs


def test_memory_is_within_the_control_group_s(tmp_path):
    assert tools.memory(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    assert tools.memory(tmp_path) == 1000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert tools.memory(tmp_path) == 1000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("100000\n")
    assert tools.memory(tmp_path) == 400000


def test_programs_are_asked_and_a_broken_one_is_not_there(monkeypatch, tmp_path):
    for name, text in {"ninja": "echo 1.11.1", "ccache": "exit 3"}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    nvcc = tmp_path / "home" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = tools.examine(
        {"CUDA_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "MAX_JOBS": "3", "SECRET": "x"}
    )
    assert found["ninja"] == "1.11.1" and found["ccache"] is None
    assert found["nvcc"] == {"path": str(nvcc), "release": "13.0"} and not found["nvcc_missing"]
    assert found["environment"] == {"CUDA_HOME": str(tmp_path / "home"), "MAX_JOBS": "3"}
    assert found["caches"]["triton"]["folder"] == f"{tmp_path}/.triton/cache"
