# SPDX-License-Identifier: Apache-2.0
"""Records from elsewhere: what is wrong is said in a line, and no name leads out of the folder."""

import argparse
import json
import random

import pytest
from support import mutate

from tiercel.workbench.bench import BenchError, command, compare, limits, records, report


@pytest.fixture
def rows(record):
    more = {"exact": True, "gbps": 100.0, "tflops": 5.0, "limit_frac": 0.5}
    first = {"family": "limits", "op": "copy", "case": "64 MB", "gbps": 4000.0}
    return [
        record("tiercel", 0.002, **more),
        record("vllm", 0.003, ratio=1.5, **more),
        record("tiercel", 0.004, timing="host", exact=True),
        record("torch", 0.01, **first),
    ]


@pytest.fixture
def folder(tmp_path):
    """A checkout with a page to render into, and a file beside that is not to change."""
    (tmp_path / "README.md").write_text("the checkout's")
    (tmp_path / "benchmarks/results/x").mkdir(parents=True)
    (tmp_path / "benchmarks/README.md").write_text(f"a\n{report.BEGIN}\n{report.END}\nb\n")
    return tmp_path


def render(folder, capsys):
    """(status, what it said), with nothing but one line on an error."""
    args = argparse.Namespace(root=folder, check=False)
    status = command.main(command.report, args)
    said = capsys.readouterr().err
    assert said.count("\n") == (status == 2) and "\x1b" not in said
    return status, said


def put(folder, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    mutate.write(folder / "benchmarks/results/x/a.jsonl", text)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", "../.."),
        ("gpu", "/etc"),
        ("gpu", ".."),
        ("gpu", ""),
        ("family", "README"),
        ("family", "../../README"),
        ("family", "x/y"),
        ("family", "x" * 300),
        ("family", "a\0b"),
    ],
)
def test_a_record_s_names_lead_nowhere_else(folder, rows, capsys, field, value):
    put(folder, [row | {field: value} for row in rows[:2]])
    before = files(folder)
    status, said = render(folder, capsys)
    assert (folder / "README.md").read_text() == "the checkout's"
    if value == "README":  # beside the records it is a name like any other
        assert status == 0 and files(folder) - before == {
            "benchmarks/results/NVIDIA_H200/README.md"
        }
    else:
        assert status == 2 and field in said and files(folder) == before


def test_a_table_s_cells_stay_cells(rows):
    row = rows[0] | {"case": "a | b <!-- x", "command": "x | y"}
    _, pages = report.render([row])
    (page,) = pages.values()
    assert "a \\| b" in page and "x \\| y" in page


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "bf16"}, "`dtype` is 'bf16', not one of"),
        ({"exact": None}, "`exact` is neither true nor false"),
        ({"ratio": 0}, "`ratio` is no positive number"),
        ({"ratio": "1"}, "`ratio` is no positive number"),
        ({"ms_median": 0}, "`ms_median` is not positive"),
        ({"ms_median": 10**400}, "`ms_median` is no number"),
        ({"ms_median": [1]}, "`ms_median` is no number"),
        ({"gbps": None}, "`gbps` is null"),
        ({"command": 3}, "`command` is no text"),
        ({"case": "a\nb\x1b[2J"}, "`case` is no plain text"),
        ({"case": "x" * 5000}, "`case` is no plain text"),
    ],
)
def test_what_no_record_has(rows, change, text):
    assert any(text in problem for problem in records.problems(rows[1] | change))
    assert records.problems(rows[1]) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "\udc80", "9" * 5000, "{"])
def test_lines_that_are_no_record(tmp_path, text):
    path = mutate.write(tmp_path / "a.jsonl", text)
    with pytest.raises(BenchError, match="a.jsonl"):
        records.read(path)


def test_limits_of_which_some_lack(rows):
    assert limits.as_text(limits.summary(rows[3:])) == "copy 4000 GB/s (64 MB 4000)"
    assert records.problems(rows[3] | {"gbps": None})


def some(rows, chance, count):
    """Files of records of which one is changed."""
    for text in mutate.texts(rows[0], count, seed=3):
        lines = [json.dumps(row) for row in rows]
        lines[chance.randrange(len(lines))] = text.replace("\n", " ")
        yield "\n".join(lines)
    for index, row in enumerate(rows):
        for text in mutate.texts(row, count // 4, seed=index):
            yield "\n".join([*map(json.dumps, rows), text.replace("\n", " ")])


def test_fuzz_compare(tmp_path, rows):
    read, said = 0, []
    for text in some(rows, random.Random(1), 300):
        try:
            old = records.read(mutate.write(tmp_path / "a.jsonl", text))
        except BenchError as error:
            said.append(str(error))
            continue
        read += 1
        compare.as_text(compare.compare(old, rows, 0.05), 0.05)
        compare.as_text(compare.compare(rows, old, 0.05), 0.05)
    assert read > 20 and said and not any("\n" in text or "\x1b" in text for text in said)


def test_fuzz_report(folder, rows, capsys):
    rendered = 0
    for text in some(rows, random.Random(2), 300):
        mutate.write(folder / "benchmarks/results/x/a.jsonl", text)
        status, _ = render(folder, capsys)
        rendered += status == 0
        assert files(folder) - {"README.md"} == {
            name for name in files(folder) if name.startswith("benchmarks/")
        }
    assert rendered > 20 and (folder / "README.md").read_text() == "the checkout's"


def test_a_page_that_is_no_text_or_cannot_be_written(folder, rows, capsys):
    put(folder, rows)
    (folder / "benchmarks/results/NVIDIA_H200").write_text("")
    assert render(folder, capsys)[0] == 2
    (folder / "benchmarks/README.md").write_bytes(b"\xff\xfe")
    assert "is no UTF-8 text" in render(folder, capsys)[1]
