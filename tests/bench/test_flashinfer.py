# SPDX-License-Identifier: Apache-2.0
"""The plans that the adapters hand to FlashInfer mean the case's attention."""

import sys
import types

import pytest
import torch

from tiercel.ops.mla.spec import LATENT
from tiercel.workbench.bench import adapters, ops
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Unsupported

SMALL = {"H": 4, "Hk": 2, "D": 16}


def attend(q, k, v, scale=None):
    """The rows of one sequence, the last of its keys; heads in the middle."""
    new, keys = len(q), len(k)
    share = q.shape[1] // k.shape[1]
    of_heads = [x.repeat_interleave(share, 1).float().transpose(0, 1) for x in (k, v)]
    scores = q.float().transpose(0, 1) @ of_heads[0].transpose(1, 2)
    hidden = torch.ones(new, keys).triu(keys - new + 1).bool()
    scores = (scores * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ of_heads[1]).transpose(0, 1)


def packed(q, starts, firsts, indices, last, caches, out, scale=None):
    page = caches[0].shape[1]
    for b in range(len(starts) - 1):
        own = indices[firsts[b] : firsts[b + 1]].long()
        keys = (len(own) - 1) * page + int(last[b])
        k, v = (cache[own].flatten(0, 1)[:keys] for cache in caches)
        rows = slice(int(starts[b]), int(starts[b + 1]))
        out[rows] = attend(q[rows], k, v, scale).to(out.dtype)


class Prefill:
    def __init__(self, workspace, layout, backend):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.backend = backend

    def plan(self, starts, firsts, indices, last, heads, kv_heads, d, page, *, causal, **dtypes):
        assert causal and dtypes["q_data_type"] == torch.bfloat16
        self.args, self.sizes = (starts, firsts, indices, last), (heads, kv_heads, d, page)

    def run(self, q, caches, out):
        kv_heads, d = caches[0].shape[2:]
        assert self.sizes == (q.shape[1], kv_heads, d, caches[0].shape[1])
        packed(q, *self.args, caches, out)


class Decode(Prefill):
    def __init__(self, workspace, layout, use_tensor_cores):
        super().__init__(workspace, layout, str(use_tensor_cores))

    def plan(self, firsts, *args, q_len_per_req=1, **dtypes):
        starts = torch.arange(len(firsts)) * q_len_per_req
        super().plan(starts, firsts, *args, causal=True, **dtypes)


class Batch(Prefill):
    def __init__(self, layout):
        super().__init__(torch.empty(0, dtype=torch.uint8), layout, "batch")

    def plan(self, starts, firsts, indices, used, heads, kv_heads, d, d_v, page, **options):
        assert d == d_v
        last = (used - 1) % page + 1
        super().plan(starts, firsts, indices, last, heads, kv_heads, d, page, **options)

    def run(self, q, caches, out, sums):
        assert sums.shape == q.shape[:2]
        super().run(q, caches, out)


class Latent:
    def __init__(self, workspace):
        assert workspace.dtype == torch.uint8

    def plan(self, starts, firsts, indices, used, heads, latent, rotary, page, causal, scale, *_):
        self.args, self.scale = (starts, firsts, indices, (used - 1) % page + 1), scale
        assert (latent, rotary, causal) == (LATENT, 64, bool(starts[1] > 1))

    def run(self, latent_q, rotary_q, latent, rotary, out):
        q = torch.cat([latent_q, rotary_q], -1)
        caches = torch.cat([latent, rotary], -1)[:, :, None], latent[:, :, None]
        packed(q, *self.args, caches, out, self.scale)


def xqa(q, caches, scratch, table, used, longest, bmm1_scale, out, q_len_per_req=1, mask=None):
    assert not scratch.any() and bmm1_scale == q.shape[-1] ** -0.5
    assert used.dtype == torch.uint32 and int(used.view(torch.int32).max()) == longest
    new, page = q_len_per_req, caches[0].shape[1]
    assert out.shape == (q.shape if new == 1 else (len(table), new, *q.shape[1:]))
    if new > 1:
        assert (mask.dtype, mask.shape) == (torch.uint16, (len(table), new, 2))
        seen = mask.view(torch.int32)[..., None] >> torch.arange(new) & 1
        assert torch.equal(
            seen[:, :, 0], torch.ones(new, new).tril().int().expand_as(seen[:, :, 0])
        )
    counts = (used.view(torch.int32) + page - 1) // page
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    last = (used.view(torch.int32) - 1) % page + 1
    starts = torch.arange(len(table) + 1) * new
    packed(q, starts, firsts, indices, last, caches, out.view(q.shape))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """FlashInfer's interface in PyTorch."""
    modules = {
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": Prefill,
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
            "BatchAttention": Batch,
        },
        "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": xqa},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Latent},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def prepared(peer, op, **params):
    bench = ops.load()[op]
    case = Case(bench.family, op, "bfloat16", {**bench.params, **params})
    assert bench.invalid(case.params) is None
    inputs = bench.make(case, "cpu", 5)
    return bench, case, inputs, lambda: adapters.load()[peer][op](case, inputs)


