# SPDX-License-Identifier: Apache-2.0
"""What the single launch of fused_moe for few tokens takes, without tensors.

Its launcher (kernels/moe/few_tokens.cc) knows exactly; this is for choices, and errs to no.
"""

_MOST_TOKENS = 4  # beyond, kernels that several tokens share weights in are faster
_MOST_IDS = 32  # kFewIds of few_tokens_kernels.h: T * k
_ROOM = 200_000  # bytes of shared memory, for the ring and the rows it is multiplied with


def fits_one_launch(tokens: int, k: int, hidden: int, inner: int) -> bool:
    """Of float8 weights."""
    if tokens > _MOST_TOKENS or not 0 < tokens * k <= _MOST_IDS or hidden % 128 or inner % 128:
        return False
    ring = 8 * max(8 * hidden, 16 * inner)  # a unit for each group of warps, at least
    return ring + tokens * max(hidden, k * inner) <= _ROOM
