# SPDX-License-Identifier: Apache-2.0
"""`tiercel doctor --shell`: what is there is used, what is not is said, all of it is shell."""

import subprocess

import pytest

from tiercel.workbench.doctor import shell


@pytest.fixture
def made(tmp_path):
    home = tmp_path / "cuda home"
    (home / "bin").mkdir(parents=True)
    (home / "nvvm").mkdir()
    (home / "bin" / "nvcc").touch()
    return {
        "nvcc": {"path": str(home / "bin" / "nvcc"), "release": "13.0"},
        "ninja": "1.11.1",
        "ccache": "ccache version 4.8",
        "cpus": 8,
        "memory": 12 << 30,
        "environment": {},
        "caches": {"torch extensions": {"folder": "/caches/it's here/te", "free": 1}},
    }


def sourced(text, *names):
    script = text + "\n" + "\n".join(f'printf "%s\\n" "${{{name}-}}"' for name in names)
    done = subprocess.run(
        ["bash", "-euc", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_everything_there(made, tmp_path):
    text = shell.exports({"gpus": []}, made, links=tmp_path)
    names = ["TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CMAKE_GENERATOR", "CUDA_HOME", "PYTORCH_NVCC"]
    nvcc = made["nvcc"]["path"]
    home = str(tmp_path / "cuda home")
    assert sourced(text, *names) == ["9.0a", "3", "Ninja", home, f"ccache {nvcc}"]
    assert sourced(text, "TORCH_EXTENSIONS_DIR", "PATH", "CUTE_DSL_ARCH") == [
        "/caches/it's here/te",
        f"{tmp_path}:/usr/bin:/bin",
        "sm_90a",
    ]


def test_nothing_there(made, tmp_path):
    made |= {"nvcc": None, "ninja": None, "ccache": None}
    text = shell.exports({"gpus": []}, made, links=tmp_path)
    assert sourced(text, "CUDA_HOME", "PYTORCH_NVCC", "CMAKE_GENERATOR") == ["", "", ""]
    for command in ("pip install ninja", "apt-get install ccache", "pip install 'tiercel[jit]'"):
        assert f": {command}" in text


def test_what_the_user_has_set_stays(made, tmp_path):
    made["environment"] = {"CUDA_HOME": "/mine"}
    assert "CUDA_HOME" not in shell.exports({"gpus": []}, made, links=tmp_path)


def test_a_cuda_home_that_is_not_there_is_replaced(made, tmp_path):
    made["environment"] = {"CUDA_HOME": "/nonexistent"}
    there = shell.exports({"gpus": []}, made, links=tmp_path)
    assert "export CUDA_HOME=" not in there
    gone = made | {"nvcc_missing": {"CUDA_HOME": "/nonexistent"}}
    text = shell.exports({"gpus": []}, gone, links=tmp_path)
    home = made["nvcc"]["path"].removesuffix("/bin/nvcc")
    assert sourced(text, "CUDA_HOME") == [home]
