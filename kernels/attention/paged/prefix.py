# SPDX-License-Identifier: Apache-2.0
"""The forward kernel over a paged cache for masks with a window, or with a prefix of keys that all
queries of a sequence see.

With a prefix the window has no limit before a query, so the prefix only moves the key behind the
last one that a row sees. Without one, the results are kernel.py's.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.attention.common.packed import load_at
from kernels.attention.paged.kernel import Paged, PagedAttention
from kernels.attention.paged.operands import PagedOperands

PrefixPaged = NamedTuple(
    "PrefixPaged",
    # The pointer may be null; the step is in bytes.
    [*Paged.__annotations__.items(), ("prefixes", cute.Pointer), ("prefix_step", Int32)],
)


class PrefixOperands(PagedOperands):
    def make_sums(self, shape):
        # The prefix of the sequence whose scores are next.
        self.prefix = cute.make_rmem_tensor(1, Int32)
        return super().make_sums(shape)


class PrefixAttention(PagedAttention):
    def packed_rows(self, starts, sizes):
        *starts, prefixes, o = starts
        *sizes, prefix_step = sizes
        return PrefixPaged(*starts, o, *sizes, prefixes, prefix_step)

    def sequence(self, paged, entry, problem):
        found = super().sequence(paged, entry, problem)
        self.latest = self.prefix_of(paged, entry, found[1])
        return found

    @cute.jit
    def prefix_of(self, paged, entry, keys):
        prefix = Int32(0)
        if paged.prefixes.toint() != 0:
            prefix = load_at(paged.prefixes, paged.prefix_step, entry)
            prefix = cutlass.max(cutlass.min(prefix, keys), 0)
        return prefix

    def least_blocks(self):
        """The prefix of the sequence that was read last."""
        return cutlass.max(cute.ceil_div(self.latest, self.tile_n), 1)

    def keys_of(self, rows, keys, queries):
        """The rows for `hide`, of the sequence read last: the tile's first block is next."""
        self.operands.prefix[0] = self.latest
        return super().keys_of(rows, keys, queries)

    def own_key(self, own, problem):
        """The key of a row with the same mask and no prefix."""
        return cutlass.max(own, self.operands.prefix[0] - 1 - problem.right)
