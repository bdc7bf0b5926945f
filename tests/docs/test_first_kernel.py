# SPDX-License-Identifier: Apache-2.0
"""docs/first-kernel.md, to the letter: its commands and code are run in order, in an empty folder.

A block is ```sh, ```python or ```diff FILE; "fails" has to fail, "gpu" needs one: without it, what
the commands say of that is checked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.in_process import tiercel

PAGE = Path(
    os.environ.get("PAGE", Path(__file__).parents[2] / "docs" / "first-kernel.md")
).absolute()
BLOCK = re.compile(r"^```(sh|python|diff)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# In a sandbox the machine's nvcc may be found and yet not run.
_RUNS_NVCC = (
    "import subprocess; from tiercel.jit import toolchain; "
    "subprocess.run([str(toolchain.find_nvcc()), '--version'], check=True, stdout=-3)"
)


def blocks():
    return [(kind, words.split(), text) for kind, words, text in BLOCK.findall(PAGE.read_text())]


def edit(folder, name, text):
    (old,) = (line[1:] for line in text.splitlines() if line.startswith("-"))
    (new,) = (line[1:] for line in text.splitlines() if line.startswith("+"))
    path = folder / name
    assert path.read_text().count(old) == 1, old
    path.write_text(path.read_text().replace(old, new))


def run(command, folder, gpu):
    assert command.startswith("tiercel "), command
    if not gpu:
        return tiercel(*command.split()[1:], cwd=folder)
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)


def without_gpu(result, command):
    """Files are written; smoke says why it left one out; a benchmark that it needs a GPU."""
    if " new-kernel " in f" {command} ":
        assert result.returncode == 0, result.stderr
    elif " smoke " in f" {command} ":
        said = result.stdout + result.stderr
        assert re.search("needs CUDA tensors|it needs (Triton|the CuTe DSL)", said), said
        assert result.returncode == 0
    else:
        assert result.returncode != 0 and "Traceback" not in result.stderr, result.stderr


def all_of_it(folder, gpu):
    code = ""
    for kind, words, text in blocks():
        if kind == "diff":
            edit(folder, words[0], text)
        elif kind == "python":
            code += text if gpu or "gpu" not in words else ""
        else:
            for command in text.splitlines():
                result = run(command, folder, gpu)
                if "gpu" in words and not gpu:
                    without_gpu(result, command)
                    continue
                failed = result.returncode != 0
                assert failed == ("fails" in words), result.stdout + result.stderr
                if failed:
                    assert re.search(r"mine +torch +\d\d\.\d %", result.stdout), result.stdout
    return code


@pytest.mark.torch
def test_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    code = all_of_it(tmp_path, gpu=False)
    # Without a compiler its error is what comes.
    compiles = subprocess.run(
        [sys.executable, "-c", _RUNS_NVCC],
        capture_output=True,
    )
    if compiles.returncode:
        code = code.replace("print(twice.compile())", "")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "topk_softmax runs on mine: it was asked for" in result.stdout
    if not compiles.returncode:
        texts = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (said,) = (text for text in texts if "_Z5" in text)
        assert _without_numbers(said) in _without_numbers(result.stdout)


def _without_numbers(text):
    return re.sub(r"\d+ registers", "# registers", text)  # compilers differ


@pytest.mark.torch
@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    code = all_of_it(tmp_path, gpu=True)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
