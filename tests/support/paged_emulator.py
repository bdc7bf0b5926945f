# SPDX-License-Identifier: Apache-2.0
"""Calls of paged_attention on the emulator, and their comparison with float64."""

import torch
from support.emulator import kernels
from support.paged import assert_close, wide

import tiercel

__all__ = ["arguments", "check", "run"]


def arguments(given, sinks=None, causal=True, window=None, softcap=None, **scales):
    """The arguments of _C.paged_attention, but the workspace."""
    *tensors, longest = given
    q = given[0]
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.full((*q.shape[:2], given[2].shape[3]), torch.nan, dtype=dtype)
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    factors = (scales.get("k_scale"), scales.get("v_scale"))
    more = (scales.get(name) for name in ("tree_mask", "prefix", "q_scale"))
    options = (causal, window, None, softcap, None, *more)
    return (*tensors, sinks, longest, *factors, out, lse, *options)


def run(given, sinks=None, **options):
    values = arguments(given, sinks, **options)
    floats = kernels.paged_attention_plan(*values)["workspace"]
    kernels.paged_attention(*values, torch.full((floats,), torch.nan) if floats else None)
    return values[10:12]


def check(given, sinks=None, **options):
    out, lse = run(given, sinks, **options)
    truth = tiercel.ref.paged_attention(*wide(given), sinks=sinks, return_lse=True, **options)
    assert_close(out, lse, *truth)
