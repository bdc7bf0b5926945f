# SPDX-License-Identifier: Apache-2.0
"""``tiercel new-kernel``: what it writes is right at once."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys

import pytest
from support.in_process import tiercel

from tiercel.cli import main
from tiercel.cli.new_kernel import _TEMPLATES
from tiercel.plugins import rendering
from tiercel.plugins.contracts import CONTRACTS

pytestmark = pytest.mark.torch


def run(*args, cwd, **kwargs):
    command = [sys.executable, "-m", "tiercel", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500, **kwargs)


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    """Each operator's file in PyTorch, and what smoke says of them all."""
    folder = tmp_path_factory.mktemp("kernels")
    for op in CONTRACTS:
        words = ["new-kernel", f"my_{op}", "--op", op, "--language", "torch"]
        assert main([*words, "--out", str(folder / f"{op}.py")]) == 0
    return folder, tiercel("smoke", "--path", folder, "--device", "cpu", cwd=folder)


@pytest.mark.parametrize("op", CONTRACTS)
def test_torch_passes_smoke(smoked, op):
    folder, result = smoked
    text = (folder / f"{op}.py").read_text()
    assert "new_kernel" not in text and "SPDX" not in text and text.startswith(f'"""my_{op}: {op}')
    row = rf"^{op} +my_{op} +torch +100\.0 % +[\d.]+ .s +[\d.]+x$"
    assert re.search(row, result.stdout, re.MULTILINE), result.stdout + result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize("language", ["triton", "cuda"])
def test_without_a_gpu_the_others_say_so(tmp_path, language):
    """With Triton installed it is skipped with a reason; without, that is the reason."""
    result = tiercel("new-kernel", "mine", "--language", language, "--out", "k.py", cwd=tmp_path)
    assert result.stdout == "wrote k.py; check it with: tiercel smoke --path k.py\n"
    compile((tmp_path / "k.py").read_text(), "k.py", "exec")
    result = tiercel("smoke", "--path", "k.py", "--device", "cpu", cwd=tmp_path)
    text = f"a {language} kernel and needs CUDA tensors"
    missing = language == "triton" and "skipped: it needs Triton" in result.stdout
    assert text in result.stdout or missing, result.stdout
    assert result.returncode == 0


# What people start from; everything else begins from the reference, in PyTorch.
STARTED_FROM = ("rms_norm", "silu_and_mul", "softmax_online", "nvfp4_gemv", "attention")
TEMPLATES = sorted(tuple(p.stem.rsplit("_", 1)) for p in _TEMPLATES.glob("[a-z]*_*.py"))


@pytest.mark.parametrize(
    ("op", "language"),
    [
        *itertools.product(STARTED_FROM, ("triton", "cuda")),
        *itertools.product(("linear_act", "nvfp4_gemv", "rms_norm"), ("cute",)),
    ],
)
def test_there_is_a_template(tmp_path, op, language):
    path = tmp_path / "k.py"
    words = ["new-kernel", "mine", "--op", op, "--language", language, "--out", str(path)]
    assert main(words) == 0
    text = path.read_text()
    compile(text, "k.py", "exec")
    assert text.startswith(f'"""mine: {op} in ') and "new_kernel" not in text


