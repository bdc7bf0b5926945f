# SPDX-License-Identifier: Apache-2.0
"""The suites files and what is read from them."""

import sys

import pytest

from tiercel.workbench.bench import BenchError, cases, environment, ops, table

OPS = ops.load()


def select(*entries, **filters):
    return cases.select({"suites": {"s": list(entries)}}, OPS, suite="s", **filters)


def entry(**fields):
    return {"op": "topk_softmax", "T": 16, "E": 128, "k": 8} | fields


def test_the_suites_are_valid():
    data = cases.read(environment.suites_path())
    smoke = cases.select(data, OPS, suite="smoke")
    full = cases.select(data, OPS, suite="full")
    assert {case.op for case in full} == OPS.keys()
    assert {case.family for case in smoke} == {op.family for op in OPS.values()}
    assert len(smoke) <= 12 * len({case.family for case in smoke})  # a minute or two
    assert len(full) == len({case.key for case in full}) >= 100
    assert any(case.host for case in smoke)
    training = cases.select(data, OPS, suite="training")
    assert {case.key for case in training} < {case.key for case in full}


def test_a_line_shows_the_peak_of_memory():
    record = {"timing": "graph", "impl": "tiercel", "status": "ok", "exact": True}
    record |= dict.fromkeys(("gbps", "tflops", "limit_frac", "rel_err", "ratio"))
    record |= dict.fromkeys(("ms_median", "ms_p10", "ms_p90"), 2.0)
    assert "peak 1184 MiB" in table.result_line(record | {"peak_mib": 1184.25})
    assert "peak" not in table.result_line(record)


def test_a_folder_is_read_as_one(tmp_path):
    (tmp_path / "a.yaml").write_text("suites: {s: [{op: x}], t: }")
    (tmp_path / "b.yaml").write_text("suites: {s: [{op: y}]}")
    assert cases.read(tmp_path) == {"suites": {"s": [{"op": "x"}, {"op": "y"}], "t": []}}
    assert cases.read(tmp_path / "b.yaml") == {"suites": {"s": [{"op": "y"}]}}
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm" / "suite.yaml").write_text("suites: {s: [{op: z}]}")
    assert cases.read(tmp_path)["suites"]["s"] == [{"op": "x"}, {"op": "y"}, {"op": "z"}]


def test_the_full_suite_has_the_rows_that_the_bars_name():
    data = cases.read(environment.suites_path())
    full = cases.select(data, OPS, suite="full", op="topk_softmax")
    names = {(case.name, case.dtype) for case in full}
    for dtype in ("float32", "bfloat16", "float16"):
        for tokens in (1, 16, 1024, 8192):
            for experts in (64, 128, 256):
                assert (f"T{tokens} E{experts} k8 renorm", dtype) in names
    assert {case["k"] for case in full} >= {1, 2, 4, 6, 8, 16}
    assert {case["E"] for case in full} >= {8, 16, 32, 60, 96, 160, 384, 512}
    assert {case["weights"] for case in full} == {"renorm", "all", "after"}
    assert {min(case["T"] for case in full), max(case["T"] for case in full)} == {1, 65536}


def test_the_full_suite_has_the_linear_layers_that_the_bars_name():
    data = cases.read(environment.suites_path())
    full = cases.select(data, OPS, suite="full", family="linear")
    names = {(case.name, case.dtype) for case in full}
    for rows in (1, 16, 128, 1024, 8192):
        for sizes in ("N4096 K4096", "N14336 K4096", "N4096 K14336"):
            assert (f"M{rows} {sizes} gelu_tanh bias", "bfloat16") in names
            assert (f"M{rows} {sizes} none", "bfloat16") in names
        for act in ("silu", "relu", "gelu"):
            assert (f"M{rows} N14336 K4096 {act} bias", "bfloat16") in names
    assert {case.dtype for case in full} == {"bfloat16", "float16"}
    # Four minutes, of which scales of blocks take one.
    assert any(case.host for case in full) and len(full) <= 110
    assert {peer for case in full for peer in case.peers} == {"quack.tuned", "torch.compile"}


