# SPDX-License-Identifier: Apache-2.0
"""Whatever index tensors hold, kernels stay inside of their tensors and do as the reference does.

The emulator stops an access outside. Margins of somebody else's bytes lie around each tensor.
"""

import itertools

import pytest
import torch
from support.index_fuzz import CASES, Draw, reference, run

pytestmark = pytest.mark.torch

# Operators whose index tensors this file fuzzes: see tests/api/test_index_checks.py.
FUZZED = (
    "cross_entropy",
    "grouped_gemm",
    "kv_cache_write",
    "linear_cross_entropy",
    "moe_align_block_size",
    "qk_norm_rope",
    "qk_norm_rope_cache",
    "rotary_embedding",
    "topk_softmax_align",
)


@pytest.mark.parametrize("case", range(CASES))
def test_kv_cache_write(case):
    draw = Draw(case)
    tokens, heads, size = draw.of(1, 5, 33), draw.of(1, 3), draw.of(20, 64)
    blocks, places = draw.of(2, 5), draw.of(1, 8, 12)
    dtype = draw.of(torch.bfloat16, torch.float16)
    float8 = draw.of(False, True)
    order = torch.randperm(blocks * places, generator=draw.generator)[:tokens]
    slots = torch.full((tokens,), -1)
    slots[: len(order)] = order
    slots = draw.strays(slots, blocks * places, wide=draw.of(False, True))
    kind = torch.float8_e4m3fn if float8 else dtype
    caches = [draw.normal(blocks, places, heads, size).to(kind) for _ in range(2)]
    key, value = (draw.normal(tokens, heads, size, dtype=dtype) for _ in range(2))
    scale = draw.uniform(draw.of(1, heads)) + 0.5 if float8 else None
    due = [cache.clone() for cache in caches]
    reference("kv_cache_write")(key, value, *due, slots, scale, scale, None)
    _, given = run("kv_cache_write", key, value, *caches, slots, scale, scale, None)
    for got, exact in zip(given[2:4], due, strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("case", range(CASES))
def test_cross_entropy(case):
    draw = Draw(case)
    rows, classes = draw.of(1, 6, 40), draw.of(1, 9, 64, 1001)
    dtype = draw.of(torch.float32, torch.bfloat16, torch.float16)
    target = torch.randint(classes, (rows,), generator=draw.generator)
    target = draw.strays(target, classes, wide=draw.of(False, True))
    weight, scale = (draw.of(None, draw.uniform(n) + 0.5) for n in (classes, rows))
    ignored = draw.of(-100, -1, 0, int(target[0]))
    form = draw.of("cross_entropy", "cross_entropy_with_gradient", "cross_entropy_")
    logits = draw.normal(rows, classes, dtype=dtype)
    options = (weight, scale, ignored, draw.of(0.0, 0.1), 0.0, None, None)
    due = list(reference("cross_entropy_with_gradient")(logits, target, *options))
    got, given = run(form, logits, target, *options)
    got = got if isinstance(got, tuple) else (got, given[0])[: 1 + (form == "cross_entropy_")]
    for one, exact in zip(got, due, strict=False):
        torch.testing.assert_close(one, exact, rtol=2**-6, atol=1e-5, equal_nan=True)
    due = reference("cross_entropy_mean_scale")(logits, target, weight, ignored, None)
    got, _ = run("cross_entropy_mean_scale", logits, target, weight, ignored, None)
    torch.testing.assert_close(got, due, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", range(CASES))
def test_linear_cross_entropy(case):
    draw = Draw(case)
    rows, hidden, classes = draw.of(1, 6, 40), draw.of(1, 24), draw.of(1, 9, 64, 1001)
    dtype = draw.of(torch.float32, torch.bfloat16, torch.float16)
    target = torch.randint(classes, (rows,), generator=draw.generator)
    target = draw.strays(target, classes, wide=draw.of(False, True))
    x, weight = draw.normal(rows, hidden, dtype=dtype), draw.normal(classes, hidden, dtype=dtype)
    bias = draw.of(None, draw.normal(classes, dtype=dtype))
    of_classes, scale = (draw.of(None, draw.uniform(n) + 0.5) for n in (classes, rows))
    ignored = draw.of(-100, -1, 0, int(target[0]))
    given = (
        x,
        weight,
        target,
        bias,
        of_classes,
        scale,
        ignored,
        draw.of(0.0, 0.1),
        0.0,
        None,
        None,
    )
    got, _ = run("linear_cross_entropy", *given, None)
    due = reference("linear_cross_entropy")(*given, None)
    torch.testing.assert_close(got, due, rtol=2**-6, atol=2**-5, equal_nan=True)
    given = (*given, draw.of(False, True), True, draw.of(False, True), True)
    given = (*given, draw.of(None, torch.float32), None)
    got, _ = run("linear_cross_entropy_with_gradient", *given)
    due = reference("linear_cross_entropy_with_gradient")(*given)
    for one, exact in zip(got, due, strict=True):
        torch.testing.assert_close(one, exact, rtol=2**-5, atol=2**-6, equal_nan=True)


@pytest.mark.parametrize("case", range(CASES))
def test_rotary_embedding(case):
    draw = Draw(case)
    tokens, heads, others = draw.of(1, 9, 40), draw.of(1, 4), draw.of(0, 2)
    size = draw.of(64, 48, 10)
    turned = draw.of(size, size // 4 * 2)
    dtype = draw.of(torch.float32, torch.bfloat16, torch.float16)
    rows = draw.of(1, 7, 50)
    positions = torch.randint(rows, (tokens,), generator=draw.generator)
    positions = draw.strays(positions, rows, wide=draw.of(False, True))
    cache = draw.normal(rows, turned, dtype=draw.of(torch.float32, dtype))
    q, k = (
        draw.normal(tokens, heads, size, dtype=dtype),
        draw.normal(tokens, others, size, dtype=dtype),
    )
    interleaved = draw.of(False, True)
    due = reference("rotary_embedding")(positions, q, k, cache, interleaved, None)
    form = draw.of("rotary_embedding", "rotary_embedding_", "rotary_embedding.out")
    outputs = [torch.full_like(x, torch.nan) for x in (q, k)] if form.endswith("out") else []
    got, given = run(form, positions, q, k, cache, interleaved, *outputs, None)
    if got is None:
        got = given[5:7] if outputs else given[1:3]
    for one, exact in zip(got, due, strict=True):
        torch.testing.assert_close(one, exact, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("case", range(CASES))
def test_qk_norm_rope(case):
    draw = Draw(case)
    tokens, heads, others = draw.of(1, 5, 33), draw.of(1, 4), draw.of(0, 3)
    rows, size = draw.of(1, 7, 50), draw.of(64, 80, 16)
    dtype = draw.of(torch.bfloat16, torch.float16)
    positions = torch.randint(rows, (tokens,), generator=draw.generator)
    positions = draw.strays(positions, rows, wide=draw.of(False, True))
    q, k, grad_q, grad_k = (
        draw.normal(tokens, count, size, dtype=dtype) for count in (heads, others) * 2
    )
    angles = draw.normal(rows, draw.of(16, size, 0), dtype=draw.of(torch.float32, dtype))
    weight = draw.of(None, draw.uniform(size) + 0.5)
    options = (positions, angles, weight, weight, 1e-6, draw.of(False, True))
    due = reference("qk_norm_rope")(q, k, *options, None)
    got, _ = run("qk_norm_rope", q, k, *options, None)
    given = (q, k, grad_q, grad_k, *options, draw.of(False, True), True, None)
    due = (*due, *reference("qk_norm_rope_backward")(*given))
    got = (*got, *run("qk_norm_rope_backward", *given)[0])
    for one, exact in zip(got, due, strict=True):
        torch.testing.assert_close(one, exact, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("case", range(CASES))
def test_qk_norm_rope_cache(case):
    draw = Draw(case)
    tokens, heads, others = draw.of(1, 5, 33), draw.of(1, 4), draw.of(1, 3)
    blocks, places, rows = draw.of(2, 5), draw.of(1, 8, 12), draw.of(1, 7, 50)
    size = draw.of(64, 80, 16)
    turned = draw.of(16, size, 0)
    dtype = draw.of(torch.bfloat16, torch.float16)
    float8, wide = draw.of(False, True), draw.of(False, True)
    order = torch.randperm(blocks * places, generator=draw.generator)[:tokens]
    slots = torch.full((tokens,), -1)
    slots[: len(order)] = order
    slots = draw.strays(slots, blocks * places, wide)
    sections = draw.of(None, [turned // 2 - 3, 2, 1] if turned else None)
    count = tokens if sections is None else 3 * tokens
    positions = torch.randint(rows, (count,), generator=draw.generator)
    positions = draw.strays(positions, rows, wide)
    if sections is not None:
        positions = positions.view(3, tokens)
    kind = torch.float8_e4m3fn if float8 else dtype
    q = draw.normal(tokens, heads, size, dtype=dtype)
    k, v = (draw.normal(tokens, others, size, dtype=dtype) for _ in range(2))
    written = [draw.normal(*q.shape).to(kind)]
    written += [draw.normal(blocks, places, others, size).to(kind) for _ in range(2)]
    angles = draw.normal(rows, turned, dtype=draw.of(torch.float32, dtype))
    weight = draw.of(None, draw.uniform(size) + 0.5)
    scales = [draw.uniform(draw.of(1, n)) + 0.5 if float8 else None for n in (heads, others)]
    options = (weight, weight, 1e-6, draw.of(False, True), scales[0], *scales[1:] * 2)
    options += (sections, sections is not None and draw.of(False, True), None)
    due = [tensor.clone() for tensor in written]
    reference("qk_norm_rope_cache")(q, k, v, *due, slots, positions, angles, *options)
    _, given = run("qk_norm_rope_cache", *(q, k, v, *written, slots, positions, angles, *options))
    for got, exact in zip(given[3:6], due, strict=True):
        rtol = 2**-3 if float8 else 2**-7
        torch.testing.assert_close(got.float(), exact.float(), rtol=rtol, atol=1e-2)
    # Lines of the cache that no slot names are as they were, bit for bit.
    kept = torch.ones(blocks * places, dtype=torch.bool)
    kept[slots[(slots >= 0) & (slots < blocks * places)].long()] = False
    for got, before in zip(given[4:6], written[1:], strict=True):
        bits = [t.view(torch.uint8).flatten(0, 1)[kept] for t in (got, before)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("case", range(CASES))
def test_moe_align_block_size(case):
    draw = Draw(case)
    tokens, k = draw.of(1, 20, 70, 300), draw.of(1, 4)
    experts, block = draw.of(1, 8, 130), draw.of(4, 16, 24)
    wide = draw.of(False, True)
    ids = torch.randint(experts, (tokens, k), generator=draw.generator)
    ids = draw.strays(ids, experts, wide)
    expert_map = None
    if draw.of(False, True):
        expert_map = torch.randperm(experts, generator=draw.generator)
        expert_map = draw.strays(expert_map, experts, wide=False)
    args = (ids, block, experts, expert_map, draw.of(False, True), draw.of(False, True), None)
    due = reference("moe_align_block_size")(*args)
    got, _ = run("moe_align_block_size", *args)
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)


def test_moe_align_block_size_in_two_launches():
    draw = Draw(1)
    ids = draw.strays(torch.randint(8, (7000, 4), generator=draw.generator), 8, wide=True)
    due = reference("moe_align_block_size")(ids, 16, 8, None, False, False, None)
    got, _ = run("moe_align_block_size", ids, 16, 8, None, False, False, None)
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)


@pytest.mark.parametrize("case", range(CASES))
def test_topk_softmax_align(case):
    draw = Draw(case)
    tokens, experts = draw.of(1, 9, 40), draw.of(8, 64)
    expert_map = torch.randperm(experts, generator=draw.generator)
    expert_map = draw.strays(expert_map, experts, wide=False)
    scores = draw.normal(tokens, experts, dtype=draw.of(torch.float32, torch.bfloat16))
    options = (True, draw.of(False, True), draw.of(torch.int32, torch.int64), False)
    args = (scores, 4, 16, expert_map, *options, draw.of(False, True), None)
    due = reference("topk_softmax_align")(*args)
    got, _ = run("topk_softmax_align", *args)
    for one, exact in zip(got[1:], due[1:], strict=True):
        assert torch.equal(one, exact)


@pytest.mark.parametrize("case", range(CASES))
def test_experts_of_a_table(case):
    """topk_softmax with `expert_table`, alone and with the alignment."""
    draw = Draw(case)
    rows, experts, tokens = draw.of(1, 9, 40), draw.of(8, 64), draw.of(1, 7, 300)
    k, n_shared = draw.of(1, 6), draw.of(0, 2)
    ids = torch.randint(tokens, (rows,), generator=draw.generator)
    ids = draw.strays(ids, tokens, wide=draw.of(False, True))
    table = torch.randint(experts, (tokens, k), generator=draw.generator)
    table = draw.strays(table, experts, wide=False)
    scores = draw.normal(rows, experts, dtype=draw.of(torch.float32, torch.bfloat16))
    softmax = (True, draw.of(False, True), draw.of(torch.int32, torch.int64))
    scoring = draw.of("softmax", "sigmoid", "sqrtsoftplus")
    first = (scores, ids, table, k + n_shared)
    options = (*softmax, scoring, 1.5, n_shared)
    rest = (draw.of(False, True), draw.of(False, True), None)
    for name, args in (
        ("hash_route", (*first, *options, None)),
        ("hash_route_align", (*first, 16, None, *options, *rest)),
    ):
        due = reference(name)(*args)
        got, _ = run(name, *args)
        torch.testing.assert_close(got[0], due[0], rtol=5e-6, atol=1e-7)
        for one, exact in zip(got[1:], due[1:], strict=True):
            assert torch.equal(one, exact)


def covered(offsets, rows):
    """How many groups each row is in, those before the first one and behind the last one too."""
    bounds = [0, *offsets.clamp(0, rows).tolist(), rows]
    count = torch.zeros(rows, dtype=torch.int64)
    for first, end in itertools.pairwise(bounds):
        count[first:end] += 1
    return count


@pytest.mark.parametrize("case", range(CASES))
def test_grouped_gemm(case):
    draw = Draw(case)
    rows, groups = draw.of(5, 70, 200), draw.of(1, 3, 6)
    n, k = draw.of(8, 72), draw.of(16, 80)
    offsets = torch.sort(torch.randint(rows + 1, (groups + 1,), generator=draw.generator)).values
    offsets = draw.strays(offsets, rows + 1, wide=draw.of(False, True))
    dtype = draw.of(torch.bfloat16, torch.float16)
    x, grad = draw.normal(rows, k, dtype=dtype), draw.normal(rows, n, dtype=dtype)
    w = draw.normal(groups, n, k, dtype=dtype)
    name, args = draw.of(
        ("grouped_gemm", (x, w)),
        ("grouped_gemm_backward_x", (grad, w)),
        ("grouped_gemm_backward_weight", (grad, x)),
    )
    due = reference(name)(*args, offsets, None)
    got, _ = run(name, *args, offsets, None)
    if not name.endswith("weight"):
        once = covered(offsets, rows) == 1
        got, due = got[once], due[once]
    torch.testing.assert_close(got, due, rtol=2**-6, atol=5e-2)


@pytest.mark.parametrize("case", range(CASES))
def test_grouped_gemm_of_float8(case):
    """Offsets, and counts of rows in memory of each group's own."""
    draw = Draw(case)
    rows, groups = draw.of(5, 70, 200), draw.of(1, 3, 6)
    n, k = draw.of(8, 136), draw.of(16, 272)
    blocks, wide, expected = -(-k // 128), draw.of(False, True), draw.of(1, 100)
    w = draw.normal(groups, n, k, scale=0.2).to(torch.float8_e4m3fn)
    w_scale = draw.uniform(groups, -(-n // 128), blocks)
    masked = draw.of(False, True)
    sizes = (groups, rows) if masked else (rows,)
    x, x_scale = draw.normal(*sizes, k).to(torch.float8_e4m3fn), draw.uniform(*sizes, blocks)
    if masked:
        numbers = draw.strays(
            torch.randint(rows + 1, (groups,), generator=draw.generator), rows, wide
        )
        used = torch.arange(rows) < numbers[:, None]
    else:
        ends = torch.randint(rows + 1, (groups + 1,), generator=draw.generator)
        numbers = draw.strays(torch.sort(ends).values, rows + 1, wide)
        used = covered(numbers, rows) == 1
    name = "grouped_gemm_masked" if masked else "grouped_gemm_fp8"
    args = (x, w, x_scale, w_scale, numbers, expected, None)
    due = reference(name)(*args)[used]
    got, _ = run(name, *args)
    torch.testing.assert_close(got[used], due, rtol=2**-6, atol=5e-2)
