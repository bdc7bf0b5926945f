# SPDX-License-Identifier: Apache-2.0
"""One operator in a compiled graph that C++ runs, in a process of its own: a crash or a compiler
that hangs is then one failed test.

    python native_compiled.py wrapper
    python native_compiled.py write|load PACKAGE

Inductor's C++ wrapper; AOTInductor's package, written and loaded. `wrapper` and `load` print as
JSON: whether the operators are native, whether the bits are those of an eager call, and how many
calls of the compiled graph went on to Python.
"""

import json
import sys

import torch
from torch._inductor import config

import tiercel
from tiercel import _C

# g++ takes most of the time, and more of it for a header that only one graph uses.
config.cpp_cache_precompile_headers = config.aot_inductor.precompile_headers = False
config.aot_inductor.compile_wrapper_opt_level = "O0"


class Graph(torch.nn.Module):
    def forward(self, x, weight):
        return tiercel.rms_norm(x, weight)


def arguments():
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((64, 128), (128,))
    made = [torch.randn(*shape, device="cuda", generator=generator) for shape in shapes]
    return tuple(tensor.bfloat16() for tensor in made)


def check(call, values):
    expected = Graph()(*values)
    call(*values)  # tracing goes through Python
    before = _C.calls_through_python()
    same = all(torch.equal(call(*values), expected) for _ in range(3))
    print(json.dumps([_C.has_native_ops(), same, _C.calls_through_python() - before]))


@torch.no_grad()
def main():
    what, *path = sys.argv[1:]
    values = arguments()
    if what == "wrapper":
        check(torch.compile(Graph(), options={"cpp_wrapper": True}, fullgraph=True), values)
    elif what == "write":
        program = torch.export.export(Graph(), values)
        torch._inductor.aoti_compile_and_package(program, package_path=path[0])
    else:
        check(torch._inductor.aoti_load_package(path[0]), values)


if __name__ == "__main__":
    main()
