# SPDX-License-Identifier: Apache-2.0
"""The cases of batch_rows.py with positions and caches."""

import torch
from support.batch_rows import Rows, case

import tiercel


@case("rotary_embedding")
def rotary_embedding(source):
    q, k = source.normal(500, 8, 128), source.normal(500, 2, 128)
    positions, table = source.whole(1000, 500), source.normal(1000, 128, dtype=torch.float32)
    return Rows(
        500, lambda rows: tiercel.rotary_embedding(positions[rows], q[rows], k[rows], table)
    )


@case("kv_cache_write")
def kv_cache_write(source):
    key, value = source.normal(500, 2, 128), source.normal(500, 2, 128)

    def run(rows):
        caches = [torch.zeros(40, 16, 2, 128, device=key.device, dtype=key.dtype) for _ in range(2)]
        slots = source.arange(len(rows))
        caches = tiercel.kv_cache_write(key[rows], value[rows], *caches, slots)
        return tuple(c.view(-1, 2, 128)[: len(rows)] for c in caches)

    return Rows(500, run)


@case("mla_cache_write")
def mla_cache_write(source):
    latent, rotary = source.normal(500, 512), source.normal(500, 64)

    def run(rows):
        cache = torch.zeros(40, 16, 576, device=latent.device, dtype=latent.dtype)
        slots = source.arange(len(rows))
        cache = tiercel.mla_cache_write(latent[rows], rotary[rows], cache, slots)
        return (cache.view(-1, 576)[: len(rows)],)

    return Rows(500, run)


@case("qk_norm_rope_cache")
def qk_norm_rope_cache(source):
    q, k, v = (source.normal(500, heads, 128) for heads in (8, 2, 2))
    table, weights = source.normal(1000, 128), [source.normal(128) for _ in range(2)]
    positions = source.whole(1000, 500)

    def run(rows):
        caches = [torch.zeros(40, 16, 2, 128, device=q.device, dtype=q.dtype) for _ in range(2)]
        slots, out = source.arange(len(rows)), torch.empty_like(q[rows])
        given = (q[rows], k[rows], v[rows], out, *caches, slots, positions[rows], table)
        out, *caches = tiercel.qk_norm_rope_cache(*given, *weights)
        return out, *(c.view(-1, 2, 128)[: len(rows)] for c in caches)

    return Rows(500, run)


@case("qk_norm_rope")
def qk_norm_rope(source):
    q, k = (source.normal(500, heads, 128) for heads in (8, 2))
    table, weights = source.normal(1000, 128), [source.normal(128) for _ in range(2)]
    positions = source.whole(1000, 500)

    def run(rows):
        return tiercel.qk_norm_rope(q[rows], k[rows], positions[rows], table, *weights)

    return Rows(500, run)