MIXED = {"B": 2, "new": 7, "context": 30, "decoding": 3, "page": 16, **SMALL}


@pytest.mark.parametrize(
    ("peer", "op", "params"),
    [
        ("flashinfer", "paged_attention", MIXED),
        ("flashinfer.fa2", "paged_attention", {**MIXED, "page": 1}),
        ("flashinfer.batch", "paged_attention", MIXED),
        ("flashinfer", "paged_attention", {**MIXED, "B": 0}),
        ("flashinfer", "paged_attention", {**MIXED, "cache": "float8_e4m3fn"}),
        ("flashinfer.xqa", "paged_attention", {**MIXED, "B": 0}),
        ("flashinfer.xqa", "paged_attention", {**MIXED, "decoding": 0}),
        ("flashinfer", "decode_attention", {"B": 5, "L": 50, "ragged": True, **SMALL}),
        ("flashinfer", "decode_attention", {"B": 2, "L": 50, "Sq": 4, **SMALL}),
        ("flashinfer.cuda_cores", "decode_attention", {"B": 2, "L": 33, **SMALL}),
        ("flashinfer.xqa", "decode_attention", {"B": 5, "L": 50, "ragged": True, **SMALL}),
        ("flashinfer.xqa", "decode_attention", {"B": 2, "L": 50, "Sq": 32, **SMALL}),
        ("flashinfer", "mla_decode", {"B": 3, "L": 70, "H": 2, "page": 64, "ragged": True}),
        ("flashinfer", "mla_decode", {"B": 2, "L": 9, "H": 2, "page": 1, "Sq": 3}),
    ],
)
def test_its_calls_are_the_case_s_attention(peer, op, params):
    bench, case, inputs, prepare = prepared(peer, op, **params)
    launch = prepare()
    assert bench.check(inputs, bench.reference(case, inputs), launch.run(), launch).rms < 1e-2


def test_with_a_float8_cache_xqa_is_not_exact():
    params = {"B": 2, "L": 40, "cache": "float8_e4m3fn", **SMALL}
    assert not prepared("flashinfer.xqa", "decode_attention", **params)[-1]().exact
    assert prepared("flashinfer", "decode_attention", **params)[-1]().exact


@pytest.mark.parametrize(
    ("peer", "op", "params", "why"),
    [
        ("flashinfer.xqa", "paged_attention", MIXED, "different numbers of new tokens"),
        ("flashinfer.xqa", "decode_attention", {"B": 1, "L": 9, "page": 1}, "pages of 16, 32"),
        ("flashinfer.xqa", "decode_attention", {"B": 1, "L": 90, "Sq": 33}, "more than 32"),
        ("flashinfer.cuda_cores", "decode_attention", {"B": 1, "L": 9, "Sq": 2}, "one query"),
        ("flashinfer", "paged_attention", {**MIXED, "tree": True}, "trees"),
        ("flashinfer.batch", "paged_attention", {**MIXED, "D": 512}, "more than 256"),
    ],
)
def test_what_it_does_not_take(peer, op, params, why):
    with pytest.raises(Unsupported, match=why):
        prepared(peer, op, **params)[-1]()


def test_a_module_that_cannot_be_compiled_here_is_unsupported(monkeypatch):
    def plan(self, *args, **options):
        raise RuntimeError("Ninja build failed.\nmore lines")

    monkeypatch.setattr(Prefill, "plan", plan)
    with pytest.raises(Unsupported, match=r"^Ninja build failed\.$"):
        prepared("flashinfer", "paged_attention", **MIXED)[-1]()


def test_a_fault_of_the_gpu_is_not(monkeypatch):
    def plan(self, *args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Prefill, "plan", plan)
    with pytest.raises(torch.OutOfMemoryError):
        prepared("flashinfer", "paged_attention", **MIXED)[-1]()
