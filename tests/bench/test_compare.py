# SPDX-License-Identifier: Apache-2.0
"""Old against new."""

import pytest

from tiercel.workbench.bench import compare


def test_only_ours_beyond_the_threshold_is_a_regression(record):
    old = [record(ms=0.100), record("vllm", 0.100), record(ms=0.100, dtype="float32")]
    new = [record(ms=0.104), record("vllm", 0.300), record(ms=0.106, dtype="float32")]
    found = compare.compare(old, new, 0.05)
    assert len(found.changes) == 3
    assert [change.key[2] for change in found.regressions] == ["float32"]
    assert found.regressions[0].factor == pytest.approx(1.06)
    text = compare.as_text(found, 0.05)
    assert text.count("REGRESSION") == 1 and "1 regression beyond 5%" in text
    assert "3.00x" in text


def test_faster_and_new_ones_are_no_regressions(record):
    new = [record(ms=0.050), record(case="T1 E8 k2 renorm")]
    found = compare.compare([record(ms=0.100)], new, 0.05)
    assert len(found.changes) == 1 and found.regressions == [] and found.lost == []


def test_the_newest_old_record_counts(record):
    old = [record(ms=0.1, date="2026-02-01"), record(ms=0.2, date="2026-01-01")]
    (change,) = compare.compare(old, [record(ms=0.1)], 0.05).changes
    assert change.old_ms == 0.1


def test_one_that_now_fails_is_a_regression_and_one_that_was_not_run_is_none(record):
    failed = record(status="wrong", ms_median=None, timing="")
    old = [record(), record(case="T1 E8 k2 renorm")]
    found = compare.compare(old, [failed], 0.05)
    assert [key[1] for key in found.lost] == ["T16 E128 k8 renorm"]
    assert "failed" in compare.as_text(found, 0.05)


def test_nothing_in_common(record):
    found = compare.compare([record(op="other")], [record()], 0.05)
    assert compare.as_text(found, 0.05) == "nothing in common with the earlier results"
