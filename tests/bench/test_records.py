# SPDX-License-Identifier: Apache-2.0
"""The schema of results, and what is made of them."""

import json

import pytest

from tiercel.workbench.bench import BenchError, limits, records
from tiercel.workbench.bench.runner import Settings, run_case

COMMON = dict.fromkeys(("run", "date", "commit", "gpu", "driver", "torch", "command"), "x")
LIMITS = {"copy_gbps": 4000.0, "launch_us": 0.5, "float32_tflops": 50.0}
FIELDS = (
    "run date commit gpu driver torch family op case dtype impl version ms_median ms_p10 ms_p90 "
    "gbps tflops limit_frac rel_err timing"
)


def made(toy, toy_case, impls, clock):
    settings = Settings(0, 2, 5)
    results = run_case(toy, toy_case, impls, clock, settings, "cpu")
    return [
        records.from_result(COMMON, toy, toy_case, result, settings, LIMITS) for result in results
    ]


def test_records_of_a_run_follow_the_schema(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"tiercel": [1.0, 2.0], "peer": 3.0})
    impls = [impl("tiercel", ours=True), impl("peer", exact=False), impl("bad", 7.0)]
    ours, peer, bad = made(toy, toy_case, impls, clock)
    for record in (ours, peer, bad):
        assert records.problems(record) == []
        assert set(FIELDS.split()) <= set(record)
        assert json.loads(records.dump(record)) == record
    assert ours["case"] == "n4 plain" and ours["timing"] == "graph"
    assert (ours["ms_median"], ours["ms_p10"], ours["ms_p90"]) == (1.5, 1.0, 2.0)
    assert ours["ratio"] is None and peer["ratio"] == 2.0
    assert ours["exact"] and not peer["exact"]
    assert len(ours["round_ms"]) == ours["rounds"] == 5
    assert bad["status"] == "wrong" and bad["reason"] == "20.0 off"
    assert all(bad[name] is None for name in records.NUMBERS)


def test_rates(toy, toy_case):
    import dataclasses

    # 32 bytes in 1 us; the limit would need 8 ns.
    found = records.rates(toy, toy_case, 0.001, LIMITS)
    assert found["gbps"] == pytest.approx(0.032)
    assert found["limit_frac"] == pytest.approx(0.008 / 1000)
    assert found["tflops"] is None
    assert records.rates(toy, toy_case, 0.001, {})["limit_frac"] is None
    heavy = dataclasses.replace(toy, flops=lambda case: 25_000_000)
    found = records.rates(heavy, toy_case, 0.001, LIMITS)
    assert found["tflops"] == pytest.approx(25.0)
    assert found["limit_frac"] == pytest.approx(0.5)  # the arithmetic binds, not the bytes


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"gpu": None}, "`gpu` is no text"),
        ({"gbps": "fast"}, "`gbps` is no number"),
        ({"rel_err": float("nan")}, "`rel_err` is no number"),
        ({"timing": "watch"}, "`timing` is 'watch'"),
        ({"ms_median": None}, "`ms_median` is null"),
        ({"status": "wrong"}, "`ms_median` is set though `status` is not ok"),
    ],
)
def test_what_breaks_the_schema_is_named(record, fields, text, tmp_path):
    assert records.problems(record()) == []
    assert text in records.problems(record(**fields))[0]
    path = tmp_path / "r.jsonl"
    path.write_text(records.dump(record()) + "\n\n" + json.dumps(record(**fields)) + "\n")
    with pytest.raises(BenchError, match=r"r\.jsonl:3: "):
        records.read(path)


def test_a_missing_field_is_named(record):
    without = record()
    del without["tflops"]
    assert records.problems(without) == ["`tflops` is no number or null"]
    assert records.problems([]) == ["is no JSON object"]


def test_reading_says_what_is_wrong(tmp_path):
    with pytest.raises(BenchError, match="No such file"):
        records.read(tmp_path / "none.jsonl")
    (tmp_path / "cut.jsonl").write_text('{"run": "r')
    with pytest.raises(BenchError, match=r"cut\.jsonl:1: no JSON"):
        records.read(tmp_path / "cut.jsonl")


def test_the_newest_run_that_has_ours_counts(record):
    old = [record(run="a", date="2026-01-01"), record("quack", 0.003, run="a", date="2026-01-01")]
    new = [record(run="b", date="2026-01-02")]
    peers_only = [record("vllm", run="c", date="2026-01-03")]
    failed = [record(run="d", date="2026-01-04", status="wrong", ms_median=None)]
    other = [record(run="a", date="2026-01-01", case="T1 E64 k8 renorm")]
    found = records.latest([*failed, *peers_only, *new, *old, *other])
    assert {(r["run"], r["case"], r["impl"]) for r in found} == {
        ("b", "T16 E128 k8 renorm", "tiercel"),
        ("a", "T16 E128 k8 renorm", "quack"),
        ("c", "T16 E128 k8 renorm", "vllm"),
        ("a", "T1 E64 k8 renorm", "tiercel"),
    }
    quack = next(r for r in found if r["impl"] == "quack")
    assert quack["other_run"] and quack["ratio"] == records.rounded(0.003 / new[0]["ms_median"])
    wrong_now = record("quack", run="b", date="2026-01-02", status="wrong", ms_median=None)
    assert [r["impl"] for r in records.latest([*new, *old, wrong_now])] == ["tiercel"]


def test_limits_take_the_best_copy(record):
    rows = [
        record("torch", family="limits", op="copy", case="64 MB", gbps=3600.0),
        record("torch", family="limits", op="copy", case="1 GB", gbps=4300.0),
        record("torch", family="limits", op="copy", case="2 GB", gbps=4200.0),
        record("torch", 0.0005, family="limits", op="launch"),
        record("torch", family="limits", op="gemm", tflops=780.0),
    ]
    found = limits.summary(rows)
    assert found["copy_gbps"] == 4300.0 and found["launch_us"] == 0.5
    assert found["bfloat16_tflops"] == found["float16_tflops"] == 780.0
    assert limits.as_text(found) == (
        "copy 4300 GB/s (64 MB 3600), launch 0.50 µs, bf16 matrix product 780 TFLOP/s"
    )
    assert limits.as_text({}) == "not measured"


def test_six_digits():
    assert records.rounded(0.00123456789) == 0.00123457
    assert records.rounded([1.23456789, "x", None, True]) == [1.23457, "x", None, True]
