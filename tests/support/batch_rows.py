# SPDX-License-Identifier: Apache-2.0
"""Calls of every operator on any of a case's rows: tokens, sequences or entries of a batch.

A case's `run(rows)` takes the numbers of rows, in any order, and returns results whose first
dimension is that of the rows, so each row's bits can be compared in any company.
"""

from typing import NamedTuple

import torch

import tiercel

CASES = {}


class Rows(NamedTuple):
    count: int
    run: object  # (rows) -> results


def case(op, name="", **options):
    def add(function):
        key = f"{op}-{name}" if name else op
        CASES[key] = (op, lambda device: function(Source(device), **options))
        return function

    return add


class Source:
    """Numbers from a fixed seed."""

    def __init__(self, device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(1)

    def normal(self, *shape, dtype=torch.bfloat16, factor=1.0):
        drawn = torch.randn(shape, device=self.device, generator=self.generator)
        return (drawn * factor).to(dtype)

    def whole(self, below, *shape, dtype=torch.int32):
        options = {"device": self.device, "generator": self.generator}
        return torch.randint(below, shape, **options).to(dtype)

    def arange(self, count, dtype=torch.int32):
        return torch.arange(count, device=self.device, dtype=dtype)


def several(results):
    return results if isinstance(results, tuple) else (results,)


def starts_of(counts, device):
    ends = torch.tensor([0, *counts], device=device).cumsum(0)
    return ends.int()


# Rows that an elementwise operator, or one along the last dimension, has.


def _rows_of(op, count, width, dtype=torch.bfloat16, **options):
    def make(source):
        x = source.normal(count, width, dtype=dtype)
        return Rows(count, lambda rows: several(getattr(tiercel, op)(x[rows], **options)))

    return make


for _op in ("silu", "gelu", "relu", "silu_and_mul", "gelu_and_mul", "relu_and_mul"):
    case(_op)(_rows_of(_op, 4096, 1000))
for _op in ("softmax_online", "log_softmax"):
    for _width in (100, 1001, 4096, 33000, 151936):
        case(_op, _width)(_rows_of(_op, 2048 if _width < 5000 else 300, _width))
    case(_op, "float32")(_rows_of(_op, 1024, 8192, torch.float32))
for _op in ("rms_norm", "layer_norm"):
    for _width in (96, 512, 1024, 1536, 4096, 7168, 16384):
        case(_op, _width)(_rows_of(_op, 2048, _width))
    for _width in (100, 1001, 4096, 12288):
        case(_op, f"float32-{_width}")(_rows_of(_op, 2048, _width, torch.float32))
for _width in (100, 1024, 4096, 20000, 300000):
    case("reduce", _width)(_rows_of("reduce", 2048 if _width < 5000 else 300, _width, dim=-1))
case("reduce", "tiny")(_rows_of("reduce", 100000, 8, dim=-1))
case("reduce_sum")(_rows_of("reduce_sum", 600, 8192, torch.float32, dim=-1))
case("fp8_quantize")(_rows_of("fp8_quantize", 2048, 4096, granularity="row"))
case("fp8_quantize", "groups")(_rows_of("fp8_quantize", 2048, 4096, granularity="1x128"))


@case("reduce", "outer", length=5000)
@case("reduce", "outer-short", length=100)
def reduce_outer(source, length):
    x = source.normal(64, length, 256)
    return Rows(64, lambda rows: several(tiercel.reduce(x[rows], dim=1)))


@case("reduce", "columns")
def reduce_columns(source):
    x = source.normal(5000, 300, 8)

    def run(rows):
        return (tiercel.reduce(x[:, rows].contiguous().view(5000, -1), dim=0).view(-1, 8),)

    return Rows(300, run)


@case("rms_norm", "residual-512", kind="rms_norm", width=512)
@case("rms_norm", "residual-1024", kind="rms_norm", width=1024)
@case("rms_norm", "residual-4096", kind="rms_norm", width=4096)
@case("rms_norm", "residual-16384", kind="rms_norm", width=16384)
@case("layer_norm", "residual", kind="layer_norm", width=4096)
def norm_with_residual(source, kind, width):
    x, residual = source.normal(2048, width), source.normal(2048, width)
    weight = source.normal(width)

    def run(rows):
        return getattr(tiercel, kind)(x[rows], weight, residual=residual[rows])

    return Rows(2048, run)


@case("rms_norm_quant", kind="rms_norm_quant")
@case("layer_norm_quant", kind="layer_norm_quant")
def norm_quant(source, kind):
    x, weight = source.normal(2048, 4096), source.normal(4096)

    def run(rows):
        q = torch.empty(len(rows), 4096, device=x.device, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(rows), 1, device=x.device)
        return getattr(tiercel, kind)(x[rows], q, scale, weight)

    return Rows(2048, run)


@case("act_and_mul_quant")
def act_and_mul_quant(source):
    x = source.normal(2048, 8192)

    def run(rows):
        q = torch.empty(len(rows), 4096, device=x.device, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(rows), 1, device=x.device)
        return tiercel.act_and_mul_quant(x[rows], q, scale)

    return Rows(2048, run)


@case("copy_transpose")
def copy_transpose(source):
    x = source.normal(512, 256)
    return Rows(512, lambda rows: (tiercel.copy_transpose(x[rows]).T,))


# Products.


@case("linear_act", "4096", n=4096, k=4096)
@case("linear_act", "long", n=1024, k=14336, activation="none")
@case("linear_act", "narrow", n=256, k=7168, activation="silu")
@case("linear_act", "wide", n=14336, k=2048, activation="relu")
@case("linear_act", "float16", n=2048, k=5120, dtype=torch.float16)
@case("linear_act", "tanh", n=520, k=4104, activation="gelu_tanh")
@case("linear_act", "residual", n=4096, k=4096, residual=True)
@case("linear_act", "residual-narrow", n=512, k=8192, residual=True, activation="silu")
def linear_act(source, n, k, activation="gelu", residual=False, dtype=torch.bfloat16):
    x, weight = source.normal(2500, k, dtype=dtype), source.normal(n, k, dtype=dtype, factor=0.02)
    bias, added = source.normal(n, dtype=dtype), source.normal(2500, n, dtype=dtype)

    def run(rows):
        more = {"residual": added[rows]} if residual else {}
        return (tiercel.linear_act(x[rows], weight, bias, activation=activation, **more),)

    return Rows(2500, run)


@case("gated_linear", n=1408, k=4096)
@case("gated_linear", "long", n=512, k=14336)
@case("gated_linear", "wide", n=14336, k=1024, activation="gelu")
def gated_linear(source, n, k, activation="silu"):
    x, weight = source.normal(2500, k), source.normal(2 * n, k, factor=0.02)
    bias = source.normal(2 * n)
    return Rows(
        2500, lambda rows: (tiercel.gated_linear(x[rows], weight, bias, activation=activation),)
    )


@case("fp8_linear", granularity="row", tiles="row", n=4096, k=4096)
@case("fp8_linear", "long", granularity="row", tiles="row", n=512, k=14336)
@case("fp8_linear", "blocks", granularity="1x128", tiles="128x128", n=4096, k=4096)
@case("fp8_linear", "blocks-long", granularity="1x128", tiles="128x128", n=512, k=7168)
def fp8_linear(source, granularity, tiles, n, k):
    x, weight = source.normal(2500, k), source.normal(n, k)
    quantized, scale = tiercel.fp8_quantize(weight, tiles)

    def run(rows):
        given, its = tiercel.fp8_quantize(x[rows], granularity)
        return (tiercel.fp8_linear(given, quantized, its, scale, activation="silu"),)

    return Rows(2500, run)


@case("fused_mlp")
@case("fused_mlp", "plain", gated=False)
def fused_mlp(source, gated=True):
    x, down = source.normal(2000, 2048), source.normal(2048, 5632, factor=0.02)
    up = source.normal(5632 * (1 + gated), 2048, factor=0.02)
    return Rows(2000, lambda rows: (tiercel.fused_mlp(x[rows], up, down, gated=gated),))


@case("nvfp4_quantize")
def nvfp4_quantize(source):
    x = source.normal(1000, 2048)

    def run(rows):
        q, scale = tiercel.nvfp4_quantize(x[rows])
        return q.view(torch.uint8), scale.view(torch.uint8)

    return Rows(1000, run)


@case("nvfp4_dequantize")
def nvfp4_dequantize(source):
    q, scale = tiercel.nvfp4_quantize(source.normal(1000, 2048))

    def run(rows):
        codes = q.view(torch.uint8)[rows].view(q.dtype)
        scales = scale.view(torch.uint8)[rows].view(scale.dtype)
        return (tiercel.nvfp4_dequantize(codes, scales),)

    return Rows(1000, run)


@case("nvfp4_linear", n=4096, k=4096)
@case("nvfp4_linear", "long", n=512, k=14336)
@case("nvfp4_linear", "small", n=1000, k=1088)
def nvfp4_linear(source, n, k):
    x = source.normal(100, k)
    weight, scale = tiercel.nvfp4_quantize(source.normal(n, k))
    return Rows(100, lambda rows: (tiercel.nvfp4_linear(x[rows], weight, scale),))


@case("w4_linear")
@case("w4_linear", "bias", bias=True, activation="silu")
@case("w4_linear", "float8", float8=True)
@case("w4_linear", "int4", dtype=torch.float16, format="int4")
@case("w4_linear", "int4 float8", float8=True, format="int4")
def w4_linear(source, bias=False, float8=False, dtype=torch.bfloat16, **options):
    n, k = 1024, 2048
    x, weight = source.normal(700, k).to(dtype), source.whole(256, n, k // 2, dtype=torch.uint8)
    if "format" in options:
        scale = source.normal(n, k // 32, factor=0.1).to(dtype)
    else:
        scale = source.whole(4, n, k // 32, dtype=torch.uint8) + 125
    options["bias"] = source.normal(n) if bias else None
    if not float8:
        return Rows(700, lambda rows: (tiercel.w4_linear(x[rows], weight, scale, **options),))
    x, x_scale = tiercel.fp8_quantize(x, "row")

    def run(rows):
        values = x.view(torch.uint8)[rows].view(x.dtype)
        given = {"x_scale": x_scale[rows].contiguous(), **options}
        return (tiercel.w4_linear(values, weight, scale, **given),)

    return Rows(700, run)


@case("nvfp4_gemv")
def nvfp4_gemv(source):
    m, k, batches = 512, 4096, 40
    codes = [source.whole(256, batches, n, k // 2, dtype=torch.uint8) for n in (m, 1)]
    scales = [source.whole(100, batches, n, k // 16, dtype=torch.uint8) + 8 for n in (m, 1)]

    def permuted(scale):
        rows, groups = scale.shape[1:]
        down, along = -(-rows // 128), -(-groups // 4)
        padded = scale.new_zeros(len(scale), down * 128, along * 4)
        padded[:, :rows, :groups] = scale
        cut = padded.view(len(scale), down, 4, 32, along, 4)  # l, down, 4, 32, along, 4
        stored = cut.permute(0, 1, 4, 3, 2, 5).contiguous()  # l, down, along, 32, 4, 4
        return stored.permute(3, 4, 1, 5, 2, 0).view(torch.float8_e4m3fn)

    def run(rows):
        a, b = (c[rows].permute(1, 2, 0).view(torch.float4_e2m1fn_x2) for c in codes)
        plain = [s[rows].permute(1, 2, 0).cpu().view(torch.float8_e4m3fn) for s in scales]
        moved = [permuted(s[rows]) for s in scales]
        c = torch.empty(len(rows), m, 1, device=a.device, dtype=torch.float16).permute(1, 2, 0)
        return (tiercel.nvfp4_gemv(a, b, *plain, *moved, c).permute(2, 0, 1),)

    return Rows(batches, run)


# Mixtures of experts.

_EXPERTS, _TOP, _HIDDEN, _INNER = 16, 4, 1024, 512


def routed(source, tokens=2000):
    x = source.normal(tokens, _HIDDEN)
    weights, ids = tiercel.topk_softmax(source.normal(tokens, _EXPERTS), _TOP, renormalize=True)
    up = source.normal(_EXPERTS, 2 * _INNER, _HIDDEN, factor=0.03)
    down = source.normal(_EXPERTS, _HIDDEN, _INNER, factor=0.03)
    return x, weights, ids, up, down


@case("fused_moe")
@case("fused_moe", "rows", tiles="row")
@case("fused_moe", "blocks", tiles="128x128")
def fused_moe(source, tiles=None):
    x, weights, ids, up, down = routed(source)
    scales = {}
    if tiles is not None:
        (up, up_scale), (down, down_scale) = (_quantized_experts(w, tiles) for w in (up, down))
        scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}

    def run(rows):
        return (tiercel.fused_moe(x[rows], up, down, weights[rows], ids[rows], **scales),)

    return Rows(len(x), run)


def _quantized_experts(w, tiles):
    experts, rows, columns = w.shape
    q, scale = tiercel.fp8_quantize(w.view(-1, columns), tiles)
    shape = (experts, rows) if tiles == "row" else (experts, rows // 128, columns // 128)
    return q.view(w.shape), scale.reshape(shape).contiguous()


@case("w4_moe")
def w4_moe(source):
    x, weights, ids, up, down = routed(source)
    halves = []
    for experts, rows, columns in (up.shape, down.shape):
        codes = source.whole(256, experts, rows, columns // 2, dtype=torch.uint8)
        halves += [codes, source.whole(4, experts, rows, columns // 32, dtype=torch.uint8) + 121]

    def run(rows):
        return (tiercel.w4_moe(x[rows], *halves, weights[rows], ids[rows]),)

    return Rows(len(x), run)


@case("moe_up")
@case("moe_up", "128", block=128)
def moe_up(source, block=64):
    x, _, ids, up, _ = routed(source)

    def run(rows):
        lists = tiercel.moe_align_block_size(ids[rows], block, _EXPERTS)
        return (tiercel.moe_up(x[rows], up, *lists, _TOP, block).view(len(rows), _TOP, _INNER),)

    return Rows(len(x), run)


@case("moe_down")
@case("moe_down", "128", block=128)
def moe_down(source, block=64):
    _, weights, ids, _, down = routed(source)
    inner = source.normal(len(ids), _TOP, _INNER)

    def run(rows):
        lists = tiercel.moe_align_block_size(ids[rows], block, _EXPERTS)
        given = inner[rows].view(-1, _INNER)
        out = tiercel.moe_down(given, down, weights[rows].view(-1), *lists, block)
        return (out.view(len(rows), _TOP, _HIDDEN),)

    return Rows(len(ids), run)


@case("moe_sum")
def moe_sum(source):
    x, weights = source.normal(2000, 4, 1024), source.normal(2000, 4, dtype=torch.float32)
    return Rows(2000, lambda rows: (tiercel.moe_sum(x[rows], weights[rows]),))


@case("grouped_gemm")
def grouped_gemm(source):
    x, w = source.normal(2000, 2048), source.normal(4, 1024, 2048, factor=0.02)

    def run(rows):
        order = (rows % 4).argsort(stable=True)
        counts = torch.bincount(rows % 4, minlength=4).tolist()
        out = tiercel.grouped_gemm(x[rows[order]], w, starts_of(counts, x.device))
        return (out[order.argsort()],)

    return Rows(2000, run)


@case("grouped_gemm", "fp8")
def grouped_gemm_fp8(source):
    x, x_scale = tiercel.fp8_quantize(source.normal(2000, 2048), "1x128")
    w = source.normal(4 * 1024, 2048, factor=0.02)
    matrices, w_scale = tiercel.fp8_quantize(w, "128x128")
    matrices, w_scale = matrices.view(4, 1024, 2048), w_scale.view(4, 8, 16)

    def run(rows):
        order = (rows % 4).argsort(stable=True)
        counts = torch.bincount(rows % 4, minlength=4).tolist()
        given = rows[order]
        out = tiercel.grouped_gemm(
            x.view(torch.uint8)[given].view(x.dtype),
            matrices,
            starts_of(counts, x.device),
            x_scale=x_scale[given],
            w_scale=w_scale,
        )
        return (out[order.argsort()],)

    return Rows(2000, run)


@case("topk_softmax", experts=8, k=2)
@case("topk_softmax", "64", experts=64, k=6, renormalize=True)
@case("topk_softmax", "256", experts=256, k=8)
@case("topk_softmax", "float32", experts=128, k=8, dtype=torch.float32)
@case("topk_softmax", "selected", experts=128, k=8, softmax_first=False)
@case("topk_softmax", "sigmoid", experts=256, k=8, n_group=8, topk_group=4, scoring="sigmoid")
def topk_softmax(source, experts, k, dtype=torch.bfloat16, **options):
    scores = source.normal(3000, experts, dtype=dtype)
    return Rows(3000, lambda rows: tiercel.topk_softmax(scores[rows], k, **options))


@case("topk_softmax", "hashed")
def topk_softmax_hashed(source):
    scores, table = source.normal(3000, 256), source.whole(256, 1000, 6)
    ids = source.whole(1000, 3000)
    options = {"expert_table": table, "scoring": "sqrtsoftplus", "renormalize": True}
    return Rows(
        3000, lambda rows: tiercel.topk_softmax(scores[rows], 6, token_ids=ids[rows], **options)
    )


@case("topk_softmax_align", experts=64)
@case("topk_softmax_align", "256", experts=256)
def topk_softmax_align(source, experts):
    scores = source.normal(600, experts)
    return Rows(600, lambda rows: tiercel.topk_softmax_align(scores[rows], 8, 64)[:2])


@case("moe_align_block_size")
def moe_align_block_size(source):
    ids = source.whole(8, 500, 2)

    def run(rows):
        sorted_ids, experts, _ = tiercel.moe_align_block_size(ids[rows], 16, 8)
        flat = torch.full((2 * len(rows),), -1, device=ids.device, dtype=torch.int32)
        real = sorted_ids < len(flat)
        blocks = experts.repeat_interleave(16)[: len(sorted_ids)]
        flat[sorted_ids[real].long()] = blocks[real]
        return (flat.view(-1, 2),)  # the expert of the block that each id is in

    return Rows(500, run)


# Losses and sampling.


@case("cross_entropy", width=1000)
@case("cross_entropy", "vocabulary", width=32000)
@case("cross_entropy", "large", width=151936)
def cross_entropy(source, width):
    logits, target = source.normal(300, width), source.whole(width, 300, dtype=torch.int64)
    options = {"reduction": "none"}
    return Rows(300, lambda rows: (tiercel.cross_entropy(logits[rows], target[rows], **options),))


@case("linear_cross_entropy")
def linear_cross_entropy(source):
    x, weight = source.normal(2500, 1024), source.normal(32000, 1024, factor=0.05)
    target = source.whole(32000, 2500, dtype=torch.int64)

    def run(rows):
        return (tiercel.linear_cross_entropy(x[rows], weight, target[rows], reduction="none"),)

    return Rows(2500, run)


@case("sample")
def sample(source):
    logits, seeds = source.normal(300, 32000), source.whole(1 << 30, 300, dtype=torch.int64)

    def run(rows):
        return tiercel.sample(logits[rows], top_p=0.9, seeds=seeds[rows], return_logprobs=True)

    return Rows(300, run)


@case("sample", "top-logprobs")
def sample_top_logprobs(source):
    logits, seeds = source.normal(300, 32000), source.whole(1 << 30, 300, dtype=torch.int64)
    return Rows(300, lambda rows: tiercel.sample(logits[rows], seeds=seeds[rows], top_logprobs=20))


@case("verify_draft")
def verify_draft(source):
    logits = source.normal(100, 4, 8000)
    draft, seeds = source.whole(8000, 100, 3), source.whole(1 << 30, 100, dtype=torch.int64)
    return Rows(
        100, lambda rows: tiercel.verify_draft(draft[rows], logits[rows], seeds=seeds[rows])
    )
