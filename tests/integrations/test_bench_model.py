# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench model`` on the CPU, with a tiny model."""

import functools
import importlib.util
import json
import os
import time
import types
from pathlib import Path

import pytest
import torch
import transformers

from tiercel.cli import main
from tiercel.integrations.transformers import apply
from tiercel.workbench.models import mxfp4, page, run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]
ENGINE = Path(__file__).absolute().parents[2] / "examples" / "engine"
TINY = {
    "class": "Llama",
    "layers": 2,
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    },
}


# Sizes that make a published model small; head dimensions and head counts stay.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_local_experts": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "vocab_size": 128,
    "first_k_dense_replace": 1,
    "sliding_window": 6,
}
# How many RMS norms, gated MLPs, routers and modules of experts `apply` replaces in two layers.
REPLACED = {
    "Llama-3.2-1B": (5, 2, 0, 0),
    "Qwen3-8B": (9, 2, 0, 0),
    "Qwen3-30B-A3B": (9, 0, 2, 2),
    "gpt-oss-20b": (5, 0, 2, 0),
    "Gemma-3-1B": (13, 2, 0, 0),
    "DeepSeek-V3": (9, 2, 1, 1),
}


def small(name):
    """The contents of a model's file, with small sizes."""
    sizes = run.read_sizes(name)
    config = {key: SMALL.get(key, value) for key, value in sizes.config.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    config["num_attention_heads"] = 4
    config["num_key_value_heads"] = {heads: 4, 1: 1}.get(kv_heads, 2)
    if "sliding_window" in config:
        config["layer_types"] = ["sliding_attention", "full_attention"]
    found = {"class": sizes.kind, "layers": 2, "config": config}
    return found | ({"experts": "mxfp4"} if sizes.mxfp4 else {})


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench(*words) -> (exit status, records)."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TIERCEL_COMMIT", "abc")
    monkeypatch.setattr(run, "_WARMUP", 0)
    monkeypatch.setattr(run, "_LEAST", 0.0)
    monkeypatch.chdir(tmp_path)
    model, out = tmp_path / "Tiny.json", tmp_path / "records.jsonl"
    model.write_text(json.dumps(TINY))

    def call(*words):
        options = ["--device", "cpu", "--steps", "2", "--out", str(out)]
        code = main(["bench", "model", str(model), *words, *options])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return call


def test_records(bench, capsys):
    shapes = ("--prefill", "1x8", "--decode", "2x8", "--train", "2x4")
    code, records = bench("--layers", "1", *shapes, "--ways", "transformers,tiercel")
    assert code == 0 and len(records) == 6
    for record in records:
        assert page.problem(record) is None, record
        assert (record["model"], record["layers"], record["commit"]) == ("Tiny", 1, "abc")
        tokens = {"prefill": 8, "decode": 2, "train": 8}[record["phase"]]
        rate = tokens / record["ms_median"] * 1e3
        assert record["tokens_per_s"] == pytest.approx(rate, rel=1e-4)
        # In bfloat16; the model as it is is compared with itself.
        exact = record["way"] == "transformers"
        assert record["rel_err"] == 0 if exact else 0 <= record["rel_err"] < 0.05
    assert [r["way"] for r in records] == ["transformers"] * 3 + ["tiercel"] * 3
    assert "Tiny, 1 layers, decode 2x8" in capsys.readouterr().out


def test_short_steps_are_timed_for_a_while(monkeypatch):
    monkeypatch.setattr(run, "_LEAST", 0.05)
    calls = []
    found = run.Timer("cpu").measure(lambda: calls.append(time.sleep(0.001)), 2)
    assert 10 < len(calls) < 60 and len(calls) % 2 == (1 + run._WARMUP) % 2
    assert 1 <= found["ms_min"] <= found["ms_median"] and found["host_ms"] >= 1


