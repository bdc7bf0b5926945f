# SPDX-License-Identifier: Apache-2.0
"""Variants of linear_act beyond the precompiled tiles: `tiercel tune linear --compile` names them
by all parameters of their shapes."""

from linear_cute import _large, _small


def variant(dtype, act, tile_m, tile_n, pingpong, split_k, cluster, stages, epi_stages):
    if split_k:
        return _small(dtype, act, tile_m, tile_n, stages)
    return _large(dtype, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages)
