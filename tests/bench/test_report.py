# SPDX-License-Identifier: Apache-2.0
"""benchmarks/README.md comes from the committed results and from nothing else."""

import random

import pytest

from tiercel.workbench.bench import BenchError, report
from tiercel.workbench.bench.records import dump


def test_the_committed_page_is_up_to_date(benchmarks):
    assert report.update(benchmarks, check=True), "run `tiercel bench report`"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results" / "NVIDIA_H200").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


def page(rows):
    """The overview and all tables, in one text."""
    overview, tables = report.render(rows)
    return "\n".join([overview, *tables.values()])


def write(folder, name, rows):
    path = folder / "results" / "NVIDIA_H200" / name
    path.write_text("".join(dump(row) + "\n" for row in rows))


@pytest.fixture
def rows(record):
    limit = {"family": "limits", "timing": "graph"}
    return [
        record("torch", gbps=4300.0, op="copy", case="8 GB", dtype="int8", **limit),
        record("torch", 0.0005, op="launch", case="-", dtype="none", **limit),
        record("torch", tflops=780.0, op="gemm", case="-", **limit),
        record(),
        record("quack", 0.001, exact=False, ratio=0.5),
        record("vllm", 0.003, ratio=1.5, version="0.33.0"),
        record("torch", 0.030, ratio=15.0),
        record(case="T2 E128 k8 renorm"),
        record("vllm", 0.004, ratio=2.0, case="T2 E128 k8 renorm"),
        record(timing="host", gbps=None, limit_frac=None),
        record("torch.topk", 0.014, timing="host", ratio=7.0, gbps=None, limit_frac=None),
        record("vllm", dtype="float32", status="wrong", ms_median=None, timing=""),
    ]


def test_a_part_of_an_operator_is_named_and_in_no_summary(rows, record):
    given = {"exact": False, "ratio": 0.85, "part": "its products"}
    text = page([*rows, record("deepgemm", 0.0017, **given)])
    assert "`~`: it is not exact; of deepgemm only its products.\n" in text
    assert "~1.70 (0.85)" in text
    assert "| topk_softmax | GPU | bfloat16 | deepgemm" not in text
    assert "only" not in page(rows)


def test_what_it_says(rows):
    text = page(rows)
    head = "| case | dtype | tiercel | GB/s | of limit | quack | torch | vllm |"
    assert head in text
    small = "| T2 E128 k8 renorm | bf16 | 2.00 | 100 | 25% |  |  | 4.00 (2.00) |"
    large = (
        "| T16 E128 k8 renorm | bf16 | 2.00 | 100 | 25% | ~1.00 (0.50) | 30.00 (15.00) "
        "| 3.00 (1.50) |"
    )
    assert small in text and large in text
    assert text.index(small) < text.index(large)  # by number, not by letter
    # The fastest exact peer is vllm: quack does not count for it.
    best = "| topk_softmax | GPU | bfloat16 | fastest exact peer | 2 | 1.50 | 1.73 | 2.00 |"
    assert best in text
    assert "| topk_softmax | host | bfloat16 | torch.topk | 1 | 7.00 | 7.00 | 7.00 |" in text
    assert "## topk_softmax: host time of an eager call" in text
    assert "0123456789ab |" in text and "copy 4300 GB/s" in text and "vllm 0.33.0" in text
    assert "`tiercel bench --suite full`" in text


def test_a_peer_that_no_graph_holds_stands_beside_ours(record):
    text = page([record(), record("vllm", 0.003, ratio=1.5, timing="events")])
    assert "| T16 E128 k8 renorm | bf16 | 2.00 | 100 | 25% | †3.00 (1.50) |" in text
    assert "`†`: by events around a loop of calls" in text
    assert "[topk_softmax](results/NVIDIA_H200/routing.md) | 1 of 1 | 1.50 | 1.50 | 1.50 |" in text


def test_an_operator_that_computes_has_tflops(record):
    fields = {"family": "linear", "op": "linear_act", "case": "M16 N64 K64 none", "tflops": 750.0}
    text = page([record(**fields), record("cublaslt", 0.003, ratio=1.5, **fields)])
    assert "| case | dtype | tiercel | TFLOP/s | of limit | cublaslt |" in text
    assert "| M16 N64 K64 none | bf16 | 2.00 | 750 | 25% | 3.00 (1.50) |" in text


