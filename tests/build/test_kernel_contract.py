# SPDX-License-Identifier: Apache-2.0
"""What each kernel promised its compiled form to be, against what the compiler made.

The promise is contract.json beside the kernels:

    {"kernels": [{
        "name": "topk_softmax_by_rounds<.*>",           a pattern that the whole name fits
        "count": 12,                                    how many kernels it covers
        "registers": 64,                                at most, a thread
        "shared": 0,                                    bytes of static shared memory, at most (0)
        "needs": {"128-bit loads": "LDG\\\\.E\\\\.128.*"},    opcodes that each kernel has
        "lacks": {"double precision": "D(ADD|MUL|FMA)"} opcodes that none has
    }]}

Names are demangled, without tiercel::, the anonymous namespace and parameters. A kernel may fit
several entries and keeps to all of them; one that fits none fails the test. For all kernels: code
for sm_90a only, nothing in local memory or on a stack.
"""

import json
import os
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tests/build").absolute()))

import cubin

CONTRACT = json.loads(pathlib.Path(os.environ["CONTRACT"]).read_text())["kernels"]
OBJECTS = [
    file
    for path in map(pathlib.Path, os.environ["OBJECTS"].split())
    for file in (sorted(path.glob("*.cubin")) if path.is_dir() else [path])
]
TOOLS = cubin.Cuobjdump(pathlib.Path(os.environ["BINUTILS"].split()[0]).absolute().parent)
ARCHITECTURES = {"sm_90a"}
LOCAL_MEMORY = re.compile(r"(LDL|STL)\b.*")


@pytest.fixture(scope="module")
def kernels() -> list[cubin.CompiledKernel]:
    return TOOLS.kernels(OBJECTS)


def fits(entry: dict, kernel: cubin.CompiledKernel) -> bool:
    return re.fullmatch(entry["name"], kernel.name) is not None


def has(kernel: cubin.CompiledKernel, pattern: str) -> bool:
    return any(re.fullmatch(pattern, opcode) for opcode in kernel.opcodes)


def problems_of(kernel: cubin.CompiledKernel, entry: dict) -> list[str]:
    problems = []
    for key, bound in (("registers", entry["registers"]), ("shared", entry.get("shared", 0))):
        if getattr(kernel, key) > bound:
            problems.append(f"{key}: {getattr(kernel, key)}, promised at most {bound}")
    for what, pattern in entry.get("needs", {}).items():
        if not has(kernel, pattern):
            problems.append(f"no {what} ({pattern})")
    for what, pattern in entry.get("lacks", {}).items():
        if has(kernel, pattern):
            problems.append(f"has {what} ({pattern})")
    return [f"{kernel.name}: {problem}" for problem in problems]


@pytest.mark.parametrize("file", OBJECTS, ids=lambda file: file.name)
def test_code_is_for_hopper_only(file: pathlib.Path) -> None:
    assert TOOLS.architectures(file) == ARCHITECTURES


def test_every_kernel_is_covered(kernels: list) -> None:
    assert kernels, "no kernel in " + ", ".join(map(str, OBJECTS))
    uncovered = [k.name for k in kernels if not any(fits(entry, k) for entry in CONTRACT)]
    assert not uncovered, "no entry of contract.json covers\n" + "\n".join(uncovered)


@pytest.mark.parametrize("entry", CONTRACT, ids=lambda entry: entry["name"])
def test_entry_covers_its_kernels(kernels: list, entry: dict) -> None:
    unknown = set(entry) - {"name", "count", "registers", "shared", "needs", "lacks"}
    assert not unknown, f"contract.json: {unknown} is not a key"
    assert sum(fits(entry, kernel) for kernel in kernels) == entry["count"]


@pytest.mark.parametrize("entry", CONTRACT, ids=lambda entry: entry["name"])
def test_kernels_keep_their_promise(kernels: list, entry: dict) -> None:
    kept = [kernel for kernel in kernels if fits(entry, kernel)]
    problems = [problem for kernel in kept for problem in problems_of(kernel, entry)]
    assert not problems, "\n".join(problems)


def test_nothing_spills(kernels: list) -> None:
    for kernel in kernels:
        assert (kernel.stack, kernel.local) == (0, 0), f"{kernel.name} uses local memory"
        used = [opcode for opcode in kernel.opcodes if LOCAL_MEMORY.fullmatch(opcode)]
        assert not used, f"{kernel.name} has {used}"
