# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench model`` on the CPU, with a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from tiercel.cli import main
from tiercel.workbench.models import page, run

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


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench(*words) -> (exit status, records)."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TIERCEL_COMMIT", "abc")
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