def test_a_section_for_each_family_a_table_for_each_operator(record):
    rows = []
    for family, op in (("norm", "rms_norm"), ("activation", "swiglu"), ("norm", "layer_norm")):
        fields = {"family": family, "op": op, "case": "M16 N64"}
        rows += [record(**fields), record("torch", 0.001, ratio=0.5, **fields)]
        rows += [record(**fields | {"case": "M1 N64"})]
        rows += [record("torch", 0.004, ratio=2.0, **fields | {"case": "M1 N64"})]
    rows += [record("quack", 0.003, ratio=1.5, family="norm", op="rms_norm", case="M16 N64")]
    text = page(rows)
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "## NVIDIA H200",
        "# activation, NVIDIA H200",
        "## swiglu: GPU time",
        "## Runs",
        "# norm, NVIDIA H200",
        "## layer_norm: GPU time",
        "## rms_norm: GPU time",
        "## Runs",
    ]
    assert "| [rms_norm](results/NVIDIA_H200/norm.md) | 1 of 2 | 0.50 | 1.00 | 2.00 |" in text
    layer_norm = text[text.index("## layer_norm") : text.index("## rms_norm")]
    assert "quack" not in layer_norm  # only the peers that an operator has


def test_each_gpu_has_a_page(record):
    h100 = {"gpu": "NVIDIA H100 80GB HBM3", "run": "r2"}
    rows = [record(), record("vllm", 0.003, ratio=1.5)]
    rows += [record(ms=0.004, **h100), record("vllm", 0.005, ratio=1.25, **h100)]
    overview, tables = report.render(rows)
    h100, h200 = (f"results/{gpu}/routing.md" for gpu in ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H200"))
    assert set(tables) == {h100, h200}
    assert "3.00 (1.50)" in tables[h200] and "1.25" not in tables[h200]
    assert "5.00 (1.25)" in tables[h100]
    assert overview.index("## NVIDIA H100") < overview.index("## NVIDIA H200")
    assert f"[topk_softmax]({h100}) | 1 of 1 | 1.25 | 1.25 | 1.25 |" in overview


def test_no_results(folder):
    assert report.render([]) == ("No results are committed yet.\n", {})
    assert not report.update(folder, check=False)
    assert "No results are committed yet." in (folder / "README.md").read_text()


def test_it_is_the_same_in_any_order(folder, rows, record):
    texts = set()
    rows.append(record("torch", 0.031, ratio=15.5))  # one that a run measured twice
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        cut = seed + 3
        write(folder, "a.jsonl", rows[:cut])
        write(folder, "b.jsonl", rows[cut:])
        report.update(folder, check=False)
        tables = folder / "results" / "NVIDIA_H200" / "routing.md"
        texts.add((folder / "README.md").read_text() + "|" + tables.read_text())
    assert len(texts) == 1
    text, tables = texts.pop().split("|# ", 1)
    assert tables.startswith("routing, NVIDIA H200\n")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_check_writes_nothing_and_tells(folder, rows, record):
    write(folder, "a.jsonl", rows)
    before = (folder / "README.md").read_text()
    assert not report.update(folder, check=True)
    assert (folder / "README.md").read_text() == before
    assert not report.update(folder, check=False)
    assert report.update(folder, check=True)
    tables = folder / "results" / "NVIDIA_H200" / "routing.md"
    tables.write_text(tables.read_text().replace("30.00", "31.00"))
    assert not report.update(folder, check=True)
    assert not report.update(folder, check=False)
    write(folder, "b.jsonl", [record(ms=0.0021, run="r2", date="2026-02-02")])
    assert not report.update(folder, check=True)


def test_a_page_without_markers(folder):
    (folder / "README.md").write_text("nothing")
    with pytest.raises(BenchError, match="lacks the lines"):
        report.update(folder, check=False)
    (folder / "README.md").unlink()
    with pytest.raises(BenchError, match="cannot read"):
        report.update(folder, check=True)
