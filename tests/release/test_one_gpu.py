# SPDX-License-Identifier: Apache-2.0
"""Each GPU test has a GPU to itself, and all GPUs are used; shown with GPUs that are only names."""

import os
import pathlib
import subprocess

import pytest

PROGRAM = pathlib.Path(os.environ["ONE_GPU"]).absolute()
# Takes its GPU, and fails where somebody else has it at the same time.
BODY = """
mkdir "taken-$CUDA_VISIBLE_DEVICES" || exit 9
echo "$CUDA_VISIBLE_DEVICES" >>used
sleep 0.1
rmdir "taken-$CUDA_VISIBLE_DEVICES"
"""


@pytest.fixture
def env(tmp_path: pathlib.Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TIERCEL_GPU_LOCKS": str(tmp_path / "locks")}


def test_eight_tests_on_three_gpus(tmp_path: pathlib.Path, env: dict[str, str]) -> None:
    env["TIERCEL_GPUS"] = "GPU-a,GPU-b,MIG-c/1/0"
    command = [
        PROGRAM,
        "bash",
        "-c",
        BODY.replace("taken-$CUDA_VISIBLE_DEVICES", "taken-${CUDA_VISIBLE_DEVICES//\\//_}"),
    ]
    started = [subprocess.Popen(command, cwd=tmp_path, env=env) for _ in range(8)]
    assert [process.wait(timeout=60) for process in started] == [0] * 8
    used = (tmp_path / "used").read_text().split()
    assert len(used) == 8 and set(used) == {"GPU-a", "GPU-b", "MIG-c/1/0"}


def test_a_killed_test_frees_its_gpu(tmp_path: pathlib.Path, env: dict[str, str]) -> None:
    env["CUDA_VISIBLE_DEVICES"] = "0"
    holder = subprocess.Popen(
        [PROGRAM, "sh", "-c", "echo have it; exec sleep 60"], env=env, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"have it\n"
    waiting = subprocess.Popen([PROGRAM, "true"], env=env)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=0.5)
    holder.kill()
    holder.wait()
    assert waiting.wait(timeout=30) == 0


def test_exit_status_and_no_gpu(env: dict[str, str]) -> None:
    assert subprocess.run([PROGRAM, "true"], env=env, capture_output=True).returncode == 2
    env["TIERCEL_GPUS"] = "0"
    assert subprocess.run([PROGRAM, "sh", "-c", "exit 7"], env=env).returncode == 7
