# SPDX-License-Identifier: Apache-2.0
"""tiercel.jit.cuda on a GPU, with a real compiler."""

import ctypes
import threading

import pytest
import torch

import tiercel
from tiercel.jit import toolchain

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

SCALE = """
#include <cuda_bf16.h>
template <typename T, int N>
__global__ void scale(T* out, const T* x, float factor, long n, bool on) {
  const long i = blockIdx.x * static_cast<long>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = on ? T(float(x[i]) * factor * N) : T(0.0f);
}
extern "C" __global__ void fill(float* x, int n, float value) {
  extern __shared__ float shared[];
  shared[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x < n) x[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch):
    try:
        toolchain.find_nvcc()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))


def scaled(x, factor=3.0):
    names = ["scale<float, 2>", "scale<__nv_bfloat16, 2>"]
    kernels = dict(
        zip((torch.float32, torch.bfloat16), tiercel.jit.cuda(SCALE, names), strict=True)
    )
    out = torch.empty_like(x)
    kernels[x.dtype](-(-x.numel() // 128), 128, out, x, factor, x.numel(), True)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launch(dtype):
    x = torch.randn(1000, device="cuda", dtype=dtype)
    torch.testing.assert_close(scaled(x), (x.float() * 6).to(dtype))


def test_extern_c_and_much_shared_memory():
    x = torch.zeros(64, device="cuda")
    fill = tiercel.jit.cuda(SCALE, "fill")
    fill(1, 64, x, ctypes.c_int(64), ctypes.c_float(2.5), shared=100 * 1024)
    assert (x == 2.5).all()
    with pytest.raises(TypeError, match="argument 2 must be .*4 bytes as a ctypes value, got int"):
        fill(1, 64, x, 64, ctypes.c_float(2.5))


def test_first_launch_inside_a_graph_capture():
    x = torch.randn(100, device="cuda")
    kernel = tiercel.jit.cuda(SCALE, "scale<float, 1>")
    out = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(1, 128, out, x, 2.0, 100, True)
    assert not out.any()
    graph.replay()
    torch.testing.assert_close(out, 2 * x)


def test_the_callers_stream():
    x = torch.zeros(64, device="cuda")
    fill = tiercel.jit.cuda(SCALE, "fill")
    fill(1, 64, x, ctypes.c_int(0), ctypes.c_float(1), shared=256)  # compiled and loaded
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        fill(1, 64, x, ctypes.c_int(64), ctypes.c_float(1), shared=256)
        assert not stream.query()
    stream.synchronize()
    assert x.all()


def test_threads():
    x = torch.randn(100, device="cuda")
    outs = [None] * 8

    def work(i):
        outs[i] = scaled(x, float(i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in enumerate(outs):
        torch.testing.assert_close(out, x * (2.0 * i))


def test_saved(tmp_path):
    path = tmp_path / "scale.tiercel"
    tiercel.jit.cuda(SCALE, "fill", save=path)
    x = torch.zeros(64, device="cuda")
    fill = tiercel.jit.load(path, "fill")
    fill(1, 64, x, ctypes.c_int(64), ctypes.c_float(1), shared=256)
    assert x.all()


def test_a_launch_that_fails():
    fill = tiercel.jit.cuda(SCALE, "fill")
    x = torch.zeros(64, device="cuda")
    with pytest.raises(RuntimeError, match="kernel fill could not be launched"):
        fill(1, 2048, x, ctypes.c_int(64), ctypes.c_float(1))
    assert fill.compile().registers > 0
