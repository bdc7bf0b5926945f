# SPDX-License-Identifier: Apache-2.0
"""The samplers of FlashInfer and vLLM draw tokens of the case's set, as they are called."""

import sys
import types

import pytest
import torch

from tiercel.workbench.bench import adapters, ops
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Unsupported, WrongResult
from tiercel.workbench.bench.peers import vllm_sampler

BENCH = ops.load()["sample"]
FLASHINFER, VLLM = "flashinfer.from_probs", "vllm.sampler"


def smallest(values, kept):
    """The smallest of what is kept: a token that a filter that is missing would rarely give."""
    return values.masked_fill(~kept, torch.inf).argmin(-1)


def within(probs, top_p):
    ordered, order = probs.sort(-1, descending=True)
    return torch.zeros_like(probs).bool().scatter(-1, order, ordered.cumsum(-1) - ordered < top_p)


def of_top_k(probs, k, *, seed, offset, deterministic):
    return smallest(probs, probs >= probs.topk(k).values[:, -1:])


def of_top_p(probs, p, *, seed, offset, deterministic):
    return smallest(probs, within(probs, p))


def of_all(probs, *, seed, offset, deterministic):
    assert torch.allclose(probs.sum(-1), torch.ones(len(probs)))
    return probs.argmin(-1)


def filtered(x, k, p):
    assert x.dtype == torch.float32
    if k is not None:
        x = x.masked_fill(x < x.topk(int(k[0])).values[:, -1:], -torch.inf)
    return x if p is None else x.masked_fill(~within(x.softmax(-1), p[:, None]), -torch.inf)


def gumbel_sample(x, index, temperature, seeds, pos, *, apply_temperature, is_drafting):
    assert (index.dtype, temperature.dtype) == (torch.int32, torch.float32)
    assert seeds.dtype == pos.dtype == torch.int64 and len(seeds) == len(pos) == len(x)
    greedy = temperature == 0
    return torch.where(greedy, x.float().argmax(-1), smallest(x.float(), x > -torch.inf))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Their interfaces in PyTorch."""
    modules = {
        "flashinfer.sampling": {
            "sampling_from_probs": of_all,
            "top_k_sampling_from_probs": of_top_k,
            "top_p_sampling_from_probs": of_top_p,
        },
        f"vllm.v1.{vllm_sampler.GUMBEL}": {
            "gumbel_sample": gumbel_sample,
            "apply_temperature": lambda x, index, temperature: x.div_(temperature[:, None]),
        },
        f"vllm.v1.{vllm_sampler.FILTERS}": {"apply_top_k_top_p_triton": filtered},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def prepared(peer, **params):
    case = Case("sampling", "sample", "bfloat16", {**BENCH.params, "T": 9, "V": 700, **params})
    inputs = BENCH.make(case, "cpu", 5)
    return case, inputs, lambda: adapters.load()[peer]["sample"](case, inputs)


@pytest.mark.parametrize(
    ("peer", "filters"),
    [(FLASHINFER, kind) for kind in ("greedy", "plain", "top_k", "top_p")]
    + [(VLLM, kind) for kind in ("greedy", "plain", "top_k", "top_p", "both")],
)
def test_their_calls_are_the_case_s(peer, filters):
    case, inputs, prepare = prepared(peer, filter=filters)
    before, launch = inputs["logits"].clone(), prepare()
    expected = BENCH.reference(case, inputs)
    outputs = launch.run()
    assert BENCH.check(inputs, expected, outputs, launch).differing == 0
    assert torch.equal(inputs["logits"], before)
    if filters != "plain":
        with pytest.raises(WrongResult):
            BENCH.check(inputs, expected, (inputs["logits"].argmin(-1),), launch)


@pytest.mark.parametrize(
    ("peer", "params"),
    [(FLASHINFER, {"top": 5}), (VLLM, {"top": 5}), (FLASHINFER, {"filter": "both"})],
)
def test_what_they_do_not_take(peer, params):
    with pytest.raises(Unsupported):
        prepared(peer, **params)[-1]()
