# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines of logs)
"""tools/sanitizer reads compute-sanitizer's logs: each tool's findings, and where they are cut."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).absolute().parents[2] / "tools" / "sanitizer"
sys.path.insert(0, str(FOLDER))

import exceptions
import report
import verdict

HEAD = "========= COMPUTE-SANITIZER\n"
MEMCHECK = (
    HEAD
    + """\
========= Invalid __global__ write of size 4 bytes
=========     at void tiercel::<unnamed>::topk_softmax<__nv_bfloat16, (int)8, (bool)1>(const T1 *, float *, int)+0x1b50
=========     by thread (31,0,0) in block (4,0,0)
=========     Access to 0x7f2c0d400200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2c0d400000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:  [0x2e6b3f] in libcuda.so.1
=========         Host Frame: _PyEval_EvalFrameDefault at ceval.c:4500 [0x5a2b1] in python3.12
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaStreamSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame:  [0x48a7f6] in libcuda.so.1
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
)
RACECHECK = (
    HEAD
    + """\
========= Error: Race reported between Write access at attention_backward_bf16_d64_128x128_0+0x7d10
=========     and Read access at attention_backward_bf16_d64_128x128_0+0x8230 [256 hazards]
=========     and Read access at attention_backward_bf16_d64_128x128_0+0x8240 [256 hazards]
=========
========= Warning: Race reported between Read access at void tiercel::reduce_rows<(int)4>(float *)+0x20 in rows.cuh:12
=========     and Write access at void tiercel::reduce_rows<(int)4>(float *)+0x90 in rows.cuh:14 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
)
HAZARD = (
    HEAD
    + """\
========= ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :
=========     Write Thread (0,0,0) at WAW()+0x2f0 in raceWAW.cu:20
=========     Write Thread (1,0,0) at WAW()+0x2f0 in raceWAW.cu:20
=========     Current Value : 1, Incoming Value : 2
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
)
SYNCCHECK = (
    HEAD
    + """\
========= Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc between warps.
=========     at attention_fp8_d64_128x128_0+0x6a30
=========     by thread (128,0,0) in block (0,0,0)
=========
========= Barrier error detected. Divergent thread(s) in warp.
=========     at sync_rows(int)+0xb0 in rows.cuh:20
=========     by thread (37,0,0) in block (0,0,0)
=========         Device Frame: void tiercel::softmax_rows<float>(float *)+0x10 in rows.cuh:33
=========
========= ERROR SUMMARY: 2 errors
"""
)
INITCHECK = (
    HEAD
    + """\
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void tiercel::attention_backward_prepare<__half, (int)64>(tiercel::PrepareParams)+0x4c0
=========     by thread (10,1,0) in block (45,0,0)
=========     Address 0x7ff3a80007a0
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::(anonymous namespace)::Add>(int, T2)+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f657d40daf0
=========
========= ERROR SUMMARY: 812 errors
========= ERROR SUMMARY: 810 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
)


def found(text: str) -> list[tuple[str | None, str]]:
    return [
        (record.kernel and report.readable(record.kernel), record.message)
        for record in report.parse(text).records
    ]


def test_memcheck() -> None:
    assert found(MEMCHECK) == [
        ("topk_softmax<__nv_bfloat16, 8, 1>", "Invalid __global__ write of size 4 bytes"),
        (
            None,
            'Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on'
            " CUDA API call to cudaStreamSynchronize",
        ),
    ]
    assert report.parse(MEMCHECK).unseen == 0


def test_races() -> None:
    assert found(RACECHECK) == [
        (
            "attention_backward_bf16_d64_128x128_0",
            "Race reported between Write access and Read access",
        ),
        ("reduce_rows<4>", "Race reported between Read access and Write access"),
    ]
    assert found(HAZARD) == [("WAW", "Potential WAW hazard detected")]
    assert report.parse(RACECHECK).unseen == 0


def test_synccheck_names_the_kernel_and_not_what_it_calls() -> None:
    assert found(SYNCCHECK) == [
        (
            "attention_fp8_d64_128x128_0",
            "Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc between"
            " warps",
        ),
        ("softmax_rows<float>", "Barrier error detected. Divergent thread(s) in warp"),
    ]


def test_initcheck_and_findings_that_were_not_printed() -> None:
    kernels = [kernel for kernel, _ in found(INITCHECK)]
    assert kernels[0] == "attention_backward_prepare<__half, 64>"
    assert kernels[1].startswith("at::native::vectorized_elementwise_kernel<4, ")
    assert report.parse(INITCHECK).unseen == 810
    without = INITCHECK.replace("========= ERROR SUMMARY: 810", "========= A LINE OF 810")
    assert report.parse(without).unseen == 810  # of another version, but no less said
    assert report.parse("\n".join(INITCHECK.splitlines()[:-1])).unseen == 810  # by the total


def test_an_end_that_is_missing_and_lines_that_nobody_knows() -> None:
    assert report.parse(HEAD).unseen is None
    assert report.parse(HEAD + "========= ERROR SUMMARY: 0 errors\n") == report.Report((), 0)
    warning = "Warning: Detected overflow of tracked cuda::barrier structures. Results might be"
    assert found(HEAD + f"========= {warning} incorrect.\n") == [
        (None, warning.removeprefix("Warning: ") + " incorrect")
    ]


RULE = {
    "tool": "synccheck",
    "kernel": "attention_fp8_.*",
    "message": "Warpgroup MMA sequence error.*",
    "reason": "the tool's",
    "shown_by": "a case",
    "test": "test_attention_fp8",
}


@pytest.fixture
def load(tmp_path):
    def load(*entries):
        path = tmp_path / "exceptions.json"
        path.write_text(json.dumps(entries))
        return exceptions.load(path)

    return load


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reason": ""}, "`reason` is ''"),
        ({"reason": None}, "`reason` is None"),
        ({"tool": "leakcheck"}, "`tool` is 'leakcheck', not one of memcheck"),
        ({"kernel": "a("}, "`kernel` is no regular expression"),
        ({"why": "because"}, "no exception has why"),
        ({"ends_kernel": "yes"}, "`ends_kernel` is 'yes', not true or false"),
        ({"leave_out": 1}, "`leave_out` is 1, not true or false"),
    ],
)
def test_an_exception_has_all_that_it_needs(load, change, says) -> None:
    assert load(RULE)
    with pytest.raises(ValueError, match="entry 1: ") as error:
        load(RULE, RULE | change)
    assert says in str(error.value)
    for name in RULE:
        with pytest.raises(ValueError, match=f"{name} is missing"):
            load({key: value for key, value in RULE.items() if key != name})


def test_the_committed_exceptions_are_valid() -> None:
    exceptions.load()


def outcome(findings=(), tests=("attention/test_attention_fp8_gpu.py::test_a",), **named):
    job = verdict.Job("synccheck", "attention-test_attention_fp8_gpu-1", list(tests))
    made = verdict.Outcome(job, 1.0, **named)
    made.findings.update(findings)
    return made


MMA = ("attention_fp8_d64_128x128", "Warpgroup MMA sequence error detected. Mismatch")


def test_what_is_excepted_is_no_error_and_the_rest_is(load) -> None:
    rules = load(RULE)
    judged = verdict.judge([outcome([MMA, MMA])], rules)
    assert (judged.errors, judged.stale) == ([], [])
    assert "2 times synccheck of attention_fp8_.*" in judged.excepted[0]
    for other in [("attention_bf16_d64", MMA[1]), (MMA[0], "Barrier error detected"), ("", MMA[1])]:
        assert len(verdict.judge([outcome([MMA, other])], rules).errors) == 1
    assert "1 times, first in synccheck/attention" in verdict.judge([outcome([MMA])], []).errors[0]


def test_an_exception_that_no_longer_occurs_is_reported(load) -> None:
    rules = load(RULE)
    assert len(verdict.judge([outcome()], rules).stale) == 1
    # Nothing is known where its tests were not run, or not to their end.
    assert not verdict.judge([outcome(tests=["norm/test_norm_gpu.py::test_a"])], rules).stale
    assert not verdict.judge([outcome(problem="not done after 9 s")], rules).stale
    assert not verdict.judge([outcome()], load(RULE | {"leave_out": True})).stale


def test_a_test_may_fail_only_where_an_excepted_finding_ends_its_kernel(load) -> None:
    failed = ["attention/test_attention_fp8_gpu.py::test_a"]
    ends = load(RULE | {"ends_kernel": True})
    assert not verdict.judge([outcome([MMA], failed=failed)], ends).errors
    assert len(verdict.judge([outcome([], failed=failed)], ends).errors) == 1
    assert len(verdict.judge([outcome([MMA], failed=failed)], load(RULE)).errors) == 1
    other = ["norm/test_norm_gpu.py::test_a"]
    assert len(verdict.judge([outcome([MMA], failed=other)], ends).errors) == 1
