# SPDX-License-Identifier: Apache-2.0
"""exceptions.json: each finding has a case that shows it on a GPU, and nothing else is excepted."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "sanitizer"))

import exceptions

RULES = exceptions.load()
RACE = "Race reported between {} access and {} access"
WRITE_READ, READ_WRITE, WRITE_WRITE = (
    RACE.format(*kinds) for kinds in (("Write", "Read"), ("Read", "Write"), ("Write", "Write"))
)
UNINITIALIZED = "Uninitialized __global__ memory read of size 16 bytes"
DIVERGENT = "Barrier error detected. Divergent thread(s) in block"


def covered(tool, kernel, message):
    return any(rule.covers(tool, kernel, message) for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_has_a_case_that_is_reported(rule):
    file, _, case = rule.shown_by.partition(", case ")
    folder = (ROOT / file).parent
    assert f'"{case}": lambda' in (folder / "run_case.py").read_text()
    tested = (folder / "test_sanitizer_cases_gpu.py").read_text()
    assert re.search(rf'\("{rule.tool}", "{case}", True\)', tested)


@pytest.mark.parametrize(
    ("tool", "kernel", "message"),
    [
        ("racecheck", "linear_act_bf16_gelu_tanh_64x32_split_k", READ_WRITE),
        ("racecheck", "linear_act_grad_x_fp16_64x64_split_k", WRITE_READ),
        ("racecheck", "gated_linear_fp16_gelu_tanh_64x64_split_k", READ_WRITE),
        ("racecheck", "reduce_rows_packed<BFloat16Format, SumOf>", WRITE_READ),
        ("racecheck", "attention_backward_fp16_d128_64x128", WRITE_READ),
        ("racecheck", "mla_decode<BFloat16, 1, 0>", READ_WRITE),
        ("racecheck", "attention_paged_wide<BFloat16, 1, 0>", READ_WRITE),
        ("racecheck", "mla_sparse<Float16, 0, 1>", WRITE_READ),
        ("racecheck", "w4_tiles<1, 0, 256, 1, 3>", READ_WRITE),
        ("synccheck", "linear_act_fp8_none_64x64_split_k", DIVERGENT),
        ("synccheck", "gated_linear_fp16_silu_128x64_split_k", DIVERGENT),
        ("initcheck", "fp8_quantize_row<BFloat16Source, 1>", UNINITIALIZED),
    ],
)
def test_what_is_excepted(tool, kernel, message):
    assert covered(tool, kernel, message)


@pytest.mark.parametrize(
    ("tool", "kernel", "message"),
    [
        ("racecheck", "linear_act_bf16_none_64x32_split_k", WRITE_WRITE),
        ("racecheck", "linear_act_bf16_none_128x64", READ_WRITE),
        ("racecheck", "mla_decode<BFloat16, 1, 0>", WRITE_WRITE),
        ("racecheck", "fused_moe_few_tokens<0>", READ_WRITE),
        ("racecheck", "w4_tiles<1, 0, 256, 1, 3>", WRITE_WRITE),
        ("racecheck", "w4_float8<1, 256, 5, 1, 128>", READ_WRITE),
        ("racecheck", "reduce_rows_packed<BFloat16Format, SumOf>", READ_WRITE),
        ("racecheck", "reduce_rows_aligned<BFloat16Format, SumOf, 32, 1, 1>", WRITE_READ),
        ("racecheck", "norm_backward<Float32, 1, 4, 1, 1>", WRITE_READ),
        ("racecheck", "attention_bf16_d128_128x128", WRITE_READ),
        ("synccheck", "attention_backward_bf16_d128_64x128", DIVERGENT),
        ("synccheck", "linear_act_fp8_none_64x64", DIVERGENT),
        ("memcheck", "linear_act_bf16_none_64x32_split_k", DIVERGENT),
        ("initcheck", "softmax<0>", UNINITIALIZED),
        ("racecheck", "", WRITE_READ),
    ],
)
def test_what_is_not(tool, kernel, message):
    assert not covered(tool, kernel, message)
