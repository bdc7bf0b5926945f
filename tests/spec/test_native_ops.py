# SPDX-License-Identifier: Apache-2.0
"""The ops that run without Python are those whose declarations allow it."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

# Ops that serve inference and have one launch: none of them may fall out of the list unseen.
EXPECTED = [
    "act_and_mul_quant",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "copy_transpose",
    "fp8_linear",
    "fp8_quantize_static",
    "gated_delta_rule_decode",
    "gated_linear",
    "gated_rms_norm",
    "gelu",
    "gelu_and_mul",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_gemm_masked",
    "hash_route",
    "indexer_logits",
    "kv_cache_write",
    "layer_norm",
    "linear_act",
    "log_softmax",
    "merge_attention_states",
    "mla_cache_write",
    "moe_sum",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_quantize",
    "relu",
    "relu_and_mul",
    "rms_norm",
    "rms_norm_quant",
    "rotary_embedding",
    "sample",
    "silu",
    "silu_and_mul",
    "softmax_online",
    "top_k_indices",
    "topk_route",
    "topk_softmax",
    "w4_linear",
]


def test_the_file_follows_from_the_declarations():
    from support import native_ops

    text, rest = native_ops.text_and_rest()
    assert Path(os.environ["NATIVE_OPS"]).read_text() == text, (
        "python tests/support/native_ops.py --write"
    )
    listed = set(re.findall(r"^op (.*)", text, re.MULTILINE))
    assert listed.isdisjoint(rest)
    assert set(EXPECTED) <= listed


def test_each_line_is_read():
    """The extension module drops an op whose lines do not fit; torch sees those that remain."""
    from tiercel import _C

    text = Path(os.environ["NATIVE_OPS"]).read_text()
    listed = re.findall(r"^op (.*)", text, re.MULTILINE)
    assert list(_C.native_ops()) == listed
