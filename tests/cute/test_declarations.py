# SPDX-License-Identifier: Apache-2.0
"""The build compares what a CuTe DSL kernel's author declares with what the DSL compiled.

One function of linear_act is compiled; then its declaration is changed, one thing at a time, and
each change must be found. No GPU, no driver.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile

import pytest

ROOT = pathlib.Path.cwd()
SITE = (ROOT / os.environ["CUTE_SITE"]).absolute()
sys.path[:0] = [
    str(ROOT / "tools" / "cute"),
    str(ROOT / "python" / "tiercel" / "jit" / "dsl"),
    str(ROOT / "kernels" / "linear"),
    str(SITE / "nvidia_cutlass_dsl" / "dsl_packages"),
    str(SITE),
]
os.environ["CUTE_DSL_ARCH"] = "sm_90a"


@pytest.fixture(scope="module")
def compiled():
    """(function, kernels, host code) of a TMA-storing kernel in a cluster of two."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the DSL leaves copies of its cubins in the folder it is imported in
        import compile as cute_compile
        import linear_cute
        import oracle

        functions = [f for f in linear_cute.functions() if f.name == "linear_act_bf16_none_128x256"]
        assert len(functions) == 1
        hosts = []

        class Kept(oracle.HostCode):
            def __init__(self, *args):
                super().__init__(*args)
                hosts.append(self)

        oracle.HostCode = Kept
        (item,) = cute_compile.compile_all(functions, "sm_90a", "gcc", pathlib.Path(folder))
        os.chdir(ROOT)
        yield item.function, item.kernels, hosts[0]


def problems(compiled, **changes):
    import oracle

    function, kernels, host = compiled
    launch = dataclasses.replace(function.launches[0], **changes)
    changed = dataclasses.replace(function, launches=(launch,))
    return oracle.check(changed, "function0", host, kernels)[1]


def with_map(compiled, index, **changes):
    parameters = list(compiled[0].launches[0].parameters)
    parameters[index] = dataclasses.replace(parameters[index], **changes)
    return tuple(parameters)


def test_the_declaration_as_it_is(compiled):
    assert problems(compiled) == []


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("grid is", {"grid": ("blocks + 1", 1, 1)}),
        ("block is", {"block": (256, 1, 1)}),
        ("cluster is", {"cluster": (1, 1, 1)}),
        ("smem is", {"smem": 227 * 1024 - 2048}),
        ("other_attributes is", {"dependent": False}),
    ],
)
def test_a_wrong_launch(compiled, text, changes):
    found = problems(compiled, **changes)
    assert found and text in found[0]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("box", {"box": (64, 64)}),
        ("swizzle", {"swizzle": "64B"}),
        ("l2_promotion", {"l2_promotion": "none"}),
        ("shape", {"shape": ("m", "n")}),
        ("address", {"tensor": "w"}),
    ],
)
def test_a_wrong_tensor_map(compiled, field, changes):
    found = problems(compiled, parameters=with_map(compiled, 0, **changes))
    assert any(f"has {field} " in problem for problem in found), found


def test_wrong_parameters(compiled):
    parameters = list(compiled[0].launches[0].parameters)
    found = problems(compiled, parameters=tuple(parameters[:-1]))
    assert "has 15 parameters, 14 are declared" in found[0]
    parameters[8], parameters[9] = parameters[9], parameters[8]
    found = problems(compiled, parameters=tuple(parameters))
    assert any("parameter n is" in problem for problem in found)


def test_manifest():
    manifest = json.loads((ROOT / os.environ["MANIFEST"]).read_text())
    assert (manifest["schema"], manifest["arch"]) == (1, "sm_90a")
    kernels = manifest["kernels"]
    assert len({kernel["name"] for kernel in kernels}) == len(kernels)
    # The family's share of the wheel; what is rarely used belongs to JIT.
    assert sum(kernel["bytes"] for kernel in kernels) <= 4_250_000
    for kernel in kernels:
        assert kernel["dynamic_smem"] <= 227 * 1024
        ends = [(p["offset"], p["offset"] + p["size"]) for p in kernel["parameters"]]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), kernel["name"]
        for parameter in kernel["parameters"]:
            if parameter["kind"] == "tensor map":
                assert parameter["offset"] % 16 == 0 and parameter["size"] == 128
                assert all(1 <= side <= 256 for side in parameter["box"])


def test_arguments_are_bound_by_name(compiled):
    """Host code fills a struct; each parameter is bound to the member of its name and size."""
    import compile as cute_compile
    import emit
    import join

    function, kernels, _ = compiled
    item = cute_compile.Compiled(function, b"", "", kernels, [kernels[0].symbol])
    source = join.source(emit.pieces([item], "Arguments"), "header.h", "Variant", "table")
    (bound,) = re.findall(r"kMembers0_0\[\] = \{(.*)\};", source)
    members = re.findall(r"offsetof\(Arguments, (\w+)\)", bound)
    assert members[0].endswith("_map") and len(set(members)) == len(members)
    for member, (_, size) in zip(members, kernels[0].parameters, strict=True):
        assert f"static_assert(sizeof(Arguments::{member}) == {size});" in source
    assert f", kMembers0_0, {len(members)}}}" in source
    assert "Members" not in join.source(emit.pieces([item]), "header.h", "Variant", "table")
