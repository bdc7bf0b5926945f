# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator in the batch-invariant mode: parts of fixed places."""

import pytest
import torch
from support.emulator import kernels
from support.paged import make
from support.paged_emulator import arguments, check, run

import tiercel

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (1100, 5), "causal": False}, {"softcap": 5.0}])
def test_parts_of_a_fixed_size(d, options):
    given = make([(70, 2100), (0, 3), (1, 2048), (33, 33), (2, 2049), (3, 0)], d=d, around=(3, 2))
    with tiercel.batch_invariant():
        plan = kernels.paged_attention_plan(*arguments(given, **options))
        # A mask or a width without a kernel for a tile's parts one after the other has longer ones.
        assert plan["parts"] == (5 if d == 128 and not options else 2) and plan["combine"] != "none"
        check(given, **options)
        check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]), **options)


class Sequence:
    """A sequence whose queries are run in chunks, beside others and alone."""

    keys, queries = 2180, 150  # the last ones

    def __init__(self, d=64, **options):
        self.given = make([(self.queries, self.keys), (9, 40), (1, 1500)], d=d)
        self.options = {"sinks": torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **options}

    def rows(self, first, last, others=(), most=None, lse=True):
        """Results of the queries from `first` to `last`, with `others` behind them."""
        q, k, v, table, used, starts, _ = self.given
        at = [(0, first, last, self.keys - self.queries + last)]
        at += [(i, int(starts[i]), int(starts[i + 1]), int(used[i])) for i in others]
        pages = -(-max(keys for *_, keys in at) // 16)
        ends = torch.tensor([0, *(b - a for _, a, b, _ in at)]).cumsum(0)
        tensors = (torch.cat([q[a:b] for _, a, b, _ in at]), k, v)
        tensors += (table[[i for i, *_ in at], :pages], torch.tensor([n for *_, n in at]).int())
        longest = int(ends.diff().max())
        values = list(arguments((*tensors, ends.int(), longest), **self.options))
        values[-4] = most
        values[11] = values[11] if lse else None
        floats = kernels.paged_attention_plan(*values)["workspace"]
        kernels.paged_attention(*values, torch.full((floats,), torch.nan) if floats else None)
        count = last - first
        return values[10][:count], values[11][:, :count] if lse else None

    def chunks(self, *ends):
        found = [self.rows(a, b) for a, b in zip((0, *ends), (*ends, self.queries), strict=True)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sinks": None},
        {"softcap": 5.0},
        {"window": (1100, 0)},
        {"window": (30, 0)},
        {"window": (200, 90), "causal": False, "sinks": None},
    ],
)
def test_a_rows_bits_do_not_depend_on_the_call(options):
    """The queries cross the boundary of two parts, key 2048; windows begin on both sides of it."""
    sequence = Sequence(**options)
    causal = "causal" not in options
    with tiercel.batch_invariant():
        out, lse = sequence.rows(0, 150)
        again = [sequence.rows(0, 150, (1, 2)), sequence.rows(0, 150, most=2180)]
        again.append((sequence.rows(0, 150, (2,), lse=False)[0], lse))
        if causal:
            again.append(sequence.chunks(1, 2, 18, 19, 60, 110, 149))
    for other, sums in again:
        assert torch.equal(other, out) and torch.equal(sums, lse)


def both_ways(lengths, heads, lse, most):
    """Results where one block has all parts of a tile, and where each part is a block's: the room
    of the page table says how many parts there may be."""
    q, k, v, table, *rest = make(lengths, heads=heads, d=128)
    room = torch.full((len(table), 16 * 64), -7, dtype=torch.int32)
    room[:, : table.shape[1]] = table
    found = []
    with tiercel.batch_invariant():
        for pages, bound, chained in ((table, most, True), (room, None, False)):
            values = list(arguments((q, k, v, pages, *rest)))
            values[-4] = bound
            if not lse:
                values[11] = None
            plan = kernels.paged_attention_plan(*values)
            assert plan["kernel"].endswith("_chained") == chained
            floats = plan["workspace"]
            kernels.paged_attention(*values, torch.full((floats,), torch.nan) if floats else None)
            found.append(values[10:12])
        if lse:
            check((q, k, v, table, *rest))
    return found


@pytest.mark.parametrize("lse", [False, True])
def test_parts_one_after_the_other(lse):
    lengths = [(70, 600), (0, 3), (1, 512), (33, 33), (2, 513), (3, 0)]
    (out, sums), (expected, logarithms) = both_ways(lengths, (4, 2), lse, 640)
    assert torch.equal(out, expected)
    assert not lse or torch.equal(sums, logarithms)


def test_many_parts_one_after_the_other():
    (out, sums), (expected, logarithms) = both_ways([(1, 1100), (5, 1030)], (44, 44), True, 1100)
    assert torch.equal(out, expected) and torch.equal(sums, logarithms)


def test_parts_grow():
    """Parts of 512, 1024 and 2048 keys, and decoding beside a chunk that ends in each of them."""
    lengths = [(1, 8300), (20, 4100), (1, 5200)]
    with tiercel.batch_invariant():
        given = make(lengths, heads=(2, 1), d=128)
        plan = kernels.paged_attention_plan(*arguments(given))
        assert plan["parts"] == 8 + 4 + 1 and not plan["kernel"].endswith("_chained")
        check(given)


def test_bits_of_one_part_do_not_depend_on_the_table():
    """Alone a sequence of few keys has one part, and no second kernel without `lse`."""
    q, k, v, table, used, starts, longest = make([(40, 700), (2, 2100)])
    with tiercel.batch_invariant():
        both = run((q, k, v, table, used, starts, longest))[0]
        values = list(arguments((q[:40], k, v, table[:1, :44], used[:1], starts[:2], longest)))
        values[11] = None
        assert kernels.paged_attention_plan(*values)["combine"] == "none"
        kernels.paged_attention(*values, None)
    assert torch.equal(values[10], both[:40])


@pytest.mark.parametrize("lengths", [[(1, 30)], [(5, 9), (0, 0), (1, 2060)]])
def test_a_table_with_more_room(lengths):
    """The grid is for ten parts, the sequences have one or two."""
    q, k, v, table, *rest = make(lengths)
    room = torch.full((len(table), 20 * 64), -7, dtype=torch.int32)
    room[:, : table.shape[1]] = table
    given = (q, k, v, room, *rest)
    with tiercel.batch_invariant():
        assert kernels.paged_attention_plan(*arguments(given))["parts"] == 10
        check(given)
