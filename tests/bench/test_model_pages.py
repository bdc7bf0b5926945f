# SPDX-License-Identifier: Apache-2.0
"""The pages of whole models come from their records and from nothing else."""

import re
import xml.etree.ElementTree

import pytest

from tiercel.cli import main
from tiercel.workbench.bench import BenchError, report
from tiercel.workbench.bench.records import dump
from tiercel.workbench.models import WAYS, page, plot


@pytest.fixture
def record():
    def make(way="transformers", ms=2.0, **fields):
        names = ("commit", "driver", "torch", "transformers", "command")
        made = {name: f"the {name}" for name in names}
        made |= {"run": "a", "date": "2026-01-01T00:00:00Z", "gpu": "NVIDIA H200", "way": way}
        made |= {"model": "M", "layers": 4, "phase": "prefill", "case": "1x128", "status": "ok"}
        made |= {"ms_median": ms, "host_ms": 0.5, "tokens_per_s": 128 / ms * 1e3}
        made |= {"peak_mib": 100.0, "launches": 7, "first_call_s": 1.25, "rel_err": 0.0}
        return made | fields

    return make


def test_a_page(record):
    newer = {"run": "b", "date": "2026-02-01T00:00:00Z"}
    records = [
        record("tiercel.compiled", 99.0),
        record("tiercel.compiled", 1.0, rel_err=0.0123, floor_ms=0.5, **newer),
        record("transformers", 2.0, **newer),
        record("engine", 4.0, host_ms=None, rel_err=None, **newer),
        record("liger", status="failed", reason="no such model", **newer),
        record(
            "transformers", 3000.0, phase="decode", case="32x2048", peak_mib=None, launches=None
        ),
        record("transformers", 3.0, phase="decode", case="4x2048"),
    ]
    text = page.render("NVIDIA H200", records)
    assert text.startswith("# Models, NVIDIA H200\n") and text.count("## M, 4 layers") == 1
    assert "| tiercel.compiled | 1 | 2.00 | 50% | 128000 | 0.50 | 7 | 100 | 1.2 | 1.2e-02 |" in text
    assert "| engine | 4 | 0.50 | - | 32000 | - | 7 | 100 | 1.2 | - |" in text
    assert "| liger | failed | - | - | - | - | - | - | - | - |" in text
    assert "- M, prefill 1x128, liger: no such model\n" in text and "99" not in text
    assert "| transformers | 3000 | 1.00 | - | 43 | 0.50 | - | - | 1.2 | 0.0e+00 |" in text
    places = [
        text.index(f"{case}:") for case in ("prefill 1x128", "decode 4x2048", "decode 32x2048")
    ]
    assert places == sorted(places)
    assert text == page.render("NVIDIA H200", records[::-1])


def test_what_the_newest_run_lacked_is_marked(record):
    newer = {"run": "b", "date": "2026-02-01T00:00:00Z"}
    records = [record(), record("tiercel", 1.0), record("tiercel", 0.5, rel_err=0.25, **newer)]
    text = page.render("NVIDIA H200", records)
    assert "| transformers ‡ | 2 | 1.00 |" in text and "| tiercel | 0.5 | 4.00 |" in text
    assert "2.5e-01" not in text  # the error is to what that run did not have
    (shown,) = page.latest(records).values()
    assert ">transformers ‡<" in plot.draw([("M", shown)])


def test_without_the_model_as_it_is_there_is_no_ratio(record):
    assert page.rows([record("tiercel")])[0][:3] == ("tiercel", "2", "-")
    every = page.rows([record(way) for way in reversed(WAYS)])
    assert [row[0] for row in every] == list(WAYS)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"way": "other"}, "unknown"),
        ({"phase": 1}, "`phase`"),
        ({"model": "\x1b[31mM"}, "`model`"),
        ({"layers": "4"}, "`layers`"),
        ({"ms_median": 0.0}, "positive"),
        ({"ms_median": True}, "`ms_median`"),
        ({"host_ms": None}, "`host_ms`"),
        ({"rel_err": float("nan")}, "`rel_err`"),
        ({"floor_ms": -1.0}, "`floor_ms`"),
        ({"status": "failed"}, "`reason`"),
    ],
)
def test_faults(record, fields, fault):
    assert fault in page.problem(record(**fields))
    assert page.problem(record()) is page.problem(record(launches=None)) is None
    assert page.problem([]) == "is no JSON object"


def test_a_picture(record):
    records = [record(), record("tiercel", 1.25), record("engine", status="failed", reason="none")]
    text = plot.draw([("M <b>", records), ("no base", [record("tiercel")])])
    xml.etree.ElementTree.fromstring(text)
    assert "M &lt;b&gt;" in text and "no base" not in text and "engine" not in text
    whole, part = (float(x) for x in re.findall(r'rect x="250" .* width="([0-9.]+)"', text)[::-1])
    assert whole / part == pytest.approx(1.6, rel=1e-3) and ">1.60</text>" in text
    # Each case has its own scale; one way alone shows nothing.
    text = plot.draw([("a", records), ("b", [record(), record("tiercel", 0.1)]), ("c", [record()])])
    widths = [float(x) for x in re.findall(r'rect x="250" .* width="([0-9.]+)"', text)]
    assert len(widths) == 4 and widths[1] == widths[3] > widths[0] > widths[2]


def test_the_report_writes_and_checks_them(record, tmp_path):
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    (tmp_path / "models").mkdir()
    records = tmp_path / "models" / "NVIDIA_H200.jsonl"
    records.write_text(dump(record()) + "\n" + dump(record("tiercel")) + "\n")
    assert not report.update(tmp_path, check=True)
    report.update(tmp_path, check=False)
    assert report.update(tmp_path, check=True)
    assert "## M, 4 layers" in records.with_suffix(".md").read_text()
    assert "M, 4 layers, prefill 1x128" in records.with_suffix(".svg").read_text()
    records.write_text(dump(record(ms=5.0)) + "\n")
    assert not report.update(tmp_path, check=True)
    records.write_text("{}\n")
    with pytest.raises(BenchError, match=r"NVIDIA_H200\.jsonl:1: `run` is no plain text"):
        report.update(tmp_path, check=True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nothing --device cpu", "no model 'nothing'; there are DeepSeek-V3, Gemma-3-1B"),
        ("none.json --device cpu", "cannot read none.json"),
        ("--device cpu --prefill 8", "--prefill: '8' is not BATCHxTOKENS"),
        (
            "--device cpu --ways tiercel,other",
            "no way 'other'; there are transformers, ",
        ),
    ],
)
def test_what_the_user_can_put_right(words, text, capsys):
    assert main(["bench", "model", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiercel bench: ") and text in error and error.count("\n") == 1