def test_compiled_ways_come_behind_and_liger_last(monkeypatch):
    monkeypatch.setattr(run, "build", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(run, "_measure", lambda *_: {"ms_median": 1.0})
    ways = ("liger", "transformers", "transformers.compiled", "tiercel", "tiercel.compiled")
    sizes = run.read_sizes("Qwen3-8B")
    found = run.measure(sizes, 1, [run.Case("prefill", 1, 8)], ways, 1, "cpu")
    assert [record["way"] for record in found] == [*ways[1::2], *ways[2::2], "liger"]


def test_what_no_time_is_left_for(bench, monkeypatch, capsys):
    monkeypatch.setattr(run, "build", None)
    shapes = ("--prefill", "1x8", "1x4", "--decode", "--train")
    code, records = bench(*shapes, "--ways", "transformers,tiercel", "--seconds", "0")
    assert code == 0 and not records
    said = capsys.readouterr().out
    assert "tiercel, prefill 1x8: no time left\ntiercel, prefill 1x4: no time left" in said


def test_a_folder_for_compiled_graphs(bench, monkeypatch, tmp_path):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "before")
    bench("--prefill", "--decode", "--train", "--ways", "transformers", "--cache", "kept")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kept" / "triton")
    assert (tmp_path / "kept" / "inductor").is_dir()


def test_ours_that_fails(bench, monkeypatch, capsys):
    def no_step(case, model, device):
        def step(call):
            raise RuntimeError("a reason\nand more")

        return run.Step(step)

    monkeypatch.setattr(run, "step_of", no_step)
    shapes = ("--prefill", "1x8", "--decode", "--train")
    assert bench(*shapes, "--ways", "transformers")[0] == 0
    code, (record,) = bench(*shapes, "--ways", "tiercel")
    assert code == 1 and record["status"] == "failed" and "a reason" in record["reason"]
    assert page.problem(record) is None
    assert "tiercel, prefill 1x8: " in capsys.readouterr().out


@pytest.mark.skipif(bool(importlib.util.find_spec("liger_kernel")), reason="liger is installed")
def test_liger_that_is_not_installed_is_left_out(bench, capsys):
    code, records = bench("--prefill", "1x8", "--decode", "--train", "--ways", "liger")
    assert code == 0 and not records
    assert "liger left out: it is not installed" in capsys.readouterr().out


def test_the_engine(bench, capsys):
    qwen = {**TINY, "class": "Qwen3"}
    shapes = ("--prefill", "2x8", "--decode", "2x8", "--train", "2x4", "--ways", "engine")
    code, records = bench(*shapes)
    assert code == 0 and not records and "engine left out: --engine" in capsys.readouterr().out
    Path("Qwen.json").write_text(json.dumps(qwen))
    code, records = bench("Qwen.json", *shapes, "--engine", str(ENGINE))
    assert code == 0
    assert [(r["phase"], r["status"]) for r in records if r["model"] == "Qwen"] == [
        ("prefill", "ok"),
        ("decode", "ok"),
    ]
    for record in records:
        assert page.problem(record) is None
    (reason,) = {r["reason"] for r in records if r["model"] == "Tiny"}
    assert "`model_type` must be qwen3" in reason


@pytest.mark.parametrize("name", run.names())
def test_the_published_models(bench, name):
    """All of ours is used, and gives what transformers does."""
    Path("Small.json").write_text(json.dumps(small(name)))
    shapes = ("--prefill", "1x16", "--decode", "2x16", "--train", "2x16")
    code, records = bench("Small.json", *shapes, "--ways", "transformers,tiercel")
    assert code == 0
    ours = [r for r in records if (r["model"], r["way"]) == ("Small", "tiercel")]
    assert [r["phase"] for r in ours] == ["prefill", "decode", "train"]
    assert all(r["rel_err"] < 0.05 for r in ours)


@pytest.mark.parametrize("name", run.names())
def test_replaced(name, tmp_path):
    path = tmp_path / "Small.json"
    path.write_text(json.dumps(small(name)))
    sizes = run.read_sizes(str(path))
    model = run.build(sizes, sizes.layers, "cpu")
    linear = sum(type(module) is torch.nn.Linear for module in model.modules())
    linear -= 1  # the output layer
    embeddings = sum(type(module) is torch.nn.Embedding for module in model.modules())
    report = apply(model)
    found = {op: len(names) for op, names in report.replaced.items()}
    norms, gated, routers, experts = REPLACED[name]
    due = {"attention": 2, "linear_cross_entropy": 1, "rotary_embedding": 2, "rms_norm": norms}
    due |= {"gated activation": gated, "topk_softmax": routers, "fused_moe": experts}
    due["linear_act"] = linear
    due["embedding"] = embeddings
    due["decoder layer"] = 0 if name in ("gpt-oss-20b", "Gemma-3-1B") else 2
    assert found == {op: n for op, n in due.items() if n}
    kept = {"experts with biases"} if sizes.mxfp4 else set()
    assert set(report.kept.values()) == kept


