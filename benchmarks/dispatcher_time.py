#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of operators that C++ calls through torch's dispatcher, on this machine's GPU.

python benchmarks/dispatcher_time.py [--out FILE] [--compiled]

A loop in C calls torch_call_dispatcher, as AOTInductor's packages and Inductor's C++ wrappers do:
"native" is an operator that needs no Python, "through Python" the same operator after
`_C.set_native_device(-1, False)`, "torch.ops" the call from Python. Each number is the median of
samples of 400 calls; the GPU is waited for between samples.

--compiled: also the host time for each of 32 chained operators of a compiled graph: Inductor's
Python wrapper, its C++ wrapper, and an AOTInductor package.
"""

import argparse
import ctypes
import functools
import json
import statistics
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import tiercel
from tiercel import _C

CALLS, SAMPLES, CHAINED = 400, 25, 32

# T: a tensor, t: an optional one, v: a plain value, n: None.
_LOOP = """
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
typedef uint64_t Value;
int32_t torch_call_dispatcher(const char*, const char*, Value*, uint64_t);
int32_t aoti_torch_new_tensor_handle(Value, Value*);
int32_t aoti_torch_delete_tensor_object(Value);
__attribute__((weak)) int32_t torch_new_stable_ivalue(Value**);

static Value* box(void) {
  Value* made = NULL;
  if (torch_new_stable_ivalue) torch_new_stable_ivalue(&made);
  else made = malloc(sizeof(Value));
  return made;
}

/* Nanoseconds a call; -1 if one fails. */
double loop(const char* name, const char* kinds, const Value* values, int results, int calls) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int n = 0; n < calls; ++n) {
    Value stack[32], handle;
    for (int i = 0; kinds[i]; ++i) {
      stack[i] = kinds[i] == 'v' ? values[i] : 0;
      if (kinds[i] != 'T' && kinds[i] != 't') continue;
      aoti_torch_new_tensor_handle(values[i], &handle);
      if (kinds[i] == 't') {
        Value* at = box();
        *at = handle;
        handle = (Value)at;
      }
      stack[i] = handle;
    }
    if (torch_call_dispatcher(name, "", stack, (Value)2 << 56 | (Value)10 << 48)) return -1;
    for (int i = 0; i < results; ++i) aoti_torch_delete_tensor_object(stack[i]);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / calls;
}
"""


def build(folder):
    """The loop, compiled and loaded."""
    source, library = folder / "loop.c", folder / "loop.so"
    source.write_text(_LOOP)
    libraries = Path(torch.__file__).parent / "lib"
    link = [f"-L{libraries}", "-l:libtorch_cpu.so", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", library, *link], check=True)
    loop = ctypes.CDLL(str(library)).loop
    loop.restype = ctypes.c_double
    return loop


def handle_of(tensor):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)


def described(schema, args):
    """Kinds and values for the loop, of tensors, numbers and None."""
    kinds, values = "", (ctypes.c_uint64 * 32)()
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else argument.default_value
        if value is None:
            kinds += "n"
        elif isinstance(value, torch.Tensor):
            kinds += "t" if "Optional" in str(argument.type) else "T"
            values[place] = handle_of(value)
        else:
            assert "Optional" not in str(argument.type) and not isinstance(value, str)
            kinds += "v"
            bits = (
                struct.pack("<d", value) if isinstance(value, float) else struct.pack("<q", value)
            )
            values[place] = struct.unpack("<Q", bits)[0]
    return kinds.encode(), values


def median(run):
    """Microseconds of a call; `run(calls)` returns the nanoseconds of one."""
    taken = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        taken.append(run(CALLS))
    torch.cuda.synchronize()
    assert min(taken) > 0, "a call failed"
    return statistics.median(taken[SAMPLES // 5 :]) / 1e3


def timed(call):
    def run(calls):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls

    return run


def operators():
    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    ops, x, weight = torch.ops.tiercel, normal(64, 128), normal(128)
    return {
        "rms_norm (x, weight)": (ops.rms_norm.default, (x, weight)),
        "add_rms_norm (x, residual, weight)": (ops.add_rms_norm.default, (x, x, weight)),
        "silu_and_mul (x, up)": (ops.silu_and_mul.default, (x, x)),
        "topk_softmax (64 x 128, 8)": (ops.topk_softmax.default, (x, 8)),
        "torch maximum (x, x)": (torch.ops.aten.maximum.default, (x, x)),
    }


def measure(loop):
    found = {}
    for what, (operator, args) in operators().items():
        operator(*args)
        schema = operator._schema
        kinds, values = described(schema, args)
        results = len(schema.returns)

        def run(calls, name=schema.name, kinds=kinds, values=values, results=results):
            return loop(name.encode(), kinds, values, results, calls)

        row = found[what] = {"native": median(run)}
        if schema.name.startswith("tiercel"):
            _C.set_native_device(-1, False)
            row["through Python"] = median(run)
            _C.set_native_device(torch.cuda.current_device(), True)
        row["torch.ops"] = median(timed(functools.partial(operator, *args)))
    return found


def measure_compiled(folder):
    """Microseconds for each operator of a chain."""
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, device="cuda", dtype=torch.bfloat16)

    class Chain(torch.nn.Module):
        def forward(self, x, weight):
            for _ in range(CHAINED):
                x = tiercel.rms_norm(x, weight)
            return x

    chain, found = Chain(), {}
    for what, options in (("Python wrapper", {}), ("C++ wrapper", {"cpp_wrapper": True})):
        torch._dynamo.reset()
        compiled = torch.compile(chain, options=options)
        compiled(x, weight)
        found[what] = median_of_chain(lambda compiled=compiled: compiled(x, weight))
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(chain, (x, weight)), package_path=str(folder / "chain.pt2")
    )
    runner = torch._inductor.aoti_load_package(package)
    runner(x, weight)
    found["AOTInductor package"] = median_of_chain(lambda: runner(x, weight))
    return found


def median_of_chain(call):
    taken = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        taken.append(timed(call)(CALLS // CHAINED))
    torch.cuda.synchronize()
    return statistics.median(taken[SAMPLES // 5 :]) / 1e3 / CHAINED


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--compiled", action="store_true", help="compiled graphs, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        found = {"C++": measure(build(folder))}
        if args.compiled:
            found["compiled"] = measure_compiled(folder)
    for what, row in found["C++"].items():
        print(f"{what:38}" + "".join(f"{name} {value:6.2f}   " for name, value in row.items()))
    for what, value in found.get("compiled", {}).items():
        print(f"{what:38}{value:6.2f}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
