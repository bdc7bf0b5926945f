# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator: which pages of a float8 cache are copied to 16 bits before tiles
read them, and which the tiles' blocks copy for each other."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, wide, with_room
from support.paged_emulator import arguments

import tiercel

pytestmark = pytest.mark.torch

PLACES, AHEAD, MOST = 128, 6, 1 << 27
GROUP, QUERIES = 16, 8  # query heads of a key head; queries of a tile
SCALES = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}

# (new tokens, keys). With two multiprocessors or up to seven: few tiles, few keys before the new
# ones, few pages, and pages for the tiles' blocks.
CHUNKS = [(66, 1000), (64, 100), (40, 1000), (400, 790), (64, 769), (0, 5), (66, 131), (65, 0)]
BESIDE = [(1, 300), (66, 1030), (1, 40), (9, 150), (0, 0), (64, 900), (1, 1), (40, 70)]


def make_float8(lengths, **options):
    q, k, v, *rest = make(lengths, (2 * GROUP, 2), **options)
    return (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)


class Division:
    """The expected contents of paged_mixed's workspace, in order: copies of keys and values; pages
    that are copied before; states of all pages; first tiles; first pages."""

    def __init__(self, given, multiprocessors, decoding):
        q, k, _, table, used, starts, _ = given
        batch, capacity = len(table), table.shape[1] * k.shape[1]
        self.few, self.many = (1, 4 * QUERIES + 1) if decoding else (0, 1)
        each, self.heads = -(-capacity // PLACES), k.shape[2]
        floats = PLACES * self.heads * q.shape[2]
        sequences = min(batch, len(q) // self.many) if decoding else batch
        self.pages = min(sequences * each, MOST // floats if decoding else sequences * each)
        self.copies = self.pages * floats
        self.before, self.batch = min(self.pages, 65535), batch
        self.tile_starts, self.copied, self.sources, self.done = [0], [], set(), set()
        pages = 0
        for b, (first, end, keys) in enumerate(zip(starts, starts[1:], used, strict=False)):
            rows, keys = int(end - first), min(max(int(keys), 0), capacity)
            tiles = -(-rows // QUERIES) if rows > self.few else 0
            own = -(-keys // PLACES) if tiles and rows >= self.many else 0
            fits = own > 0 and pages + own <= self.pages
            self.copied.append(pages if fits else -1)
            by_tiles = own >= multiprocessors and keys > 2 * rows and tiles >= 8
            ahead = min(own, AHEAD) if by_tiles else own
            for page in range(own if fits else 0):
                self.done.add(pages + page)
                if page >= own - ahead:
                    self.sources.add((b, page, pages + page, 0))
            self.tile_starts.append(self.tile_starts[-1] + tiles)
            pages += own

    def floats(self):
        integers = 4 * self.before + 2 * self.heads * self.pages + 2 * self.batch + 1
        return self.copies + -(-integers // 4) * 4

    def compare(self, workspace):
        rest = workspace[self.copies : self.floats()].view(torch.int32)
        sizes = (4 * self.before, 2 * self.heads * self.pages, self.batch + 1, self.batch)
        sources, states, tile_starts, copied = rest[: sum(sizes)].split(sizes)
        assert tile_starts.tolist() == self.tile_starts and copied.tolist() == self.copied
        sources = [tuple(x) for x in sources.view(-1, 4).tolist()]
        listed = [x for x in sources if x[0] >= 0]
        assert set(listed) == self.sources and len(listed) == len(self.sources)
        assert all(x == (-1, 0, 0, 0) for x in sources[len(listed) :])
        for page, of_heads in enumerate(states.view(self.pages, -1).tolist()):
            assert set(of_heads) == {2 if page in self.done else 0}, page


def run(given, division, workspace, **options):
    values = arguments(given, **options)
    plan = kernels.paged_attention_plan(*values)
    q, heads = given[0], given[0].shape[1]
    of_parts = 0 if plan["combine"] == "none" else plan["parts"] * len(q) * heads
    floats = division.floats() + of_parts * (q.shape[2] // 2 + 1)
    assert len(workspace) == plan["workspace"] == floats
    kernels.paged_attention(*values, workspace)
    division.compare(workspace)
    return values[10:12]


def workspace_of(given, decoding, **options):
    plan = kernels.paged_attention_plan(*arguments(given, **options))
    assert plan["widen"] == "paged_widen<BFloat16>" and plan["queries"] == QUERIES
    assert (plan["decode"] != "none") == decoding
    return torch.full((plan["workspace"],), torch.nan)


def check(given, multiprocessors, decoding=False, by_tiles=True, **options):
    division = Division(given, multiprocessors, decoding)
    assert (len(division.sources) < len(division.done)) == by_tiles
    with running(multiprocessors=multiprocessors, **options):
        out, lse = run(given, division, workspace_of(given, decoding, **SCALES), **SCALES)
    truth = tiercel.ref.paged_attention(*wide(given), **SCALES, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


@pytest.mark.parametrize(
    ("multiprocessors", "by_tiles"), [(1, True), (7, True), (8, True), (9, False)]
)
def test_chunks(multiprocessors, by_tiles):
    check(make_float8(CHUNKS, around=(2, 3)), multiprocessors, by_tiles=by_tiles)


@pytest.mark.parametrize(("multiprocessors", "by_tiles"), [(2, True), (9, True), (10, False)])
def test_beside_decoding_sequences(multiprocessors, by_tiles):
    given = with_room(make_float8(BESIDE), 32768)
    check(given, multiprocessors, decoding=True, by_tiles=by_tiles)


@pytest.mark.parametrize("options", [{"seed": 1}, {"seed": 2, "lazy": False}])
@pytest.mark.parametrize("d", [16, 80, 128])
def test_any_order_of_warps(d, options):
    check(make_float8([(70, 1100), (0, 3), (66, 900)], d=d, page=64), 3, **options)


def test_bits_are_those_of_a_cache_of_16_bits():
    given = make_float8(CHUNKS)
    narrow = (given[0], *(x.to(torch.bfloat16) for x in given[1:3]), *given[3:])
    with running(multiprocessors=2):
        results = run(given, Division(given, 2, False), workspace_of(given, False))
        values = arguments(narrow)
        assert kernels.paged_attention_plan(*values)["workspace"] == 0
        kernels.paged_attention(*values, None)
    assert all(torch.equal(x, y) for x, y in zip(results, values[10:12], strict=True))


def test_other_lengths_in_the_same_workspace():
    """A graph runs again like this: the states of the previous run must not matter."""
    first = [(66, 1000), (1, 300), (0, 9), (66, 131), (64, 900), (1, 1), (1, 20), (1, 1000)]
    second = [(1, 900), (64, 1000), (66, 128), (0, 0), (1, 5), (66, 1000), (1, 999), (1, 2)]
    cases = [
        with_room(make_float8(lengths, seed=seed), 40960)
        for seed, lengths in enumerate((first, second))
    ]
    with running(multiprocessors=2):
        used = workspace_of(cases[0], True)
        run(cases[0], Division(cases[0], 2, True), used)
        results = run(cases[1], Division(cases[1], 2, True), used)
        expected = run(cases[1], Division(cases[1], 2, True), torch.full_like(used, torch.nan))
        again = run(cases[0], Division(cases[0], 2, True), used)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    truth = tiercel.ref.paged_attention(*wide(cases[0]), return_lse=True)
    assert_close(*again, *truth)