def test_4_bit_experts_for_a_while(tmp_path):
    """Ours infer with the values of the 16-bit experts, which come back."""
    path = tmp_path / "Small.json"
    path.write_text(json.dumps(small("gpt-oss-20b")))
    sizes = run.read_sizes(str(path))
    model = run.build(sizes, 2, "cpu")
    tensors = mxfp4.draw(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    experts = model.model.layers[0].mlp.experts
    assert 0.015 < experts.down_proj.float().std() < 0.03
    for phase, bits in (("prefill", 4), ("train", 16)):
        case = run.Case(phase, 1, 8)
        with run.prepared("tiercel", model, case, "cpu", tensors):
            assert hasattr(experts, "gate_up_proj_blocks") == (bits == 4)
            assert model.training == (phase == "train")
        after = dict(model.named_parameters())
        assert list(after) == list(before) and not model.training
        assert all(torch.equal(after[name], p) for name, p in before.items())
        assert not list(experts.buffers()) and "forward" not in vars(experts)


@pytest.mark.parametrize("name", ["Gemma-3-1B", "Qwen3-30B-A3B"])
def test_a_graph_is_made_once(name, tmp_path, monkeypatch):
    """Each step finds caches of the same length."""
    path = tmp_path / "Small.json"
    path.write_text(json.dumps(small(name)))
    sizes = run.read_sizes(str(path))
    model = run.build(sizes, 2, "cpu")
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled(model, fullgraph=True))
    case = run.Case("decode", 2, 16)
    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        usual, step = (run.step_of(case, model, "cpu") for _ in range(2))
        with run.prepared("tiercel.compiled", model, case, "cpu", {}) as (ours, _):
            counters.clear()
            found = [step.run(ours) for _ in range(3)]
        right = [usual.run(model) for _ in range(3)]
    assert counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(found, right, strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_the_floor_of_a_step(tmp_path, monkeypatch):
    path = tmp_path / "Small.json"
    path.write_text(json.dumps(small("Qwen3-30B-A3B")))
    model = run.build(run.read_sizes(str(path)), 2, "cpu")
    assert run.floor_ms(model, 1, 0.0) is None
    properties = types.SimpleNamespace(memory_clock_rate=1e6, memory_bus_width=8)  # 2 GB/s
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
    others += sum(x.nbytes for x in model.buffers())
    for tokens, share in ((1, 0.5), (2, 0.75)):  # 8 of 16 experts
        found = run.floor_ms(model, tokens, 1000.0)
        assert found == pytest.approx((others + share * experts + 1000) / 2e9 * 1e3)


def test_other_values_of_the_configuration(bench, monkeypatch, capsys):
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    shapes = ("--prefill", "1x8", "--decode", "--train", "--ways", "transformers")
    code, (record,) = bench(*shapes, "--set", "head_dim=32", "--set", 'hidden_act="gelu"')
    assert code == 0 and record["model"] == 'Tiny with head_dim=32, hidden_act="gelu"'
    assert "--set head_dim=32 --set 'hidden_act=\"gelu\"'" in record["command"]
    assert record["command"].startswith("LIGER_FUSED_MOE_AUTOTUNE=0 tiercel bench model ")
    assert main(["bench", "model", "Qwen3-8B", "--device", "cpu", "--set", "head_dim"]) == 2
    assert "--set: 'head_dim' is not NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("name", run.names())
def test_the_published_sizes(name):
    sizes = run.read_sizes(name)
    model = run.build(sizes, sizes.layers, "meta")
    for key, value in sizes.config.items():
        if key != "rope_parameters":
            assert getattr(model.config, key) == value
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    published = {
        "Llama-3.2-1B": 1.24,
        "Qwen3-8B": 8.19,
        "Qwen3-30B-A3B": 30.5,
        "gpt-oss-20b": 20.9,
        "Gemma-3-1B": 1.0,
        "DeepSeek-V3": 671,
    }
    assert billions == pytest.approx(published[name], rel=0.01)
    assert isinstance(model, transformers.PreTrainedModel)
