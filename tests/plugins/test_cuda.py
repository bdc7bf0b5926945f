# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ in a plug-in, without a GPU: the compiler and the driver are stand-ins."""

import ctypes
import subprocess

import pytest
import torch

from tiercel.plugins import cuda

pytestmark = pytest.mark.torch

# Has one kernel, `twice(pointer, int, bool)`, and writes down what it is called with.
DRIVER = """
#include <string.h>
unsigned grid[3], block[3], shared, shared_limit;
int contexts, code_is_right, second;
void *stream, *first;
char third;
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)0x11; return 0; }
int cuLibraryLoadData(void** library, const char* code, void* a, void* b, unsigned c, void* d,
                      void* e, unsigned f) {
  code_is_right = strcmp(code, "cubin") == 0 && !a && !b && !c && !d && !e && !f;
  *library = (void*)0x22;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = (void*)0x33;
  return library == (void*)0x22 && strcmp(name, "twice") == 0 ? 0 : 500;
}
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  static const size_t sizes[] = {8, 4, 1};
  if (kernel != (void*)0x33 || index > 2) return 1;
  *size = sizes[index];
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  if (attribute == 8) shared_limit = value;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) { contexts += context == (void*)0x11; return 0; }
int cuCtxPopCurrent_v2(void** context) { --contexts; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "made up"; return 0; }
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned bytes, void* on, void** arguments, void* extra) {
  if (kernel != (void*)0x33 || contexts != 1 || extra) return 400;
  if (bx > 1024) return 1;
  grid[0] = gx, grid[1] = gy, grid[2] = gz, block[0] = bx, block[1] = by, block[2] = bz;
  shared = bytes, stream = on;
  first = *(void**)arguments[0], second = *(int*)arguments[1], third = *(char*)arguments[2];
  return 0;
}
"""
NVCC = """#!/bin/sh
echo "$@" >> {log}
case "$1" in --version) echo "release 13.0"; exit 0;; esac
while [ "$1" != -o ]; do shift; done
if grep -q BAD "$3"; then echo "$3(1): error: BAD"; exit 1; fi
printf cubin > "$2"
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    (tmp_path / "driver.c").write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", "driver.c", "-o", "driver.so"]
    subprocess.run(command, check=True, cwd=tmp_path)
    library = ctypes.CDLL(str(tmp_path / "driver.so"))
    monkeypatch.setattr(cuda, "_driver", lambda: library)
    return library


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """The calls of a compiler that writes "cubin"."""
    log = tmp_path / "calls"
    path = tmp_path / "nvcc"
    path.write_text(NVCC.format(log=log))
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    cuda._version.cache_clear()
    yield lambda: log.read_text().splitlines() if log.exists() else []
    cuda._version.cache_clear()


def values(*args):
    return cuda._values("twice", args)


def test_launch(driver):
    kernel = cuda._Kernel("twice", b"cubin", 0)
    x = torch.zeros(3)
    args = values(x, ctypes.c_int(-5), ctypes.c_bool(True))
    kernel.launch((7, 2, 1), (64, 1, 1), 100, 0xABCDEF123456, args)

    def read(name, kind):
        return list((kind * 3).in_dll(driver, name))

    assert read("grid", ctypes.c_uint) == [7, 2, 1] and read("block", ctypes.c_uint) == [64, 1, 1]
    assert ctypes.c_uint.in_dll(driver, "shared").value == 100
    assert ctypes.c_void_p.in_dll(driver, "stream").value == 0xABCDEF123456
    assert ctypes.c_void_p.in_dll(driver, "first").value == x.data_ptr()
    assert ctypes.c_int.in_dll(driver, "second").value == -5
    assert ctypes.c_char.in_dll(driver, "third").value == b"\1"
    assert ctypes.c_int.in_dll(driver, "code_is_right").value == 1
    assert ctypes.c_uint.in_dll(driver, "shared_limit").value == 0
    kernel.launch((1, 1, 1), (32, 1, 1), 100_000, 0, args)
    assert ctypes.c_uint.in_dll(driver, "shared_limit").value == 100_000
    with pytest.raises(RuntimeError, match=r"kernel twice: cuLaunchKernel failed: made up \(1\)"):
        kernel.launch((1, 1, 1), (2048, 1, 1), 0, 0, args)
    assert ctypes.c_int.in_dll(driver, "contexts").value == 0


def test_arguments_that_do_not_fit(driver):
    kernel = cuda._Kernel("twice", b"cubin", 0)
    one = (1, 1, 1)
    with pytest.raises(
        ValueError, match=r"parameters have \[8, 4, 1\] bytes, the arguments \[8, 8"
    ):
        kernel.launch(one, one, 0, 0, values(torch.zeros(1), ctypes.c_int64(1), ctypes.c_bool(0)))
    with pytest.raises(ValueError, match=r"the arguments \[8\]"):
        kernel.launch(one, one, 0, 0, values(torch.zeros(1)))
    with pytest.raises(TypeError, match="argument 2 must be a tensor or a ctypes value .*got int"):
        values(torch.zeros(1), 3)
    with pytest.raises(ValueError, match='the source has no kernel extern "C" other'):
        cuda._Kernel("other", b"cubin", 0)
    source = cuda.Source("")
    for args, where in (((torch.zeros(1),), "cpu"), ((), "none")):
        with pytest.raises(ValueError, match=f"tensors must be on one CUDA device, got {where}"):
            source.launch("twice", [1], [1], *args)


def test_compiles_once(nvcc):
    for _ in range(2):
        assert cuda.compile_cubin("good", "sm_90a", ["-DX=1"]) == b"cubin"
    version, compiled = nvcc()
    assert version == "--version"
    assert compiled.startswith("-cubin -arch=sm_90a -std=c++17 -O3 -lineinfo -DX=1 -o ")
    cuda.compile_cubin("good", "sm_90a")
    cuda.compile_cubin("good", "sm_100a")
    cuda.compile_cubin("other", "sm_100a")
    assert len(nvcc()) == 5


def test_errors_of_the_compiler(nvcc):
    with pytest.raises(cuda.CompileError) as info:
        cuda.compile_cubin("BAD", "sm_90a")
    assert str(info.value) == "nvcc failed: source.cu(1): error: BAD"


def test_finding_the_compiler(monkeypatch, tmp_path):
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="no CUDA compiler: install the CUDA toolkit 13 and set"):
        cuda.find_nvcc()
    (tmp_path / "nvcc").write_text("")
    (tmp_path / "nvcc").chmod(0o755)
    assert cuda.find_nvcc() == str(tmp_path / "nvcc")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    assert cuda.find_nvcc() == "/cuda/bin/nvcc"
    with pytest.raises(RuntimeError, match="the CUDA compiler /cuda/bin/nvcc does not run"):
        cuda.compile_cubin("", "sm_90a")
    monkeypatch.setenv("CUDACXX", "/other/nvcc")
    assert cuda.find_nvcc() == "/other/nvcc"


def test_architectures():
    assert [cuda._arch(*c) for c in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100a"]
