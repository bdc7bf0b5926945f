# SPDX-License-Identifier: Apache-2.0
"""Every library of CUDA kernels has a contract test of what the compiler made of it."""

import ast
import pathlib
import sys

for folder in ("tests/build", "tools/lint"):
    sys.path.insert(0, str(pathlib.Path(folder).absolute()))

import workspace

sys.path.insert(0, str(workspace.root() / "tools" / "airgap"))

import starlark_reader

KERNELS = workspace.root() / "kernels"


def given(build: pathlib.Path, rule: str, attribute: str) -> set[str]:
    """The values of a string attribute in all calls of a rule."""
    module = starlark_reader.parse(build.read_text(), str(build))
    calls = [n for n in ast.walk(module.tree) if starlark_reader.call_name(n) == rule]
    return {ast.literal_eval(starlark_reader.keywords(call)[attribute]) for call in calls}


def test_every_cuda_library_has_a_contract_test() -> None:
    folders = {source.parent for source in KERNELS.rglob("*.cu")}
    assert folders
    for folder in folders:
        libraries = given(folder / "BUILD", "sm90_cuda_library", "name")
        tested = given(folder / "BUILD", "kernel_contract_test", "library")
        assert libraries, f"{folder}: .cu files, and no sm90_cuda_library"
        missing = {":" + name for name in libraries} - tested
        assert not missing, f"{folder}/BUILD: no kernel_contract_test of {missing}"
