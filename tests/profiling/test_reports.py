# SPDX-License-Identifier: Apache-2.0
"""What is read out of reports."""

import contextlib
import json
import random
import re
from pathlib import Path

import pytest
from support import mutate

from tiercel.cli import main
from tiercel.workbench.profiling import ProfileError, reports, show

HEAD = [
    ("ID", ""),
    ("Kernel Name", ""),
    ("Block Size", ""),
    ("Grid Size", ""),
    ("gpu__time_duration.sum", "ns"),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%"),
    ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", "%"),
    ("sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active", "%"),
    ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", "inst"),
    ("smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "inst"),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "%"),
    ("sm__maximum_warps_per_active_cycle_pct", "%"),
    ("launch__registers_per_thread", "register/thread"),
    ("launch__shared_mem_per_block", "byte/block"),
    ("launch__occupancy_limit_registers", "block"),
    ("launch__occupancy_limit_warps", "block"),
    ("dram__bytes_read.sum", "byte"),
    ("dram__bytes_write.sum", "byte"),
]
ROWS = [
    ["0", "void topk<(int)8>(float*)", "(256, 1, 1)", "(1024, 1, 1)", "12,345", "33.1", "91.5"]
    + ["40", "0", "7.25", "0.01", "48", "50", "64", "1024", "4", "8", "2,000,000", "500,000"],
    ["1", "gemm", "(384, 1, 1)", "(132, 1, 1)", "1000000", "90", "20", "10", "88", "1", "3", "18"]
    + ["19", "168", "232448", "1", "5", "n/a", "0"],
]


def as_csv(rows=ROWS, head=HEAD):
    def line(words):
        return ",".join(f'"{word}"' for word in words)

    lines = ["==PROF== Connected", line(n for n, _ in head), line(u for _, u in head)]
    return "\n".join([*lines, *map(line, rows)]) + "\n"


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.csv"
    path.write_text(as_csv())
    return path


def test_figures_of_a_kernel(report):
    first, second = reports.read(report)
    assert first["kernel"] == "void topk<(int)8>(float*)" and first["us"] == pytest.approx(12.345)
    assert first["throughput"] == {"sm": 33.1, "dram": 91.5}
    assert list(first["pipes"].items()) == [("alu", 40.0), ("tensor", 0.0)]
    assert list(first["stalls"].items()) == [("long_scoreboard", 7.25), ("barrier", 0.01)]
    assert first["occupancy"] == {"achieved": 48.0, "possible": 50.0}
    assert first["dram_bytes"] == 2_500_000 and second["dram_bytes"] is None
    assert list(second["pipes"]) == ["tensor", "alu"]


def test_a_report_of_an_h200(capsys):
    path = Path(__file__).with_name("ncu_raw.csv")  # of two kernels, as ncu 2025.3 writes it
    topk, neg = reports.read(path)
    assert topk["us"] == pytest.approx(5.6) and topk["registers"] == 48
    assert topk["occupancy"]["possible"] == 62.5 and next(iter(topk["pipes"])) == "alu"
    assert next(iter(topk["stalls"])) == "long_scoreboard" and "selected" not in topk["stalls"]
    assert neg["dram_bytes"] == pytest.approx(512.6e6, rel=1e-3)
    assert main(["profile", "extract", str(path), "--floor", "512MB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiercel::topk_softmax_by_networks<tiercel::KeysOf16Bit<")
    assert "4093 GB/s, 0.95 times the floor of 536.87 MB" in text
    assert max(map(len, text.splitlines())) < 160


def test_as_text(report):
    first, second = (show.as_text(entry) for entry in reports.floors(reports.read(report), 2e6))
    assert "12.35 us" in first or "12.34 us" in first
    assert "long_scoreboard 7.25 warps an issue" in first and "barrier" not in first
    assert "48 % of 50 %, 64 registers, 1.0 KB shared, 4 blocks an SM by registers" in first
    assert "2.50 MB, 203 GB/s, 1.25 times the floor of 2.00 MB (162 GB/s of it)" in first
    assert "bytes" not in second


def test_other_units_are_brought_to_base_ones():
    head = [(n, {"ns": "usecond", "byte": "Mbyte"}.get(u, u)) for n, u in HEAD]
    first = reports.from_ncu(as_csv(head=head))[0]
    assert first["us"] == pytest.approx(12345) and first["dram_bytes"] == pytest.approx(2.5e12)


def test_only_one_kernel(report, capsys):
    assert main(["profile", "extract", str(report), "--kernel", "gemm", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["registers"] == 168
    assert main(["profile", "extract", str(report), "--kernel", "sort"]) == 2
    assert "no kernel named 'sort'" in capsys.readouterr().err


def test_several_reports(report, tmp_path, capsys):
    log = tmp_path / "b.sanitizer.txt"
    log.write_text("========= ERROR SUMMARY: 0 errors\n")
    assert main(["profile", "extract", str(report), str(log)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{report}:\n") and f"\n{log}:\n" in text and '"errors": 0' in text
    assert main(["profile", "extract", str(report), str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [str(report), str(log)]
    assert len(found[str(report)]) == 2 and found[str(log)]["errors"] == 0
    assert main(["profile", "extract", str(report), str(tmp_path / "no.ncu-rep")]) == 2


def test_with_a_floor(report, capsys):
    assert main(["profile", "extract", str(report), "--kernel", "topk", "--floor", "2MB"]) == 0
    assert "1.19 times the floor" in capsys.readouterr().out
    assert main(["profile", "extract", str(report), "--floor", "much"]) == 2
    assert "'much' is no size" in capsys.readouterr().err


NSYS = """Processing [x.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
75.0,3000,3,1000.0,990.0,900,1100,10.0,"void topk(float*, int)"
25.0,1000,1,1000.0,1000.0,1000,1000,0.0,gemm
"""


def test_nsys_sums():
    first, second = reports.from_nsys(NSYS)
    assert first == {"kernel": "void topk(float*, int)", "share": 75.0, "calls": 3, "us": 0.99}
    assert "25.0 %" in show.as_text(second)


# As nsys 2022.4 does, where the sum has another name: it says so and ends with 0.
OLD_NSYS = """#!/bin/sh
echo "$@" | grep -q gpukernsum || {{ echo "ERROR: Report could not be found." >&2; exit 0; }}
cat {text}
"""


def test_an_older_nsys(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text(re.sub(r"(?m)^((?:[^,]+,){8})", r"\1  1    1    1,", NSYS))
    (tmp_path / "nsys").write_text(OLD_NSYS.format(text=tmp_path / "text"))
    (tmp_path / "nsys").chmod(0o755)
    (tmp_path / "a.nsys-rep").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["profile", "extract", str(tmp_path / "a.nsys-rep"), "--kernel", "topk"]) == 0
    assert "75.0 %       0.99 us       3  void topk(float*, int)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n"])
def test_a_report_without_kernels(tmp_path, text):
    path = tmp_path / "empty.csv"
    path.write_text(text)
    with pytest.raises(ProfileError, match="holds no kernels"):
        reports.read(path)
    with pytest.raises(ProfileError, match="holds no kernels"):
        reports.from_nsys(text)


def test_another_file(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ProfileError, match=r"none of \.ncu-rep"):
        reports.read(tmp_path / "a.txt")


def extracted(path, capsys):
    """(status, output) of `profile extract`: one line where it is refused, never a traceback."""
    status = main(["profile", "extract", str(path)])
    said = capsys.readouterr()
    assert status in (0, 2) and said.err.count("\n") == (status == 2)
    for text in (said.out, said.err):
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) is None
    return status, said.out + said.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (as_csv().splitlines()[1], "its head is damaged or cut short"),
        (as_csv(ROWS, [*HEAD[:1], *HEAD[2:]]), "its head is damaged or cut short"),
        (as_csv([]), "the report holds no kernels"),
        ('"ID","Kernel Name"\n"",""\n"' + "x" * 200_000 + '",1\n', "the report is no CSV"),
    ],
)
def test_a_damaged_report(tmp_path, capsys, text, said):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert extracted(path, capsys)[0] == 2 and said in extracted(path, capsys)[1]


def test_a_kernel_s_name_does_not_command_the_terminal(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text(as_csv().replace("gemm", "ge\x1b[2Jmm\x07"))
    assert "ge\\x1b[2Jmm\\x07" in extracted(path, capsys)[1]
    found = reports.from_sanitizer("===== Invalid read \x1b[2J\nERROR SUMMARY: 1 error\n")
    assert found["first"] == ["Invalid read \\x1b[2J"]


def test_no_floor_of_nothing(report, capsys):
    assert main(["profile", "extract", str(report), "--floor", "0"]) == 2
    assert "--floor must be more than 0" in capsys.readouterr().err


def test_fuzz_ncu(tmp_path, capsys):
    chance, path, read = random.Random(5), tmp_path / "a.csv", 0
    text = as_csv()
    for _ in range(300):
        read += extracted(mutate.write(path, mutate.damaged(text, chance)), capsys)[0] == 0
    for _ in range(200):
        words = [word if chance.random() > 0.05 else chance.choice(ODD) for word in ROWS[0]]
        read += extracted(mutate.write(path, as_csv([words, ROWS[1]])), capsys)[0] == 0
    assert read > 20


ODD = ("", "nan", "inf", "-1", "1e999", "9" * 400, "x", "\udc80", "\x1b[2J")


def test_fuzz_nsys():
    chance, read = random.Random(6), 0
    for _ in range(400):
        with contextlib.suppress(ProfileError):
            found = reports.from_nsys(mutate.damaged(NSYS, chance))
            read += bool("\n".join(map(show.as_text, found)))
    assert read > 20
