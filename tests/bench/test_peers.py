# SPDX-License-Identifier: Apache-2.0
"""Finding the other implementations: by package, by library, or with the reason why not."""

import importlib.util
import os
import sys
import types

import pytest
import torch

import tiercel
from tiercel.workbench.bench import peers
from tiercel.workbench.bench.launch import Unsupported
from tiercel.workbench.bench.peers import (
    Missing,
    deepgemm,
    fa3,
    flashkda,
    vllm,
    vllm_sampler,
    vllm_triton,
)

PACKAGES = {
    "causal-conv1d": ("causal_conv1d", "causal-conv1d"),
    "fa4": ("flash_attn", "flash-attn-4"),
    "fla": ("fla", "fla-core"),
    "flashinfer": ("flashinfer", "flashinfer-python"),
    "flashinfer.batch": ("flashinfer", "flashinfer-python"),
    "flashinfer.cuda_cores": ("flashinfer", "flashinfer-python"),
    "flashinfer.fa2": ("flashinfer", "flashinfer-python"),
    "flashinfer.from_probs": ("flashinfer", "flashinfer-python"),
    "flashinfer.xqa": ("flashinfer", "flashinfer-python"),
    "flashqla": ("flash_qla", "flash-qla"),
    "humming": ("humming", "humming-kernels"),
    "liger": ("liger_kernel", "liger-kernel"),
    "quack": ("quack", "quack-kernels"),
    "quack.tuned": ("quack", "quack-kernels"),
    "sonicmoe": ("sonicmoe", "sonic-moe"),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A machine with torch and without any of them."""
    real = importlib.util.find_spec
    others = {module for module, _ in PACKAGES.values()} | {"vllm", "deep_gemm"}
    gone = lambda name: None if name.partition(".")[0] in others else real(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    monkeypatch.delenv("TIERCEL_BENCH_VLLM", raising=False)
    monkeypatch.delenv("TIERCEL_BENCH_VLLM_VERSION", raising=False)
    monkeypatch.delenv("TIERCEL_BENCH_VLLM_SOURCE", raising=False)


@pytest.fixture
def loaded(monkeypatch):
    """The libraries that torch is told to load, which it does not."""
    names = []
    monkeypatch.setattr(torch.ops, "load_library", names.append)
    return names


def test_those_that_are_not_here_say_why():
    versions, missing = peers.find(list(peers.load().values()))
    cudnn = versions.pop("cudnn", None)
    assert cudnn is None or cudnn.endswith(f"of torch {torch.__version__}")
    assert versions == {
        "cublaslt": f"of torch {torch.__version__}",
        "separate": tiercel.__version__,
        "torch": torch.__version__,
        "torch.compile": torch.__version__,
    }
    for name, (_, distribution) in PACKAGES.items():
        assert missing[name] == f"the package {distribution} is not installed"
    for name in ("vllm", "vllm.machete", "fa3", "flashkda"):
        assert "TIERCEL_BENCH_VLLM names no library" in missing[name]
    for name in ("vllm.triton", "vllm.sampler"):
        assert "TIERCEL_BENCH_VLLM_SOURCE names no folder" in missing[name]
    assert "deep_gemm" in missing["deepgemm"]


def test_a_package_is_imported_with_what_it_wants_to_know(monkeypatch, tmp_path):
    (tmp_path / "somepeer.py").write_text("import os\nseen = os.environ['SOMEPEER_ARCH']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("SOMEPEER_ARCH", raising=False)
    find = peers.package("some-peer", "somepeer", SOMEPEER_ARCH="sm_90a")
    try:
        assert find() == "unknown"
        assert sys.modules["somepeer"].seen == "sm_90a"
        monkeypatch.setenv("SOMEPEER_ARCH", "mine")
        find()
        assert os.environ["SOMEPEER_ARCH"] == "mine"
    finally:
        sys.modules.pop("somepeer", None)
        os.environ.pop("SOMEPEER_ARCH", None)


def test_a_package_that_does_not_import_says_so(monkeypatch, tmp_path):
    (tmp_path / "brokenpeer.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = peers.Peer("broken", peers.package("broken-peer", "brokenpeer"))
    assert peers.find([broken])[1] == {"broken": "OSError: libcuda.so.1: cannot open"}


def libraries(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no library")
    return folder


def test_vllm_by_folder_by_library_and_by_both(monkeypatch, tmp_path, loaded):
    one = libraries(tmp_path / "a", "_moe_C_stable.abi3.so", "_C_stable.abi3.so", "other.so")
    two = libraries(tmp_path / "b", "_moe_C.abi3.so")
    monkeypatch.setenv("TIERCEL_BENCH_VLLM_VERSION", "0.33.0")
    both = [str(one / "_moe_C_stable.abi3.so"), str(one / "_C_stable.abi3.so")]
    for named, expected in [
        (str(one), both),
        (both[0], both),
        (f"{one}{os.pathsep}{two}", [*both, str(two / "_moe_C.abi3.so")]),
        (str(one / "other.so"), [str(one / "other.so"), *both]),
    ]:
        loaded.clear()
        monkeypatch.setenv("TIERCEL_BENCH_VLLM", named)
        assert peers.find([vllm.PEER]) == ({"vllm": "0.33.0"}, {})
        assert loaded == expected


def test_vllm_that_is_named_wrongly(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERCEL_BENCH_VLLM", str(tmp_path / "none.so"))
    assert "none.so is no file and no folder" in peers.find([vllm.PEER])[1]["vllm"]
    monkeypatch.setenv("TIERCEL_BENCH_VLLM", str(tmp_path))
    assert "neither a _moe_C nor a _C library" in peers.find([vllm.PEER])[1]["vllm"]
    libraries(tmp_path, "_C.abi3.so")
    assert peers.find([vllm.PEER])[1]["vllm"].startswith("OSError")


@pytest.mark.parametrize(
    ("peer", "module"),
    [
        (vllm_triton.PEER, "vllm.v1.attention.ops.triton_unified_attention"),
        (vllm_sampler.PEER, "vllm.v1.worker.gpu.sample.gumbel"),
    ],
)
def test_vllm_s_source_that_is_not_there(monkeypatch, tmp_path, peer, module):
    monkeypatch.setenv("TIERCEL_BENCH_VLLM_SOURCE", str(tmp_path))
    assert f"has no {module}" in peers.find([peer])[1][peer.name]


def test_an_operator_that_this_vllm_lacks():
    with pytest.raises(Unsupported, match=r"no _moe_C\.not_there"):
        vllm.operator("_moe_C", "not_there")


@pytest.mark.parametrize(
    ("peer", "library"),
    [(fa3.PEER, "vllm_flash_attn/_vllm_fa3_C"), (flashkda.PEER, "_flashkda_C")],
)
def test_a_peer_beside_vllm_s_libraries(monkeypatch, tmp_path, loaded, peer, library):
    monkeypatch.setenv("TIERCEL_BENCH_VLLM", str(libraries(tmp_path, "_moe_C.so")))
    assert f"no {library} library" in peers.find([peer])[1][peer.name]
    libraries(tmp_path, f"{library}.abi3.so")
    assert peers.find([peer])[0] == {peer.name: "of vllm unknown"}
    assert loaded == [str(tmp_path / f"{library}.abi3.so")]


def test_deepgemm_is_vllm_s_copy_where_there_is_no_other(monkeypatch):
    copy = types.ModuleType("vllm.third_party.deep_gemm")
    copy.__version__ = "2.1"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == copy.__name__ or None)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.third_party", types.ModuleType("vllm.third_party"))
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    assert deepgemm.module() is copy
    assert peers.find([deepgemm.PEER])[0] == {"deepgemm": "2.1"}


def test_which_peers_are_meant():
    found = peers.load()
    assert [p.name for p in peers.choose(found, "torch, quack")] == ["torch", "quack"]
    assert peers.choose(found, "none") == []
    assert {p.name for p in peers.choose(found, "all")} == set(found)
    with pytest.raises(Exception, match="no peer 'apex'; there are causal-conv1d, cublaslt, "):
        peers.choose(found, "torch,apex")
    with pytest.raises(Missing):
        found["quack"].find()
