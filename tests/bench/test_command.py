# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench`` as a user calls it, with a clock of its own."""

import json
import subprocess
import sys

import pytest
import torch

from tiercel.cli import main
from tiercel.workbench.bench import BenchError, command, environment, plot, records
from tiercel.workbench.bench.launch import Launch
from tiercel.workbench.bench.timing import CudaClock

SUITES = """
suites:
  smoke:
    - {op: topk_softmax, dtype: [bfloat16, float32], T: 8, E: 16, k: 2, host: true}
"""


class CpuClock(CudaClock):
    """Runs on the CPU: real results, a replay that takes 2 us (torch: 6)."""

    slow = 1.0

    def __init__(self):
        pass

    def synchronize(self):
        pass

    def prepare(self, launches):
        clock = self

        class Replay:
            timing = "graph"
            launches = 1
            outputs = launches_0 = None

            def __init__(self, launch):
                self.launch = launch
                self.outputs = launch.run()
                self.ms = 0.002 * clock.slow if launch.strict else 0.006

            def run(self):
                for old, new in zip(self.outputs, self.launch.run(), strict=True):
                    old.copy_(new)

            def sample(self, count):
                return [self.ms] * count

        return Replay(launches[0])

    def host(self, call, count):
        call()
        return [0.004] * count


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench(*arguments) -> exit status, with the fake clock, on ref under the name of sm90."""
    monkeypatch.setattr(environment, "check_gpu", lambda: None)
    monkeypatch.setattr(command, "CudaClock", CpuClock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TIERCEL_COMMIT", "abc")
    (tmp_path / "suites.yaml").write_text(SUITES)

    def run(*arguments, backend=("ref",)):
        words = ["bench", "--suites", str(tmp_path / "suites.yaml"), "--device", "cpu"]
        words += ["--no-limits", "--backend", *backend, *map(str, arguments)]
        return main(words)

    return run


@pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning")
def test_a_run_writes_records_that_follow_the_schema(bench, tmp_path, capsys):
    out = tmp_path / "deep" / "results.jsonl"
    assert bench("--peers", "torch", "--out", out, "--rounds", 6) == 0
    rows = records.read(out)
    assert {(r["impl"], r["timing"], r["dtype"]) for r in rows} == {
        (impl, timing, dtype)
        for impl, timing in [
            ("tiercel:ref", "graph"),
            ("torch", "graph"),
            ("tiercel:ref", "host"),
            ("torch", "host"),
            ("torch.topk", "host"),
        ]
        for dtype in ("bfloat16", "float32")
    }
    assert {r["run"] for r in rows} == {rows[0]["run"]}
    assert {r["commit"] for r in rows} == {"abc"} and rows[0]["gpu"] == "NVIDIA H200"
    assert rows[0]["family"] == "routing" and rows[0]["case"] == "T8 E16 k2 renorm"
    assert next(r for r in rows if r["impl"] == "torch")["ratio"] == 3.0
    assert all(r["rounds"] == 6 for r in rows)
    assert str(tmp_path) not in out.read_text()  # no paths of the machine
    printed = capsys.readouterr().out
    assert "[1/2, " in printed and "3.00x" in printed and "limits: not measured" in printed


def test_where_sm90_does_not_run_the_run_fails(bench, capsys, tmp_path):
    out = tmp_path / "r.jsonl"
    assert bench("--peers", "none", "--out", out, backend=("sm90",)) == 1
    printed = capsys.readouterr().out
    assert "FAILED: 2 of our own measurements" in printed
    assert "'sm90' was asked for" in printed
    assert {r["status"] for r in records.read(out)} == {"error"}


@pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning")
def test_compare_fails_a_slower_run(bench, tmp_path, monkeypatch, capsys):
    old = tmp_path / "old.jsonl"
    assert bench("--peers", "none", "--out", old) == 0
    assert bench("--peers", "none", "--compare", old) == 0
    monkeypatch.setattr(CpuClock, "slow", 1.2)
    assert bench("--peers", "none", "--compare", old) == 1
    assert "2 regressions beyond 5%" in capsys.readouterr().out
    assert bench("--peers", "none", "--compare", old, "--threshold", "0.3") == 0


@pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning")
def test_a_missing_peer_is_left_out_with_the_reason(bench, capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_BENCH_VLLM", "/nowhere.so")
    assert bench("--peers", "vllm,torch") == 0
    assert "peer vllm left out: TIERCEL_BENCH_VLLM=/nowhere.so is no file" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "huge"], "no suite 'huge'; there are smoke"),
        (["--op", "sonnet"], "no operator 'sonnet'"),
        (["--peers", "apex"], "no peer 'apex'; there are"),
        (["--compare", "none.jsonl"], "cannot read none.jsonl"),
    ],
)
def test_mistakes_end_in_one_line(bench, capsys, arguments, text):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "sees no CUDA GPU" in capsys.readouterr().err


def test_counts_are_checked(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--rounds", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_report_command(tmp_path, capsys, benchmarks, monkeypatch):
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    page = root / "benchmarks" / "README.md"
    page.write_text((benchmarks / "README.md").read_text().replace("results", "results "))
    assert main(["bench", "report", "--root", str(root)]) == 2  # the markers are gone
    begin, end = environment_markers()
    page.write_text(f"{begin}\n{end}\n")
    assert main(["bench", "report", "--check", "--root", str(root)]) == 1
    assert "run `tiercel bench report`" in capsys.readouterr().out
    assert main(["bench", "report", "--root", str(root)]) == 0
    assert main(["bench", "report", "--check", "--root", str(root)]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "report"]) == 2
    assert "not in a checkout" in capsys.readouterr().err


def environment_markers():
    from tiercel.workbench.bench import report

    return report.BEGIN, report.END


def test_commit(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / environment.SUITES).mkdir(parents=True)
    (tmp_path / environment.SUITES / "a.yaml").write_text("suites: {}\n")
    (tmp_path / "sub").mkdir()
    monkeypatch.delenv("TIERCEL_COMMIT", raising=False)
    assert environment.checkout(tmp_path / "sub") == tmp_path.resolve()
    assert environment.commit(tmp_path) == "unknown"
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    head = environment.commit(tmp_path)
    assert len(head) == 40
    (tmp_path / environment.SUITES / "a.yaml").write_text("suites: {a: []}\n")
    assert environment.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("TIERCEL_COMMIT", "named")
    assert environment.commit(tmp_path) == "named"


def test_suites_path(tmp_path, monkeypatch):
    named = tmp_path / "mine.yaml"
    assert environment.suites_path(named) == named
    (tmp_path / environment.SUITES).mkdir(parents=True)
    (tmp_path / environment.SUITES / "a.yaml").write_text("suites: {}\n")
    monkeypatch.chdir(tmp_path / "python")
    assert environment.suites_path() == tmp_path.resolve() / environment.SUITES


def test_plot_without_matplotlib(monkeypatch, record, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"matplotlib.*pip install 'tiercel\[bench\]'"):
        plot.draw([record()], tmp_path / "p.png")


def test_what_a_plot_shows(record):
    rows = [record(), record("quack", 0.004), record("torch", family="limits", op="copy")]
    rows.append(record("deepgemm", part="its two grouped products"))
    shown, compute = plot.series(rows)
    assert not compute
    assert shown == {"tiercel": [(200000.0, 100.0)], "quack": [(400000.0, 100.0)]}
    shown, compute = plot.series([record(tflops=50.0)])
    assert compute
    assert shown == {"tiercel": [(500.0, 50.0)]}
    assert plot.series([record(status="wrong", ms_median=None)])[0] == {}
    found = {"copy_gbps": 4000.0, "launch_us": 0.5, "bfloat16_tflops": 800.0}
    assert plot.roof(found, 100.0, compute=True) == 400.0
    assert plot.roof(found, 1000.0, compute=True) == 800.0
    # Two microseconds of bytes beside half a microsecond of launch.
    assert plot.roof(found, 8e6, compute=False) == pytest.approx(3200.0)


def test_the_command_to_repeat_a_run(bench, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    bench("--peers", "none", "--op", "topk_softmax", "--out", out, backend=("sm90",))
    line = json.loads(out.read_text().splitlines()[0])
    assert line["command"] == (
        "tiercel bench --suite smoke --op topk_softmax --peers none "
        "--warmup 3 --iterations 20 --rounds 5"
    )


def test_several_operators_are_repeated(bench, tmp_path, monkeypatch, capsys):
    more = "    - {op: copy_transpose, dtype: float32, M: 8, N: 8}\n"
    more += "    - {op: silu_and_mul, dtype: float32, M: 8, N: 8}\n"
    (tmp_path / "suites.yaml").write_text(SUITES + more)
    out = tmp_path / "r.jsonl"
    bench("--peers", "none", "--op", "copy_transpose", "--op", "topk_softmax", "--out", out)
    rows = records.read(out)
    assert {row["op"] for row in rows} == {"copy_transpose", "topk_softmax"}
    assert "--op copy_transpose --op topk_softmax" in rows[0]["command"]


def test_the_cases_are_listed_without_a_gpu(tmp_path, capsys):
    (tmp_path / "suites.yaml").write_text(SUITES)
    assert main(["bench", "--suites", str(tmp_path / "suites.yaml"), "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "topk_softmax  T8 E16 k2 renorm  bfloat16",
        "topk_softmax  T8 E16 k2 renorm  float32",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "FileNotFoundError: there is no file"),
        ("import tiercel\nimport no_such_module\n", ", line 2: ModuleNotFoundError: No module"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("x = 1\n", "registers no backend"),
        ("raise RuntimeError('first\\nsecond')\n", ", line 1: RuntimeError: first\n"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(bench, tmp_path, capsys, text, said):
    path = tmp_path / "k.py"
    if text is not None:
        path.write_text(text)
    assert bench("--path", path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tiercel bench: cannot load {path}") and said in error
    assert error.count("\n") == 1


def test_launch_has_no_surprising_defaults():
    launch = Launch(run=tuple)
    assert (launch.exact, launch.strict, launch.slack, launch.graph) == (True, False, 0.0, True)
