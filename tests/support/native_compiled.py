# SPDX-License-Identifier: Apache-2.0
"""One operator in a compiled graph that C++ runs, in a process of its own: a crash or a compiler
that hangs is then one failed test.

    python native_compiled.py wrapper|package FOLDER

Prints as JSON: whether the operators are native, whether the bits are those of an eager call, and
how many calls of compiled graphs went on to Python.
"""

import json
import sys

import torch

import tiercel
from tiercel import _C


class Graph(torch.nn.Module):
    def forward(self, x, weight):
        return tiercel.rms_norm(x, weight)


def compiled(kind, folder, values):
    if kind == "wrapper":
        return torch.compile(Graph(), options={"cpp_wrapper": True}, fullgraph=True)
    program = torch.export.export(Graph(), values)
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/graph.pt2")
    return torch._inductor.aoti_load_package(path)


def main():
    kind, folder = sys.argv[1:]
    generator = torch.Generator("cuda").manual_seed(0)
    values = tuple(
        torch.randn(*shape, device="cuda", generator=generator).bfloat16()
        for shape in ((64, 128), (128,))
    )
    with torch.no_grad():
        expected = Graph()(*values)
        call = compiled(kind, folder, values)
        call(*values)  # tracing goes through Python
        before = _C.calls_through_python()
        results = [call(*values) for _ in range(3)]
    same = all(torch.equal(result, expected) for result in results)
    through_python = _C.calls_through_python() - before
    print(json.dumps([_C.has_native_ops(), same, through_python]))


if __name__ == "__main__":
    main()
