# SPDX-License-Identifier: Apache-2.0
"""Bits of results, by op: a change of any needs a new tiercel.NUMERICS (docs/numerics.md)."""

import contextlib
import ctypes
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from support.emulator import sm90  # before tiercel

from tiercel.core.numerics import NUMERICS
from tiercel.core.op import ops
from tiercel.plugins.contracts import CONTRACTS

GOLDEN = Path(__file__).with_name("golden.json")
WRITE = os.environ.get("TIERCEL_WRITE_GOLDEN")
# Elements of the arguments, at most: what the emulator does in a moment.
MOST = 300_000
CASES = 3  # of an op
# Ops without checksums, and the reasons.
WITHOUT = {
    "causal_conv1d": "none yet",
    "causal_conv1d_update": "none yet",
    "decode_attention": "its splits are looked up by a function that takes torch's tensors",
    "fp8_linear_training": "made of fp8_quantize, fp8_linear and their gradients",
    "fused_moe": "made of moe_up and moe_down",
    "gated_delta_rule": "none yet",
    "gated_delta_rule_decode": "none yet",
    "gated_rms_norm": "none yet",
    "indexer_logits": "none yet",
    "linear_cross_entropy": "made of linear_act and cross_entropy",
    "mla_cache_write": "none yet",
    "mla_decode": "none yet",
    "mla_sparse_attention": "none yet",
    "moe_down": "the contract's cases are large",
    "moe_up": "the contract's cases are large",
    "nvfp4_gemv": "scales on the CPU",
    "qk_norm_rope": "by the kernels of qk_norm_rope_cache",
    "top_k_indices": "compared with its reference, bit by bit, where it is tested",
    "w4_moe": "none yet",
    "paged_attention": "as decode_attention, whose kernels it takes for few new tokens",
}


def bytes_of(tensor):
    """Without NumPy, which PyTorch does not need."""
    kept = tensor.detach().contiguous()
    return ctypes.string_at(kept.data_ptr(), kept.numel() * kept.element_size())


def elements(arguments):
    return sum(x.numel() for x in arguments.values() if isinstance(x, torch.Tensor))


def argument(spec, name, given):
    """The contract's value; None if it is absent, or the default."""
    if name in given:
        return given[name]
    scalar = spec.argument(name)
    default = getattr(scalar, "default", None)
    return getattr(torch, default) if getattr(scalar, "kind", "") == "dtype" else default


def checksum(op, arguments):
    spec = ops[op].spec
    values = [argument(spec, name, arguments) for name in spec.names]
    results = sm90(op)(*values, None)
    written = [values[spec.names.index(t.name)] for t in spec.tensors if t.written]
    digest = hashlib.sha256()
    for result in (*(results if isinstance(results, tuple) else (results,)), *written):
        if isinstance(result, torch.Tensor):
            digest.update(f"{tuple(result.shape)} {result.dtype}".encode())
            digest.update(bytes_of(result))
    return digest.hexdigest()[:16]


def computed(op):
    """Checksums of the contract's first small cases that the kernels take."""
    found = {}
    for case in CONTRACTS[op].cases:
        if len(found) == CASES or 0 in case.sizes.values():
            continue
        arguments = CONTRACTS[op].make(case, "cpu", 0)
        if elements(arguments) <= MOST:
            with contextlib.suppress(NotImplementedError):
                found[f"{case}"] = checksum(op, arguments)
    return found


OPS = sorted(CONTRACTS.keys() & ops.keys() - WITHOUT.keys())


@pytest.mark.parametrize("op", OPS)
def test_bits(op):
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics"] == NUMERICS, "a new version has new checksums: docs/numerics.md"
    assert computed(op) == golden["checksums"][op], (
        f"the bits of {op} changed: raise tiercel.NUMERICS and write new checksums, see "
        "docs/numerics.md"
    )


def test_every_op_has_checksums():
    golden = json.loads(GOLDEN.read_text())["checksums"]
    assert sorted(golden) == OPS
    assert all(golden.values())


@pytest.mark.skipif(WRITE is None, reason="only to write the checksums")
def test_write():
    path = Path(WRITE)
    before = json.loads(path.read_text()) if path.exists() else {"numerics": 0, "checksums": {}}
    after = {op: computed(op) for op in OPS}
    if before["numerics"] == NUMERICS:
        for op, sums in before["checksums"].items():
            same = after.get(op, sums)
            assert all(same.get(name, value) == value for name, value in sums.items()), op
    path.write_text(json.dumps({"numerics": NUMERICS, "checksums": after}, indent=1) + "\n")
