# SPDX-License-Identifier: Apache-2.0
"""tiercel.jit with the CuTe DSL, from the installed wheel: compiled in a process of its own, once.

No GPU: what a launch passes on is checked, not the launch.
"""

import importlib.util
import os
import pathlib
import struct
import sys

import pytest

SITE = (pathlib.Path.cwd() / os.environ["CUTE_SITE"]).absolute()
sys.path[:0] = [str(SITE / "nvidia_cutlass_dsl" / "dsl_packages"), str(SITE)]

from tiercel import jit
from tiercel.jit import cute_kernel

SPEC = {"dtype": "bf16", "act": "relu_squared", "pingpong": False}
LARGE = SPEC | {"tile_m": 128, "tile_n": 128, "split_k": False}


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TIERCEL_JIT", "1")
    monkeypatch.setattr(cute_kernel, "_variants", {})
    cute_kernel.dsl_version.cache_clear()


def test_a_variant_that_is_not_precompiled(monkeypatch):
    first = cute_kernel.variant("linear", "linear_cute", **LARGE)
    assert first.name == "linear_act_bf16_relu_squared_128x128"
    assert cute_kernel.variant("linear", "linear_cute", **LARGE) is first
    assert "cutlass" not in sys.modules
    # As another process would: no compiler runs.
    monkeypatch.setattr(cute_kernel, "_variants", {})
    monkeypatch.setattr(cute_kernel.subprocess, "run", None)
    again = cute_kernel.variant("linear", "linear_cute", **LARGE)
    assert again is not first and again._about == first._about

    launches = []
    again._kernel = type("Kernel", (), {"launch": lambda self, *args: launches.append(args)})()
    tensors = {"x": "X", "w": "W", "y": "Y", "sums": "Y"}
    tensors |= dict.fromkeys(("bias", "residual", "x_scale", "w_scale"))
    scalars = {"m": 100, "n": 256, "k": 64, "group": 8, "blocks": 6}
    scalars |= {"save": 0, "x_step": 0, "w_step": 0}
    again(boxes={"x": (64, 64)}, **tensors, **scalars)
    ((grid, block, cluster, smem, dependent, labels, arguments),) = launches
    assert (grid, block, cluster, dependent) == ((6, 1, 1), (384, 1, 1), (1, 1, 1), True)
    assert smem == first._about["smem"] > 100_000
    assert labels == (
        *("x", "w", "y", "sums", "bias", "residual", "x_scale", "w_scale"),
        *("m", "n", "k", "group", "save", "x_step", "w_step"),
    )
    assert arguments[:8] == (
        ("X", (64, 64), 3, 2),
        ("W", (128, 64), 3, 2),
        ("Y", (64, 64), 3, 2),
        ("Y", (64, 64), 3, 2),
        *[bytes(8)] * 4,
    )
    assert arguments[8:] == tuple(struct.pack("<i", v) for v in (100, 256, 64, 8, 0, 0, 0))
    with pytest.raises(TypeError, match="128x128: a value is missing: .*blocks"):
        again(**tensors, **dict.fromkeys(scalars.keys() - {"blocks"}, 1))
    with pytest.raises(TypeError, match="`m` must be an int, got float"):
        again(**tensors, **scalars | {"m": 1.0})


def test_what_goes_wrong(monkeypatch):
    with pytest.raises(jit.CompileError, match="no kernel has tiles of 1x1"):
        cute_kernel.variant("linear", "linear_cute", **LARGE | {"tile_m": 1, "tile_n": 1})
    monkeypatch.setattr(cute_kernel, "dsl_version", lambda: None)
    with pytest.raises(NotImplementedError, match=r"needs nvidia-cutlass-dsl: pip install 'tierc"):
        cute_kernel.variant("linear", "linear_cute", **LARGE)
    monkeypatch.setenv("TIERCEL_JIT", "0")
    with pytest.raises(NotImplementedError, match="TIERCEL_JIT=1 compiles it"):
        cute_kernel.variant("linear", "linear_cute", **LARGE)


@pytest.mark.parametrize(
    ("op", "arguments", "block", "kinds"),
    [
        ("linear_act", lambda t: (t.bfloat16, "gelu"), 128, ["pointer"] * 4 + ["scalar"] * 8),
        (
            "rms_norm",
            lambda t: ((t.bfloat16, t.float32, t.bfloat16),),
            128,
            ["pointer"] * 6 + ["float"] + ["scalar"] * 6,
        ),
        ("nvfp4_gemv", lambda t: (), 256, ["pointer"] * 5 + ["scalar"] * 12),
    ],
)
def test_the_templates(monkeypatch, tmp_path, op, arguments, block, kinds):
    """What `tiercel new-kernel --language cute` writes compiles; its declaration fits."""
    torch = pytest.importorskip("torch")
    import tiercel.workbench.templates

    monkeypatch.chdir(tmp_path)  # the DSL leaves copies of its cubins
    path = pathlib.Path(tiercel.workbench.templates.__file__).with_name(f"{op}_cute.py")
    spec = importlib.util.spec_from_file_location(f"template_{op}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"template_{op}", module)
    spec.loader.exec_module(module)

    kernel = module.compiled(*arguments(torch))
    assert kernel._about["block"] == [block, 1, 1]
    assert [p["kind"] for p in kernel._about["parameters"]] == kinds
