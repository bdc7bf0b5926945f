# SPDX-License-Identifier: Apache-2.0
"""decode_attention and merge_attention_states on an H100 or H200, against float64."""

import pytest
import torch

import tiercel
from tiercel import _C, ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FLOAT8 = torch.float8_e4m3fn
SPLITS = [-1, 1, 2, 4, 8]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(
        lengths, queries=1, heads=8, kv_heads=2, d=128, page=16, dtype=torch.bfloat16, cache=None
    ):
        """Keys and values in turn in one tensor; table entries that nobody uses are no pages."""
        columns = -(-max(lengths) // page) + 1
        pages = len(lengths) * columns + 3
        shape = (pages, 2, page, kv_heads, d)
        stored = torch.randn(shape, device="cuda", generator=generator).to(cache or dtype)
        q = torch.randn((len(lengths), queries, heads, d), device="cuda", generator=generator).to(
            dtype
        )
        table = torch.randperm(pages, device="cuda", generator=generator)
        table = table[: len(lengths) * columns].view(len(lengths), columns).int()
        for row, length in zip(table, lengths, strict=True):
            row[-(-length // page) :] = 1 << 30
        seqused = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return q, stored[:, 0], stored[:, 1], table, seqused

    return draw


def assert_right(result, lse, inputs, **options):
    """As in test_attention_gpu.py; what float8 values are off by does not count."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth, sums = ref.decode_attention(*wide, return_lse=True, **options)
    unit = torch.finfo(inputs[0].dtype).eps / 2
    scale = options.get("v_scale")
    size = 1.0 if scale is None else float(scale.max())
    error = (result.double() - truth).abs()
    assert (error / (truth.abs() + size)).max() <= 6 * unit, error.max().item() / unit
    rms = error.square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-9)
    assert rms <= 2.5 * unit, rms.item() / unit
    if lse is not None:
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=5e-5)


def check(inputs, **options):
    result, lse = tiercel.decode_attention(*inputs, return_lse=True, **options)
    assert_right(result, lse, inputs, **options)


def check_split(inputs, split, left=-1, right=0):
    """The same with a split of the test's choice."""
    q = inputs[0]
    out, lse = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1])).float()
    rest = (left, right, q.shape[3] ** -0.5, 0.0, -1, split)
    given = (*inputs, out, None, None, None, lse)
    needed = _C.decode_attention(*given, None, *rest)
    if needed:
        workspace = torch.full((needed,), float("nan"), device="cuda")
        assert _C.decode_attention(*given, workspace, *rest) == 0
        out.fill_(float("nan"))  # the workspace is as good for another launch
        assert _C.decode_attention(*given, workspace, *rest) == 0
    options = {"window": (left, right), "causal": False}
    assert_right(out, lse, inputs, **options)


RAGGED = [0, 1, 15, 16, 17, 100, 1000, 31, 0, 4097]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [None, FLOAT8])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_small(make, dtype, cache, d):
    check(make([1, 40, 0, 130], d=d, dtype=dtype, cache=cache))


@pytest.mark.sanitize
@pytest.mark.parametrize("split", SPLITS)
def test_splits_small(make, split):
    check_split(make([1, 40, 0, 330]), split)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("cache", [None, FLOAT8])
@pytest.mark.parametrize("split", SPLITS)
def test_ragged(make, page, d, cache, split):
    check_split(make(RAGGED, page=page, d=d, cache=cache), split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 511, 512, 513, 8191, 8192, 20000])
def test_one_sequence(make, split, length):
    check_split(make([length], heads=32, kv_heads=8), split)


@pytest.mark.parametrize("heads", [3, 200, 300])
def test_more_heads_than_blocks_take_together(make, heads):
    """Columns of one tile of a sequence, of some, of all."""
    check_split(make([400, 3, 1000], heads=heads, kv_heads=heads, d=64), -1)


@pytest.mark.parametrize("d", [8, 40, 64, 80, 96, 128, 160, 192, 256])
def test_head_dimensions(make, d):
    check(make(RAGGED, d=d))
    if d % 16 == 0:
        check(make(RAGGED, d=d, cache=FLOAT8, dtype=torch.float16))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 8), (32, 8), (40, 8), (64, 8), (128, 4)])