@pytest.mark.slow
@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "softmax_online", "nvfp4_gemv"])
def test_triton_passes_smoke_in_its_interpreter(tmp_path, op):
    """As a kernel for the CPU. Not attention: the interpreter's bfloat16 products are wrong."""
    pytest.importorskip("triton")
    path = tmp_path / "k.py"
    words = ["new-kernel", "mine", "--op", op, "--language", "triton", "--out", str(path)]
    assert main(words) == 0
    path.write_text(path.read_text().replace('language="triton"', 'language="torch"'))
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    words = ["smoke", "--path", "k.py", "mine", "--device", "cpu", "--timeout", "400"]
    result = run(*words, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("op", STARTED_FROM)
def test_cuda_compiles(op):
    from tiercel.jit import toolchain

    try:
        command = [toolchain.find_nvcc(), "--version"]
        subprocess.run(command, check=True, capture_output=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no nvcc that runs: {error}")
    path = _TEMPLATES / f"{op}_cuda.py"
    spec = importlib.util.spec_from_file_location(f"template_{op}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels = module.KERNELS.values() if hasattr(module, "KERNELS") else [module.KERNEL]
    for kernel in kernels:
        report = kernel.compile("sm_90a")
        assert report.registers > 0 and report.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "language"), TEMPLATES)
def test_they_pass_smoke_on_a_gpu(tmp_path, op, language):
    if language == "cuda":
        from tiercel.jit import toolchain

        try:
            toolchain.find_nvcc()
        except RuntimeError as error:
            pytest.skip(str(error))
    if language == "cute":
        pytest.importorskip("cutlass")
    run("new-kernel", "mine", "--op", op, "--language", language, cwd=tmp_path, check=True)
    result = run("smoke", "--path", "mine.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    row = rf"mine +{language} +100\.0 % +[\d.]+ .s +[\d.]+x$"  # no case is left out
    assert re.search(row, result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--language", "cute"],
            "there is no template for topk_softmax in cute yet, only in torch, triton, cuda",
        ),
        (["x", "--language", "rust"], "invalid choice: 'rust'"),
        (["x"], "the following arguments are required: --language"),
        (["a-b", "--language", "torch"], "'a-b' is no Python identifier"),
        (["class", "--language", "torch"], "'class' is no Python identifier"),
        (["sm90", "--language", "torch"], "the name 'sm90' is Tiercel's own"),
        (["x", "--language", "torch", "--op", "nope"], "no operator 'nope' takes backends"),
        (["there", "--language", "torch"], "there.py is there already; --out FILE writes another"),
    ],
)
def test_what_cannot_be_written(tmp_path, monkeypatch, capsys, arguments, message):
    (tmp_path / "there.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["new-kernel", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"


REFERENCE = """
from __future__ import annotations

import math
import os
from functools import partial as bind

import torch
from torch import Tensor

SCALE, SHIFT = 2.0, 1.0  # both
# Of what is unused here.
OTHER = os.name


def _helper(x: Tensor) -> Tensor:
    return bind(torch.mul, SCALE)(x) if x.dim() else linear_act(x, x, None)


def linear_act(
    x: Tensor, weight: Tensor, b: None = None, *, extra: float = math.pi, activation="gelu"
) -> Tensor:
    # First.
    return _helper(x)
"""
RENDERED = """
from __future__ import annotations

import math
from functools import partial as bind

import torch
from torch import Tensor

import tiercel

SCALE, SHIFT = 2.0, 1.0  # both


def _helper(x: Tensor) -> Tensor:
    return bind(torch.mul, SCALE)(x) if x.dim() else mine(x, x, None)


@tiercel.backends.register(
    op="linear_act",
    name="mine",
    language="torch",
    description="the reference's own steps",
)
def mine(
    x: Tensor,  # [M, K] bfloat16 or float16, any strides
    weight: Tensor,  # [N, K] the dtype of x, any strides
    bias: Tensor | None,  # [N] the dtype of x, any strides, or None
    activation: str,
    b: None = None,
    extra: float = math.pi,
) -> Tensor:  # [M, N] the dtype of x
    # First.
    return _helper(x)
"""


def test_what_is_taken_of_a_reference(tmp_path, monkeypatch):
    text = "from tiercel.ops.other.reference import linear_act"
    for family, source in (("linear", text), ("other", REFERENCE)):
        (tmp_path / family).mkdir()
        (tmp_path / family / "reference.py").write_text(source)
    monkeypatch.setattr(rendering, "_FAMILIES", tmp_path)
    assert rendering.render(CONTRACTS["linear_act"], "mine").endswith(f'"""\n{RENDERED}')
    for name in ("torch", "_helper", "x", "tiercel"):
        with pytest.raises(ValueError, match=f"uses the name {name!r} itself"):
            rendering.render(CONTRACTS["linear_act"], name)
