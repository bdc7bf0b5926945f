# SPDX-License-Identifier: Apache-2.0
"""The ops as native functions of torch's dispatcher, without Python: on the emulator.

The callers do not import tiercel: they are a C++ program, and Python that loads the extension
module as such a program does.
"""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

EXTENSION = os.environ["TIERCEL_WITHOUT_PYTHON"]


def _program(extension, *arguments, env=None):
    libtorch = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    command = [os.environ["NATIVE_OPS_PROGRAM"], str(libtorch), str(extension), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def printed():
    done = _program(EXTENSION)
    assert done.returncode == 0, done.stderr
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def _numbers(text):
    return torch.tensor([float(word) for word in text.split()])


def _steps(first, step, *shape):
    return (first + step * torch.arange(math.prod(shape), dtype=torch.float32)).reshape(shape)


def test_a_program_without_python_normalises(printed):
    x, residual = _steps(-1.5, 0.25, 3, 8), _steps(0.5, 0.125, 3, 8)
    expected = functional.rms_norm(x + residual, (8,), _steps(1.0, 0.5, 8), 1e-6)
    torch.testing.assert_close(_numbers(printed["out"]).reshape(3, 8), expected)
    torch.testing.assert_close(_numbers(printed["residual_out"]).reshape(3, 8), x + residual)


def test_arguments_that_are_not_given_have_their_defaults(printed):
    gate, up = _steps(-2.0, 0.5, 2, 8).chunk(2, -1)
    result = _numbers(printed["silu_and_mul"]).reshape(2, 4)
    torch.testing.assert_close(result, functional.silu(gate) * up)


def test_a_bad_argument_is_an_error_of_torch_with_our_text(printed):
    assert printed["refused"] == "1"
    assert printed["error"].startswith("rms_norm: `weight` must have shape [N] = [8], got [7]")


def test_ops_are_registered_once(printed):
    assert "registered already, from C++" in printed["again"]


def test_the_wheels_own_module_is_loaded_without_python():
    """It registers for CUDA; no GPU is asked for."""
    folder = Path(importlib.util.find_spec("tiercel").origin).parent
    (extension,) = folder.glob("_C.*.so")
    env = {name: value for name, value in os.environ.items() if name != "TIERCEL_LIBTORCH"}
    done = _program(extension, "register", env=env)
    assert done.returncode == 0, done.stderr
    assert "registered already, from C++" in done.stdout


# Runs in a process of its own, which never imports tiercel's Python. `ops` is torch.ops.tiercel.
_PROLOGUE = """
import ctypes, os, sys
import torch
import torch.nn.functional as F
library = ctypes.CDLL(os.environ["TIERCEL_WITHOUT_PYTHON"])
library.tiercel_register_torch_ops.restype = ctypes.c_char_p
error = library.tiercel_register_torch_ops()
assert error is None, error
ops = torch.ops.tiercel
close = torch.testing.assert_close
torch.manual_seed(0)
assert "tiercel" not in sys.modules
"""

_CASES = {
    "float, optional tensors": """
x, weight = torch.randn(5, 64), torch.randn(64)
close(ops.rms_norm(x, weight, eps=1e-5), F.rms_norm(x, (64,), weight, 1e-5))
close(ops.rms_norm(x), F.rms_norm(x, (64,), None, 1e-6))
close(ops.layer_norm(x, weight, weight), F.layer_norm(x, (64,), weight, weight))
""",
    "str": """
x = torch.randn(3, 64)
close(ops.gelu(x, "tanh"), F.gelu(x, approximate="tanh"))
close(ops.gelu(x), F.gelu(x))
try:
    ops.gelu(x, "sigmoid")
except RuntimeError as error:
    assert "gelu: `approximate` has a value that the kernels do not take: sigmoid" in str(error)
else:
    raise AssertionError
""",
    "int, bool and dtype, two results": """
scores = torch.randn(7, 32)
weights, indices = ops.topk_softmax(scores, 4, True, True, torch.int64)
values, places = scores.softmax(-1).topk(4)
assert indices.dtype == torch.int64
assert torch.equal(indices, places)
close(weights, values / values.sum(-1, keepdim=True))
assert ops.topk_softmax(scores, 2)[1].dtype == torch.int32
""",
    "a result with another dtype": """
x, scale = torch.randn(4, 64), torch.tensor([0.5])
result = ops.silu(x, scale)
assert result.dtype == torch.float8_e4m3fn
close(result.float(), (F.silu(x) / 0.5).to(torch.float8_e4m3fn).float(), rtol=0.13, atol=0.01)
""",
    "an optional int": """
x = torch.randn(2, 33, 65)
assert torch.equal(ops.copy_transpose(x), x.mT.contiguous())
assert torch.equal(ops.copy_transpose(x, 32), x.mT.contiguous())
""",
    "optional numbers": """
x = torch.randn(6, 100)
close(ops.softmax_online(x), x.softmax(-1))
close(ops.softmax_online(x, scale=0.25), (0.25 * x).softmax(-1))
""",
    "results to write to": """
x, out = torch.randn(5, 64), torch.empty(5, 64)
version = out._version
ops.rms_norm.out(x, out=out)
close(out, F.rms_norm(x, (64,), None, 1e-6))
assert out._version > version
""",
    "tensors that are written to": """
key, value = torch.randn(2, 3, 2, 64).bfloat16()
caches = [torch.zeros(4, 16, 2, 64).bfloat16() for _ in range(2)]
slots = torch.tensor([5, 40, 17])
versions = [cache._version for cache in caches]
ops.kv_cache_write(key, value, *caches, slots)
for cache, rows, version in zip(caches, (key, value), versions):
    assert torch.equal(cache.view(64, 2, 64)[slots], rows)
    assert cache.view(64, 2, 64)[0].abs().sum() == 0
    assert cache._version > version
""",
    "no rows": """
assert ops.rms_norm(torch.empty(0, 64)).shape == (0, 64)
""",
    "a layout that only Python rearranges": """
try:
    ops.rms_norm(torch.randn(64, 5).t())
except RuntimeError as error:
    assert "rms_norm: without Python, `x` must have the shape, and be contiguous" in str(error)
else:
    raise AssertionError
""",
    "a backend that needs Python": """
close(ops.rms_norm(torch.ones(2, 8), backend="sm90"), torch.ones(2, 8))
try:
    ops.rms_norm(torch.ones(2, 8), backend="ref")
except RuntimeError as error:
    assert "rms_norm: `backend` must be 'sm90', 'auto' or None" in str(error)
    assert "got 'ref'" in str(error)
else:
    raise AssertionError
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
inputs = [torch.randn(3, 64) for _ in range(16)]
with ThreadPoolExecutor(4) as threads:
    for x, y in zip(inputs, threads.map(ops.rms_norm, inputs)):
        close(y, F.rms_norm(x, (64,), None, 1e-6))
""",
    "no leak of what comes in and goes out": """
x, weight = torch.randn(2, 64), torch.randn(64)
before = x._use_count(), weight._use_count()
for _ in range(10):
    assert ops.rms_norm(x, weight, backend="sm90")._use_count() == 1
    try:
        ops.rms_norm(x, weight[:63])
    except RuntimeError:
        pass
assert (x._use_count(), weight._use_count()) == before
""",
    "tiercel's Python in such a process": """
import importlib.machinery, importlib.util
path = os.environ["TIERCEL_WITHOUT_PYTHON"]
loader = importlib.machinery.ExtensionFileLoader("tiercel._C", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tiercel._C", loader))
loader.exec_module(module)
try:
    module.claim_torch_ops()
except RuntimeError as error:
    assert "registered already, from C++" in str(error)
else:
    raise AssertionError
""",
}


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", _PROLOGUE + code], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("case", _CASES)
def test_a_call_without_tiercels_python(case):
    done = _python(_CASES[case])
    assert done.returncode == 0, done.stderr


_EXPORT = """
import sys, torch, tiercel

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return tiercel.silu_and_mul(self.linear(tiercel.rms_norm(x, self.weight)))

torch.manual_seed(0)
model, x = Model().eval(), torch.randn(3, 64)
with torch.no_grad(), tiercel.use_backend("ref"):
    torch.save((x, model(x)), sys.argv[2])
    exported = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
"""

_RUN_PACKAGE = """
model = torch._inductor.aoti_load_package(sys.argv[1])
x, expected = torch.load(sys.argv[2])
with torch.no_grad():
    close(model(x), expected)
assert "tiercel" not in sys.modules
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aotinductors_packages_call_the_ops(tmp_path):
    files = [str(tmp_path / name) for name in ("model.pt2", "values.pt")]
    for code in (_EXPORT, _PROLOGUE + _RUN_PACKAGE):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *files],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, done.stderr