@pytest.mark.parametrize("queries", [1, 2, 4, 7])
@pytest.mark.parametrize("cache", [None, FLOAT8])
def test_heads_and_queries(make, heads, queries, cache):
    inputs = make([3, 500, 0, 77], queries, *heads, cache=cache)
    check(inputs)
    check(inputs, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "heads"), [(5, (32, 8)), (8, (8, 2)), (17, (8, 2)), (1, (64, 2))]
)
def test_tiles_of_32_rows(make, queries, heads, dtype):
    inputs = make([3, 5000, 0, 777], queries, *heads, dtype=dtype)
    check(inputs)
    check(inputs, window=(300, 0), softcap=5.0)
    check_split(inputs, -1, left=40, right=1)


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (16, 2), (100, None), (None, 1), (300, 0)])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("prefix", [None, (0, 1, 5, 20, 400, 7, 1000, 2, 3, 100)])
def test_masks(make, window, d, prefix):
    inputs = make(RAGGED, 3, d=d)
    if prefix is not None:
        prefix = torch.tensor(prefix, dtype=torch.int32, device="cuda")
    for causal in (False, True):
        check(inputs, window=window, causal=causal, prefix=prefix)


@pytest.mark.parametrize("split", SPLITS)
def test_windows_in_splits(make, split):
    check_split(make(RAGGED, 2), split, left=200)


@pytest.mark.parametrize("cache", [None, FLOAT8])
def test_softcap_and_scale(make, cache):
    q, *rest = make(RAGGED, 2, cache=cache)
    check((q * 3, *rest), softcap=2.5)
    check((q, *rest), softcap=50.0, scale=0.3)
    check((q, *rest), scale=1e-3)
    check((q * 20, *rest), scale=0.5)


@pytest.mark.parametrize("per_head", [False, True])
def test_float8_scales(make, per_head):
    inputs = make(RAGGED, cache=FLOAT8)
    scales = [torch.rand(2 if per_head else 1, device="cuda") + 0.5 for _ in range(2)]
    check(inputs, k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e30])
def test_float8_with_queries_beyond_float16(make, factor):
    q, *rest = make(RAGGED, cache=FLOAT8)
    check((q * factor, *rest), scale=0.1 / factor)


