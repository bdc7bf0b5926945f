# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of experts' MLPs and grouped products: checks, and a peer's configuration."""

import json
import types

import pytest
import torch

import tiercel
from tiercel.workbench.bench import adapters, ops, ours, vllm_experts
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Unsupported, WrongResult
from tiercel.workbench.bench.peers import deepgemm

BENCHES = ops.load()
HALF = {"T": 9, "E": 4, "k": 2, "H": 256, "I": 128, "bs": 8}
MANY = {"T": 150, "E": 2, "k": 2, "H": 256, "I": 256, "act": "silu", "weights": "same"}
GROUPS = {"M": 70, "E": 3, "N": 24, "K": 40, "aligned": False}


def solved(op, params):
    """A case's inputs, its reference and our launch on ref."""
    case = Case("moe", op, "bfloat16", params)
    bench = BENCHES[op]
    assert bench.invalid(params) is None
    inputs = bench.make(case, "cpu", 0)
    (impl,) = ours.impls(bench, ["ref"])
    return case, inputs, bench.reference(case, inputs), impl.prepare(case, inputs)


@pytest.mark.parametrize("weights", ["same", "float8", "float8_blocks"])
@pytest.mark.parametrize("op", ["moe_up", "moe_down"])
def test_halves_agree_with_float64(op, weights):
    case, inputs, expected, launch = solved(op, HALF | {"weights": weights})
    outputs = launch.run()
    error = BENCHES[op].check(inputs, expected, outputs, launch)
    assert 1e-4 < error.rms < 4e-3
    with pytest.raises(WrongResult):
        BENCHES[op].check(inputs, expected, (outputs[0] * 1.1,), launch)
    narrow = case["weights"] != "same"
    assert all(inputs[n].element_size() == (1 if narrow else 2) for n in ("x", f"w_{op[4:]}"))


@pytest.mark.parametrize("op", ["grouped_gemm", "grouped_gemm_backward"])
def test_grouped_products_agree_with_float64(op):
    _, inputs, expected, launch = solved(op, GROUPS)
    outputs = launch.run()
    error = BENCHES[op].check(inputs, expected, outputs, launch)
    assert 1e-4 < error.rms < 4e-3
    for spoiled in range(len(outputs)):
        wrong = list(outputs)
        wrong[spoiled] = wrong[spoiled].clone()
        wrong[spoiled].view(-1)[7] += 1
        with pytest.raises(WrongResult):
            BENCHES[op].check(inputs, expected, wrong, launch)


@pytest.mark.parametrize(
    ("format", "float8"), [("mxfp4", False), ("nvfp4", False), ("mxfp4", True), ("int4", True)]
)
def test_four_bit_experts_agree_with_float64(format, float8):  # noqa: A002
    sizes = {"T": 40, "E": 3, "k": 2, "H": 256, "I": 128}
    problem, inputs, expected, launch = solved(
        "w4_moe", sizes | {"format": format, "float8": float8}
    )
    outputs = launch.run()
    error = BENCHES["w4_moe"].check(inputs, expected, outputs, launch)
    assert error.rms < (0.044 if float8 else 8e-3)
    with pytest.raises(WrongResult):
        BENCHES["w4_moe"].check(inputs, expected, (outputs[0] * 1.5,), launch)
    wrong = problem.params | {"format": "nvfp4", "float8": True}
    assert "nvfp4" in BENCHES["w4_moe"].invalid(wrong)


FLOAT8 = {"M": 70, "E": 3, "N": 128, "K": 256, "capacity": 0, "aligned": False}


@pytest.mark.parametrize("capacity", [0, 40])
def test_grouped_products_of_float8_agree_with_float64(capacity):
    bench = BENCHES["grouped_gemm_fp8"]
    _, inputs, expected, launch = solved("grouped_gemm_fp8", FLOAT8 | {"capacity": capacity})
    (result,) = launch.run()
    assert 1e-4 < bench.check(inputs, expected, (result,), launch).rms < 4e-3
    wrong = result.clone()
    wrong[0, 0] += 1
    with pytest.raises(WrongResult):
        bench.check(inputs, expected, (wrong,), launch)
    assert "multiples of 128" in bench.invalid(FLOAT8 | {"K": 72})
    assert "follow one another" in bench.invalid(FLOAT8 | {"aligned": True})