def test_lists_are_combined_and_names_are_stable():
    found = select(entry(T=[1, 16], dtype=["bfloat16", "float32"], weights="all"))
    assert [(case.name, case.dtype) for case in found] == [
        ("T1 E128 k8 all", "bfloat16"),
        ("T16 E128 k8 all", "bfloat16"),
        ("T1 E128 k8 all", "float32"),
        ("T16 E128 k8 all", "float32"),
    ]
    assert found[0].family == "routing"


def test_a_case_counts_once_as_where_it_comes_first():
    found = select(entry(host=True, peers=["torch.compile"]), entry(T=[1, 16]))
    assert [(case["T"], case.host, set(case.peers)) for case in found] == [
        (16, True, {"torch.compile"}),
        (1, False, set()),
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"op": "nothing"}, "`op` must be one of .*linear_act, .*topk_softmax"),
        ({"rows": 3}, "no parameter 'rows'; it has T, E, k, weights"),
        ({"dtype": "int7"}, "no dtype 'int7'"),
        ({"weights": "some"}, "`weights` must be one of all, renorm, after"),
        ({"k": 129}, "k must not exceed E"),
        ({"T": 0}, "must be positive"),
        ({"T": "many"}, "must be positive"),
    ],
)
def test_a_wrong_entry_is_named(wrong, text):
    with pytest.raises(BenchError, match=text) as caught:
        select(entry(), entry(**wrong))
    assert "entry 2" in str(caught.value)


def test_a_missing_parameter_is_named():
    with pytest.raises(BenchError, match="needs a value for 'k'"):
        select({"op": "topk_softmax", "T": 1, "E": 8})


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ({"family": "poetry"}, "no family 'poetry'; there are .*linear, .*routing"),
        ({"op": "sonnet"}, "no operator 'sonnet'; there are .*linear_act, .*topk_softmax"),
    ],
)
def test_filters_that_name_nothing(filters, text):
    assert len(select(entry(), family="routing", op="topk_softmax")) == 1
    with pytest.raises(BenchError, match=text):
        select(entry(), **filters)


def test_several_operators_and_no_others():
    data = {"suites": {"s": [entry(), {"op": "copy_transpose", "M": 8, "N": 8}]}}
    silu = {"op": "silu_and_mul", "M": 8, "N": 8}
    data["suites"]["s"].append(silu)
    found = cases.select(data, OPS, suite="s", op=["copy_transpose", "topk_softmax"])
    assert [case.op for case in found] == ["topk_softmax", "copy_transpose"]
    with pytest.raises(BenchError, match="no operator 'sonnet'"):
        cases.select(data, OPS, suite="s", op=["copy_transpose", "sonnet"])


def test_the_tile_of_a_transpose_is_a_parameter():
    import torch

    found = select({"op": "copy_transpose", "M": 8, "N": 8, "tile_size": [False, 32, 128]})
    assert [case.name for case in found] == [
        "M8 N8 B1",
        "M8 N8 B1 tile_size32",
        "M8 N8 B1 tile_size128",
    ]
    inputs = {"x": torch.zeros(8, 8)}
    tiles = [OPS["copy_transpose"].call(case, inputs)[1]["tile_size"] for case in found]
    assert tiles == [None, 32, 128]
    for wrong in (48, 0, True):
        with pytest.raises(BenchError, match="tile_size must be 32, 64 or 128"):
            select({"op": "copy_transpose", "M": 8, "N": 8, "tile_size": wrong})


def test_an_unknown_suite_lists_the_others():
    with pytest.raises(BenchError, match="no suite 'huge'; there are s"):
        cases.select({"suites": {"s": []}}, OPS, suite="huge")


def test_without_pyyaml_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BenchError, match=r"PyYAML.*pip install 'tiercel\[bench\]'"):
        cases.read(environment.suites_path())


@pytest.mark.parametrize("text", ["[1, 2", "suites: 3", "- a"])
def test_a_file_that_is_none(tmp_path, text):
    path = tmp_path / "suites.yaml"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"suites\.yaml"):
        cases.read(path)
