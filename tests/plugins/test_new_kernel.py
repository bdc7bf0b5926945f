# SPDX-License-Identifier: Apache-2.0
"""``tiercel new-kernel``: what it writes is right at once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiercel.templates
from tiercel.plugins.contracts import CONTRACTS

pytestmark = pytest.mark.torch


def run(*args, cwd, **kwargs):
    command = [sys.executable, "-m", "tiercel", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=250, **kwargs)


def test_torch_passes_smoke(tmp_path):
    result = run("new-kernel", "my_topk", "--language", "torch", cwd=tmp_path)
    assert result.stdout == ("wrote my_topk.py; check it with: tiercel smoke --path my_topk.py\n")
    text = (tmp_path / "my_topk.py").read_text()
    assert "new_kernel" not in text and "SPDX" not in text and text.startswith('"""my_topk: ')
    result = run("smoke", "--path", "my_topk.py", "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert re.search(r"my_topk +torch +100\.0 % +[\d.]+ .s +[\d.]+x$", result.stdout, re.MULTILINE)


def test_triton_without_a_gpu_says_so(tmp_path):
    """With Triton installed it is skipped with a reason; without, that is the reason."""
    run("new-kernel", "mine", "--language", "triton", "--out", "k.py", cwd=tmp_path, check=True)
    compile((tmp_path / "k.py").read_text(), "k.py", "exec")
    result = run("smoke", "--path", "k.py", "--device", "cpu", cwd=tmp_path)
    assert "needs CUDA tensors" in result.stdout or "No module named 'triton'" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--language", "cuda"],
            "there is no template for --language cuda yet: Tiercel cannot",
        ),
        (
            ["x", "--language", "cute"],
            "there is no template for --language cute yet: Tiercel cannot",
        ),
        (["x", "--language", "rust"], "invalid choice: 'rust'"),
        (["x"], "the following arguments are required: --language"),
        (["a-b", "--language", "torch"], "'a-b' is no Python identifier"),
        (["class", "--language", "torch"], "'class' is no Python identifier"),
        (["sm90", "--language", "torch"], "the name 'sm90' is Tiercel's own"),
        (["x", "--language", "torch", "--op", "nope"], "no operator 'nope' takes backends"),
        (["there", "--language", "torch"], "File exists: 'there.py'"),
    ],
)
def test_what_cannot_be_written(tmp_path, arguments, message):
    (tmp_path / "there.py").write_text("mine")
    result = run("new-kernel", *arguments, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"


def test_every_operator_has_templates():
    folder = Path(tiercel.templates.__file__).parent
    for op in CONTRACTS:
        for language in ("torch", "triton"):
            assert (folder / f"{op}_{language}.py").exists()
