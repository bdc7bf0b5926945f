# SPDX-License-Identifier: Apache-2.0
"""Runs one of cases.cu's programs and compares its result: run_case.py CASE. Needs a GPU, and
nvcc as tiercel.jit finds it. Under compute-sanitizer, see test_sanitizer_cases_gpu.py."""

import ctypes
import pathlib
import sys

import torch

import tiercel

SOURCE = pathlib.Path(__file__).with_name("cases.cu")
STEPS = 64
FLOATS = 32


def tensor_map(tensor):
    """The driver's description of a vector of floats, in the GPU's memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    encoded = (ctypes.c_uint64 * 24)()
    start = (ctypes.addressof(encoded) + 63) // 64 * 64
    whole, box = ctypes.c_uint64(FLOATS), ctypes.c_uint32(FLOATS)
    step, stride = ctypes.c_uint32(1), ctypes.c_uint64(0)
    float32, rank = 7, 1
    result = driver.cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(start), float32, rank, ctypes.c_void_p(tensor.data_ptr())),
        *(ctypes.byref(x) for x in (whole, stride, box, step)),
        *(0, 0, 0, 0),
    )
    assert result == 0, result
    return torch.frombuffer(bytearray(ctypes.string_at(start, 128)), dtype=torch.uint8).cuda()


def ring(by_engine, through_other="false"):
    kernel = tiercel.jit.cuda(SOURCE, f"sums_through_a_ring<{by_engine}, {through_other}, {STEPS}>")
    rows = torch.arange(STEPS * FLOATS, dtype=torch.float32).view(STEPS, FLOATS).cuda()
    out = torch.zeros(2, FLOATS, device="cuda")
    kernel(1, 96, rows, out)
    expected = rows.cpu().sum(0).expand(2, -1)
    assert torch.equal(out.cpu(), expected), "wrong sums"


def store(by_engine, read_more=0):
    """The floats behind those that were stored are nobody's: no result depends on them."""
    names = (f"store_floats<{by_engine}>", "read_floats")
    write, read = tiercel.jit.cuda(SOURCE, names)
    there = torch.empty(FLOATS + read_more, device="cuda")
    out = torch.zeros(FLOATS + read_more, device="cuda")
    write(1, FLOATS, tensor_map(there), there)
    read(1, FLOATS + read_more, there, out)
    assert torch.equal(out[:FLOATS].cpu(), torch.arange(FLOATS, dtype=torch.float32)), (
        "wrong floats"
    )


def run_blocks(name, blocks, threads, values, *more):
    """The kernel's output, a float a thread."""
    kernel = tiercel.jit.cuda(SOURCE, name)
    out = torch.zeros(blocks * threads, device="cuda")
    kernel(blocks, threads, values.cuda(), out, *more)
    return out.cpu()


def elected(by_one, expect):
    values = torch.arange(128, dtype=torch.float32)
    out = run_blocks(f"values_by_an_elected_lane<{by_one}, {expect}>", 1, 256, values, 128)
    assert torch.equal(out, values.roll(-33).repeat(2)), "wrong values"


def expect(at_once):
    values = torch.arange(128, dtype=torch.float32)
    out = run_blocks(f"set_up_and_expect<{at_once}>", 1, 128, values)
    assert torch.equal(out, values.flip(0)), "wrong values"


def one_warp(by_sending):
    steps = 16
    values = torch.arange(steps * 16, dtype=torch.float32)
    out = run_blocks(f"sums_through_one_warp<{by_sending}, {steps}>", 2, 256, values)
    assert torch.equal(out, (2 * values.sum()).expand(512)), "wrong sums"


def cluster_barrier(apart):
    steps, values = 5, torch.arange(256, dtype=torch.float32)
    out = run_blocks(f"cluster_barrier_in_roles<{apart}>", 1, 256, values, steps)
    threads, around = torch.arange(256)[:, None], torch.arange(steps)
    first = values[(threads + around) % 32].sum(1)
    others = -values[(3 * threads + around) % 256].sum(1)
    expected = torch.where(threads[:, 0] < 32, first, others) + values.flip(0)
    assert torch.equal(out, expected), "wrong sums"


CASES = {
    "ring-by-engine": lambda: ring("true"),
    "ring-by-threads": lambda: ring("false"),
    "ring-by-engine-for-another": lambda: ring("true", "true"),
    "ring-by-threads-for-another": lambda: ring("false", "true"),
    "store-by-engine": lambda: store("true"),
    "store-by-threads": lambda: store("false"),
    "rows-of-nobody": lambda: store("false", FLOATS),
    "elected-lane-and-expected-bytes": lambda: elected("true", "true"),
    "elected-lane": lambda: elected("true", "false"),
    "expected-bytes": lambda: elected("false", "true"),
    "all-lanes": lambda: elected("false", "false"),
    "set-up-and-expect": lambda: expect("true"),
    "set-up-barrier-expect": lambda: expect("false"),
    "one-warp-sends": lambda: one_warp("true"),
    "one-warp-writes": lambda: one_warp("false"),
    "cluster-barrier-in-roles": lambda: cluster_barrier("true"),
    "cluster-barrier-of-all": lambda: cluster_barrier("false"),
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print(sys.argv[1], "right")
