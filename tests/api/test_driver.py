# SPDX-License-Identifier: Apache-2.0
"""What is said of a missing, old or broken driver; with a driver library of our own, no GPU."""

import json

import pytest
from support import fake_driver

INFO = "import json; from tiercel import _C; print(json.dumps(_C.driver_info()))"


def driver_info(run_python, library):
    return json.loads(run_python(INFO, TIERCEL_LIBCUDA=library).stdout)


def test_no_driver(run_python):
    info = driver_info(run_python, "/nonexistent/libcuda.so.1")
    assert info["ok"] is False and info["version"] == 0
    assert info["message"].startswith(
        "no NVIDIA driver: /nonexistent/libcuda.so.1 could not be loaded"
    )


def test_old_driver(run_python, tmp_path):
    info = driver_info(run_python, fake_driver.build(tmp_path, version=12080))
    assert info == {
        "ok": False,
        "version": 12080,
        "message": "the NVIDIA driver supports CUDA 12.8, tiercel needs CUDA 13.0 "
        "(driver R580 or newer)",
    }


def test_good_driver(run_python, tmp_path):
    library = fake_driver.build(tmp_path, version=13020)
    assert driver_info(run_python, library) == {"ok": True, "version": 13020, "message": ""}
    code = "from tiercel import _C; print(_C.device_capability(0))"
    assert run_python(code, TIERCEL_LIBCUDA=library).stdout.strip() == "(9, 0)"


def test_no_such_device(run_python, tmp_path):
    library = fake_driver.build(tmp_path)
    code = "from tiercel import _C; _C.device_capability(7)"
    result = run_python(code, check=False, TIERCEL_LIBCUDA=library)
    assert "RuntimeError: CUDA device 7 could not be asked" in result.stderr


def test_driver_without_a_gpu(run_python, tmp_path):
    info = driver_info(run_python, fake_driver.build(tmp_path, init=100))
    assert info["message"].startswith("no CUDA device:")


def test_driver_that_does_not_start(run_python, tmp_path):
    info = driver_info(run_python, fake_driver.build(tmp_path, init=999))
    assert "cuInit returned FAKE_ERROR (made up)" in info["message"]


def test_driver_that_lacks_a_function(run_python, tmp_path):
    info = driver_info(run_python, fake_driver.build(tmp_path, no_launch=True))
    assert info["message"].endswith("lacks cuLaunchKernelEx")


def test_library_that_is_none(run_python, tmp_path):
    path = tmp_path / "not_a_library"
    path.write_text("text")
    assert "could not be loaded" in driver_info(run_python, path)["message"]


FORK = """
import os
from tiercel import _C
assert _C.driver_info()["ok"]
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, _C.driver_info()["message"].encode())
    os._exit(0)
print(os.read(reader, 1000).decode())
os.wait()
assert _C.driver_info()["ok"]
"""


def test_forked_child(run_python, tmp_path):
    out = run_python(FORK, TIERCEL_LIBCUDA=fake_driver.build(tmp_path)).stdout
    assert out.strip() == (
        "CUDA cannot be used in a forked child process; use the 'spawn' start method"
    )


def test_the_launch_says_it_too(run_python, tmp_path):
    from pathlib import Path

    code = """
from support.dlpack_tensor import ExchangeTensor as T
from tiercel import _C
_C.topk_softmax(T(4, 8), T(4, 2), T(4, 2, dtype="int32"), True, False)
"""
    library = fake_driver.build(tmp_path, version=12080)
    tests = Path(__file__).parents[1]
    result = run_python(code, path=[tests], check=False, TIERCEL_LIBCUDA=library)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "the NVIDIA driver supports CUDA 12.8, tiercel needs CUDA 13.0" in last


# From here on with PyTorch: tensors that pretend to be on cuda:0, on a machine without a GPU.
ON_FAKE_GPU = """
import warnings
import torch, tiercel
from tiercel.core import platform
real = platform.why_not
platform.why_not = lambda device: real(torch.device("cuda:0"))
"""
THREE_CALLS = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for rows in (1, 2, 3):
        weights, indices = tiercel.topk_softmax(torch.randn(rows, 8), 2)
        assert weights.shape == indices.shape == (rows, 2)
assert [w.category for w in caught] == [tiercel.FallbackWarning], caught
print(caught[0].message)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ({"capability": (8, 0)}, "GPU 0 has compute capability 8.0, and this wheel's kernels"),
        ({"version": 12080}, "the NVIDIA driver supports CUDA 12.8, tiercel needs CUDA 13.0"),
    ],
)
def test_ref_stands_in_with_one_warning(run_python, tmp_path, driver, text):
    library = fake_driver.build(tmp_path, **driver)
    code = ON_FAKE_GPU + THREE_CALLS
    out = run_python(code, TIERCEL_LIBCUDA=library).stdout
    assert out.startswith(f"topk_softmax runs on the slower 'ref' backend: {text}")
    strict = run_python(code, check=False, TIERCEL_LIBCUDA=library, TIERCEL_STRICT=1)
    last = strict.stderr.strip().splitlines()[-1]
    assert last.startswith(f"RuntimeError: topk_softmax: {text}")
    assert last.endswith("(TIERCEL_STRICT is set, so ref does not stand in)")


@pytest.mark.torch
def test_asking_for_sm90_there_is_an_error(run_python, tmp_path):
    library = fake_driver.build(tmp_path, capability=(10, 0))
    code = ON_FAKE_GPU + "tiercel.topk_softmax(torch.randn(2, 8), 2, backend='sm90')"
    result = run_python(code, check=False, TIERCEL_LIBCUDA=library)
    assert result.stderr.strip().splitlines()[-1] == (
        "RuntimeError: topk_softmax: backend 'sm90' was asked for, but GPU 0 has compute "
        "capability 10.0, and this wheel's kernels are built for 9.0 (H100, H200)"
    )