@pytest.mark.parametrize("kind", ["aligned", "capacity"])
def test_deepgemm_gets_float8_rows_by_their_group(monkeypatch, kind):
    """Its names for both layouts, and its scales: a column after the other."""

    def multiply(a, w, out, *rows):
        (x, x_scale), (w, w_scale) = a, w
        assert x_scale.stride(-2) == 1 and w_scale.is_contiguous()
        scales = {"x_scale": x_scale, "w_scale": w_scale}
        if kind == "capacity":
            counts, expected = rows
            assert counts.dtype == torch.int32 and expected == 24
            out.copy_(tiercel.ref.grouped_gemm(x, w, None, counts=counts, **scales))
        else:
            (of_rows,) = rows
            assert of_rows.dtype == torch.int32
            sizes = of_rows.long().bincount(minlength=len(w))
            offsets = torch.cat([sizes[:0].new_zeros(1), sizes.cumsum(0)])
            out.copy_(tiercel.ref.grouped_gemm(x, w, offsets, **scales))

    names = ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_gemm_nt_contiguous")
    name = names[kind == "aligned"]
    monkeypatch.setattr(deepgemm, "module", lambda: types.SimpleNamespace(**{name: multiply}))
    changed = {"aligned": True, "M": 384} if kind == "aligned" else {"capacity": 40}
    case, inputs, expected, _ = solved("grouped_gemm_fp8", FLOAT8 | changed)
    adapter = adapters.load()["deepgemm"]["grouped_gemm_fp8"]
    launch = adapter(case, inputs)
    BENCHES["grouped_gemm_fp8"].check(inputs, expected, launch.run(), launch)
    case, inputs, *_ = solved("grouped_gemm_fp8", FLOAT8)
    with pytest.raises(Unsupported, match="multiples of 128"):
        adapter(case, inputs)


def test_torch_s_float8_product_has_scales_of_rows(monkeypatch):
    def multiply(x, w, of_x, of_w, offs, out_dtype, use_fast_accum):
        assert of_x.shape == (70,) and of_w.shape == (3, 128) and use_fast_accum
        offsets = torch.cat([offs.new_zeros(1), offs])
        return tiercel.ref.grouped_gemm(x.float(), w.mT.float(), offsets).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply, raising=False)
    case, inputs, *_ = solved("grouped_gemm_fp8", FLOAT8)
    adapter = adapters.load()["torch"]["grouped_gemm_fp8"]
    launch = adapter(case, inputs)
    assert not launch.exact
    (result,) = launch.run()
    assert 1e-4 < launch.check((result,)).rms < 4e-3
    with pytest.raises(WrongResult):
        launch.check((result * 1.1,))
    case, inputs, *_ = solved("grouped_gemm_fp8", FLOAT8 | {"capacity": 40})
    with pytest.raises(Unsupported, match="follow one another"):
        adapter(case, inputs)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("op", ["grouped_gemm", "grouped_gemm_backward"])
def test_torch_s_grouped_products_are_the_same(op):
    case, inputs, expected, _ = solved(op, GROUPS)
    launch = adapters.load()["torch"][op](case, inputs)
    BENCHES[op].check(inputs, expected, launch.run(), launch)


TRAINING = {"T": 40, "E": 4, "k": 2, "H": 64, "I": 48, "act": "silu"}


def test_gradients_agree_with_float64():
    _, inputs, expected, launch = solved("fused_moe_with_gradient", TRAINING)
    bench, outputs = BENCHES["fused_moe_with_gradient"], launch.run()
    assert 1e-4 < bench.check(inputs, expected, outputs, launch).rms < 8e-3
    for spoiled in range(5):
        wrong = list(outputs)
        wrong[spoiled] = wrong[spoiled] * 1.1
        with pytest.raises(WrongResult):
            bench.check(inputs, expected, wrong, launch)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_torch_s_gradients_are_the_same():
    case, inputs, expected, _ = solved("fused_moe_with_gradient", TRAINING)
    launch = adapters.load()["torch"]["fused_moe_with_gradient"](case, inputs)
    BENCHES["fused_moe_with_gradient"].check(inputs, expected, launch.run(), launch)


def test_deepgemm_gets_rows_by_their_group(monkeypatch):
    """Groups of whole blocks of 128 rows, and the number of its group for each row."""

    def multiply(x, w, out, of_rows):
        assert of_rows.dtype == torch.int32 and of_rows.view(-1, 128).diff().count_nonzero() == 0
        out.copy_(torch.einsum("mk,mnk->mn", x.float(), w[of_rows.long()].float()))

    fake = types.SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=multiply)
    monkeypatch.setattr(deepgemm, "module", lambda: fake)
    bench, adapter = BENCHES["grouped_gemm"], adapters.load()["deepgemm"]["grouped_gemm"]
    case, inputs, expected, _ = solved("grouped_gemm", GROUPS | {"M": 512, "aligned": True})
    launch = adapter(case, inputs)
    bench.check(inputs, expected, launch.run(), launch)
    assert "multiple of 128" in bench.invalid(GROUPS | {"aligned": True})
    case, inputs, *_ = solved("grouped_gemm", GROUPS)
    with pytest.raises(Unsupported, match="multiples of 128"):
        adapter(case, inputs)


