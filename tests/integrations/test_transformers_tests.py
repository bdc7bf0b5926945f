# SPDX-License-Identifier: Apache-2.0
"""The command that runs transformers' own tests: its choice of tests, and its page."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.torch
FILE = Path(__file__).with_name("run_transformers_tests.py")


@pytest.fixture
def command(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("TIERCEL_TRANSFORMERS_RECORD", str(tmp_path / "record"))
    return module


def test_the_committed_page_has_the_list_of_tests_that_are_left_out(command):
    assert command.page({}) == command.PAGE.read_text(encoding="utf-8")


def test_a_page_keeps_the_lines_of_other_models(command, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    for model in ("qwen3", "llama", "qwen3"):
        command.PAGE.write_text(command.page({model: f"| {model} | 1 |"}))
    lines = [line for line in command.PAGE.read_text().splitlines() if line.endswith("| 1 |")]
    assert lines == ["| llama | 1 |", "| qwen3 | 1 |"]


def test_tests_are_left_out_by_name(command, tmp_path):
    gone = []
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    )
    names = ["test_training", "test_training_overfit", "test_tp_forward", "test_greedy_generate"]
    items = [SimpleNamespace(name=name, nodeid=f"a::{name}") for name in names]
    command.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == ["test_training", "test_greedy_generate"]
    assert [item.name for item in gone] == ["test_training_overfit", "test_tp_forward"]
    records = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [record[1] for record in records] == ["left out"] * 2


def test_attention_of_both_names_is_ours(command, monkeypatch):
    """In one model: float32 on the reference, without a stand-in."""
    import torch
    import transformers
    from support.tiny_models import config, distance, make, tokens

    import tiercel
    from tiercel.integrations.transformers import attention

    monkeypatch.setattr(attention, "tiercel", tiercel)  # both restore what the command changes
    monkeypatch.setattr(attention, "DTYPES", attention.DTYPES)
    kind = transformers.PreTrainedModel
    monkeypatch.setattr(
        kind, "get_correct_attn_implementation", kind.get_correct_attn_implementation
    )
    functions = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for interface in functions:
        known = dict(interface._global_mapping)
        monkeypatch.setattr(interface, "_global_mapping", known)
    command._use_tiercel()
    right = make("Llama", torch.float32)
    ours = transformers.LlamaForCausalLM(config("Llama")).eval()
    assert ours.config._attn_implementation == "tiercel"
    ours.load_state_dict(right.state_dict())
    calls = []
    reference = tiercel.ref.attention
    monkeypatch.setattr(
        tiercel.ref, "attention", lambda *a, **k: calls.append(1) or reference(*a, **k)
    )
    with torch.no_grad():
        for name in ("tiercel", "sdpa"):
            ours.set_attn_implementation(name)
            assert distance(ours(tokens()).logits, right(tokens()).logits) < 1e-5
    assert len(calls) == 4