def test_strides(make):
    q, k, v, table, lengths = make(RAGGED, 2)
    packed = torch.cat([q, q, q], dim=2)[:, :, 8:16]
    by_head = k.transpose(1, 2).contiguous().transpose(1, 2)  # [pages, Hk, page, D] in memory
    wide = torch.cat([table, table], dim=1)[:, : table.shape[1]]
    expected = tiercel.decode_attention(q, k, v, table, lengths)
    out = torch.empty(10, 2, 24, 128, dtype=q.dtype, device="cuda")[:, :, 8:16]
    tiercel.decode_attention(packed, by_head, v, wide, lengths, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("lengths", [RAGGED, [3000, 5]])
def test_index_tensors_of_any_strides(make, lengths):
    q, k, v, table, lengths = make(lengths, 2)
    apart = table.new_full((*table.shape, 2), -1)
    apart[..., 0] = table
    of_each = torch.stack([lengths, -lengths], dim=1)[:, 0]
    expected = tiercel.decode_attention(q, k, v, table, lengths, prefix=lengths)
    for given in (apart[..., 0], table.T.contiguous().T):
        result = tiercel.decode_attention(q, k, v, given, of_each, prefix=of_each)
        assert torch.equal(result, expected)


@pytest.mark.sanitize
def test_entries_that_are_no_pages(make):
    """They count as the last page of the cache."""
    q, k, v, table, lengths = make([100, 60, 0])
    bad, good = table.clone(), table.clone()
    for at, entry in (((0, 1), -1), ((0, 3), len(k)), ((1, 0), 2**31 - 1), ((1, 2), -(2**31))):
        bad[at], good[at] = entry, len(k) - 1
    result, lse = tiercel.decode_attention(q, k, v, bad, lengths, return_lse=True)
    expected, sums = tiercel.decode_attention(q, k, v, good, lengths, return_lse=True)
    assert torch.equal(result, expected) and torch.equal(lse, sums)
    assert (result[2] == 0).all() and (lse[2] == -torch.inf).all()


def test_more_keys_than_the_table_has_room_for(make):
    q, k, v, table, _ = make([64, 64])
    table[:, -1] = 0
    many = torch.tensor([10_000, -5], dtype=torch.int32, device="cuda")
    same = torch.tensor([80, 0], dtype=torch.int32, device="cuda")
    result = tiercel.decode_attention(q, k, v, table, many)
    assert torch.equal(result, tiercel.decode_attention(q, k, v, table, same))


def test_special_values(make):
    q, k, v, table, lengths = make([50, 50])
    q[0, 0, 3] = float("nan")
    result = tiercel.decode_attention(q, k, v, table, lengths)
    assert result[0, 0, 3].isnan().all()
    clean = torch.ones_like(result, dtype=torch.bool)
    clean[0, 0, 3] = False
    assert result[clean].isfinite().all()


def test_more_than_2_to_31_elements():
    pages = (1 << 31) // (16 * 8 * 128) + 100
    cache = torch.zeros((pages, 16, 8, 128), dtype=FLOAT8, device="cuda")
    last = torch.randn((40, 16, 8, 128), device="cuda").to(FLOAT8)
    cache[-40:] = last
    q = torch.randn((1, 1, 32, 128), device="cuda").bfloat16()
    lengths = torch.tensor([600], dtype=torch.int32, device="cuda")
    table = torch.arange(40, dtype=torch.int32, device="cuda")[None]
    expected = tiercel.decode_attention(q, last, last, table, lengths)
    result = tiercel.decode_attention(q, cache, cache, table + (pages - 40), lengths)
    assert torch.equal(result, expected) and expected.abs().max() > 0


@pytest.mark.parametrize("lengths", [[500, 3], [30_000, 3]])
@pytest.mark.parametrize("heads", [(8, 2), (32, 8)])
def test_first_call_inside_a_graph_capture(make, lengths, heads):
    inputs = make(lengths, heads=heads[0], kv_heads=heads[1])
    out = torch.empty_like(inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.decode_attention(*inputs, out=out)
    for shorter in (0, 1, 2):  # lengths may change between replays
        inputs[4].sub_(shorter)
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, None, inputs)


@pytest.mark.parametrize("length", [300, 30_000])
def test_dependent_launches_see_what_went_before(make, length):
    q, *rest = make([length, 77])
    x = expected = q
    for _ in range(20):
        x = tiercel.decode_attention(x, *rest)
    for _ in range(20):
        expected = tiercel.decode_attention(expected, *rest)
        torch.cuda.synchronize()
    assert torch.equal(x, expected)


@pytest.mark.parametrize("heads", [(8, 2), (32, 8)])
def test_on_several_streams_at_once(make, heads):
    """Each has a workspace of its own, and so has a graph that runs beside them."""
    every = [make([30_000, length], heads=heads[0], kv_heads=heads[1]) for length in (77, 9000, 3)]
    expected = [tiercel.decode_attention(*inputs) for inputs in every]
    streams = [torch.cuda.Stream() for _ in every]
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(expected[0])
    with torch.cuda.graph(graph):
        for _ in range(20):
            tiercel.decode_attention(*every[0], out=out)
    torch.cuda.synchronize()
    results = [[] for _ in every]
    for _ in range(20):
        for inputs, stream, found in zip(every, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(tiercel.decode_attention(*inputs))
    graph.replay()
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        assert all(torch.equal(x, right) for x in found)
    assert torch.equal(out, expected[0])


def test_two_devices(make):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    inputs = make(RAGGED)
    expected = tiercel.decode_attention(*inputs)
    result = tiercel.decode_attention(*(x.to("cuda:1") for x in inputs))
    assert torch.equal(result.cpu(), expected.cpu())


def test_after_a_cache_write(make):
    q, k, v, table, lengths = make([20, 33])
    key, value = (torch.randn(2, 2, 128, device="cuda").bfloat16() for _ in range(2))
    last = lengths.long() - 1
    slots = table.gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16
    tiercel.kv_cache_write(key, value, k, v, slots.long())
    check((q, k, v, table, lengths))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (3, 5, 7, 64), (2, 1000, 8, 128)])
def test_merge(dtype, shape):
    batch, queries, heads, _ = shape
    a, b = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(batch, heads, queries, device="cuda") * 5 for _ in range(2))
    lse_a[torch.rand_like(lse_a) < 0.2] = -torch.inf
    lse_b[torch.rand_like(lse_b) < 0.2] = -torch.inf
    a[lse_a.transpose(1, 2) == -torch.inf] = float("nan")
    out, lse = tiercel.merge_attention_states(a, lse_a, b, lse_b)
    truth, sums = ref.merge_attention_states(*(x.double() for x in (a, lse_a, b, lse_b)))
    unit = max(torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(out.double(), truth, rtol=unit, atol=unit)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    tiercel.merge_attention_states(a, lse_a, b, lse_b, out=(a, torch.empty_like(lse)))
    assert torch.equal(a, out)


def test_merge_of_a_shared_prefix(make):
    """Half of the keys each, as if they were two caches."""
    q, k, v, table, lengths = make([64, 64])
    half = torch.tensor([32, 32], dtype=torch.int32, device="cuda")
    parts = [
        tiercel.decode_attention(q, k, v, part.contiguous(), half, return_lse=True)
        for part in (table[:, :2], table[:, 2:4])
    ]
    out, lse = tiercel.merge_attention_states(*parts[0], *parts[1])
    whole, sums = tiercel.decode_attention(q, k, v, table, lengths, return_lse=True)
    torch.testing.assert_close(out, whole, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)