def _deepgemm_product(kinds):
    """A product that holds its arguments against what DeepGEMM takes."""

    def multiply(a, w, out, of_rows):
        blocks = of_rows.view(-1, 128)
        assert of_rows.dtype == torch.int32 and int(blocks[:, 0].min()) >= 0
        # Of each block one expert; padding only at its end.
        assert bool(((blocks == blocks[:, :1]) | (blocks == -1)).all())
        assert bool((blocks[:, 1:] >= 0).le(blocks[:, :-1] >= 0).all())
        if isinstance(a, tuple):
            (a, a_scale), (w, w_scale) = a, w
            assert a_scale.stride() == (1, len(a)) and w_scale.is_contiguous()
            w = w.float() * w_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            a = a.float() * a_scale.repeat_interleave(128, 1)
        kinds.append(tuple(w.shape[1:]))
        out.fill_(torch.nan)  # what padding gets is nobody's
        for expert in range(len(w)):
            out[of_rows == expert] = (a[of_rows == expert].float() @ w[expert].float().T).bfloat16()

    return multiply


@pytest.mark.parametrize("weights", ["same", "float8_blocks"])
def test_deepgemm_s_products_beside_fused_moe(monkeypatch, weights):
    kinds = []
    kind = "fp8" if weights == "float8_blocks" else "bf16"
    name = f"m_grouped_{kind}_gemm_nt_contiguous"
    fake = types.SimpleNamespace(**{name: _deepgemm_product(kinds)})
    monkeypatch.setattr(deepgemm, "module", lambda: fake)
    params = MANY | {"weights": weights}
    inputs = BENCHES["fused_moe"].make(Case("moe", "fused_moe", "bfloat16", params), "cpu", 0)
    adapter = adapters.load()["deepgemm"]["fused_moe"]
    launch = adapter(Case("moe", "fused_moe", "bfloat16", params), inputs)
    assert not launch.exact and launch.details["part"]
    outputs = launch.run()
    assert kinds == [(512, 256), (256, 256)]  # the whole of w_up and of w_down
    rows = int((inputs["topk_ids"].flatten().bincount() + 127).div(128).floor().sum()) * 128
    assert [tuple(out.shape) for out in outputs] == [(rows, 512), (rows, 256)]
    assert 1e-4 < launch.check(outputs).rms < 4e-3
    for spoiled in range(2):
        wrong = [out.clone() for out in outputs]
        wrong[spoiled][0, 7] += 1
        with pytest.raises(WrongResult):
            launch.check(tuple(wrong))


@pytest.mark.parametrize(
    ("dtype", "changed", "reason"),
    [
        ("float16", {}, "it takes"),
        ("bfloat16", {"weights": "float8"}, "it takes"),
        ("bfloat16", {"T": 100}, "padding"),
    ],
)
def test_deepgemm_s_products_are_for_many_tokens_and_its_scales(dtype, changed, reason):
    case = Case("moe", "fused_moe", dtype, MANY | changed)
    with pytest.raises(Unsupported, match=reason):
        adapters.load()["deepgemm"]["fused_moe"](case, {})


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ("same", ""),
        ("float8", ",dtype=fp8_w8a8"),
        ("float8_blocks", ",dtype=fp8_w8a8,block_shape=[128,128]"),
    ],
)
def test_a_peer_s_own_configuration_of_the_nearest_count(tmp_path, weights, kind):
    (tmp_path / "configs").mkdir()
    name = f"E=128,N=768,device_name=NVIDIA_H200{kind}.json"
    tuned = {"triton_version": "3.6", "16": {"BLOCK_SIZE_M": 16}, "64": {"BLOCK_SIZE_M": 64}}
    (tmp_path / "configs" / name).write_text(json.dumps(tuned))

    def found(tokens, experts=128):
        given = (tmp_path, tokens, experts, 768, "NVIDIA H200", weights)
        return vllm_experts.configuration(*given)["BLOCK_SIZE_M"]

    assert (found(1), found(30), found(300)) == (16, 16, 64)
    assert found(4096, experts=64) == (64 if weights == "float8_blocks" else 128)  # its rules
