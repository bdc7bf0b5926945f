# SPDX-License-Identifier: Apache-2.0
"""Each kernel is compiled once for the four wheels, by the pinned toolkit alone."""

import collections
import json
import os
import pathlib

import pytest

# By the Python that the command line would name.
GRAPHS = {
    path.stem.removeprefix("graph_"): json.loads(path.read_text())
    for path in map(pathlib.Path, os.environ["GRAPHS"].split())
}
ALL = [action for graph in GRAPHS.values() for action in graph]
COMPILES = [action for action in ALL if action["mnemonic"] == "CudaCompile"]
KERNEL_COMPILES = ("CudaCompile", "CuteCompile")

# Outside of the build a compile may name the shell and its tools.
HOST_FOLDERS = ("/usr/bin", "/bin", "/usr/local/bin")


def short_paths(actions: list[dict]) -> dict[str, set[str]]:
    """Full output paths (the folder tells the configuration) by path below their root."""
    found = collections.defaultdict(set)
    for action in actions:
        for output in action["outputs"]:
            found[output.removeprefix(action["root"] + "/")].add(output)
    return found


@pytest.mark.parametrize("python", sorted(GRAPHS))
def test_kernels_are_compiled_once(python: str) -> None:
    compiles = [a for a in GRAPHS[python] if a["mnemonic"] in KERNEL_COMPILES]
    assert "CudaCompile" in {a["mnemonic"] for a in compiles}, (
        "the wheels hold no kernel: a rule on the way drops CcInfo"
    )
    twice = {name: paths for name, paths in short_paths(compiles).items() if len(paths) > 1}
    assert not twice, f"compiled in several configurations: {twice}"
    outputs = [output for action in compiles for output in action["outputs"]]
    assert len(outputs) == len(set(outputs))


def test_kernels_are_compiled_once_whatever_python_is_asked_for() -> None:
    compiles = [a for a in ALL if a["mnemonic"] in KERNEL_COMPILES]
    twice = {name: paths for name, paths in short_paths(compiles).items() if len(paths) > 1}
    assert not twice, f"a python_version on the command line compiles again: {twice}"


@pytest.mark.parametrize("python", sorted(GRAPHS))
def test_each_python_has_a_link_and_a_wheel(python: str) -> None:
    def outputs(mnemonic: str) -> list[str]:
        named = [a for a in GRAPHS[python] if a["mnemonic"] == mnemonic]
        return sorted({output for action in named for output in action["outputs"]})

    wheels = {pathlib.Path(path).name for path in outputs("RepairWheel")}
    assert len(wheels) == len(GRAPHS), wheels
    assert len([p for p in outputs("PyWheel") if p.endswith(".whl")]) == len(GRAPHS)
    assert len([p for p in outputs("CppLink") if p.endswith("/libtiercel.so")]) == len(GRAPHS)


def test_compiles_read_the_pinned_toolkit_only() -> None:
    for action in COMPILES:
        foreign = [path for path in action["inputs"] if path.startswith("/")]
        assert not foreign, f"{action['label']} reads {foreign}"
        toolkits = {p.split("/")[1] for p in action["inputs"] if p.endswith("/bin/nvcc")}
        assert len(toolkits) == 1, f"{action['label']} has nvcc from {toolkits or 'nowhere'}"
        words = [*action["argv"], *action["env"].values()]
        words = [part for word in words for part in word.replace("=", ":").split(":")]
        words = [word for word in words if word.startswith("/")]
        foreign = [word for word in words if not word.startswith(HOST_FOLDERS)]
        assert not foreign, f"{action['label']} is told of {foreign}"
        assert "/usr/local/cuda" not in json.dumps(action)


@pytest.mark.parametrize("mnemonic", ["CppCompile", "CppLink", "CudaCompile", "CuteCompile"])
def test_the_pinned_gcc_compiles_and_links(mnemonic: str) -> None:
    actions = [action for action in ALL if action["mnemonic"] == mnemonic]
    assert actions
    for action in actions:
        gcc = {word for word in action["argv"] if word.endswith(("/gcc", "/g++", "/cc", "/c++"))}
        assert len(gcc) == 1 and gcc.pop().endswith("cxx_toolchain/bin/gcc"), action["argv"]


def test_compiles_do_not_depend_on_the_folder() -> None:
    """nvcc puts a hash of the source's absolute path into names, unless it is told of another."""
    for action in COMPILES:
        told = [word for word in action["argv"] if "--orig_src_path_name=" in word]
        assert told, f"{action['label']}: two checkouts would make different wheels"
