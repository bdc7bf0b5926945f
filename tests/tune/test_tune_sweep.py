# SPDX-License-Identifier: Apache-2.0
"""`tiercel tune` with a stand-in for the GPU: scheduling, resuming, winners."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiercel.cli import main
from tiercel.workbench.tune import ops
from tiercel.workbench.tune.problem import Problem, name_of

HERE = Path(__file__).parent
SHAPE = Problem.of("nvfp4_linear", "float4_e2m1fn_x2", N=4096, K=4096)
ARGS = ["nvfp4-linear", "--problem", "N=4096,K=4096", "--num-tokens", "8", "1", "--quick"]


def stand_in():
    sys.path.insert(0, str(HERE))
    import stand_in as module

    return module


@pytest.fixture
def tune(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("TUNE_LOG", str(tmp_path / "log"))
    out = tmp_path / "results.json"

    def run(*more, args=ARGS):
        return main(["tune", *args, "--output", str(out), "--bench", "stand_in:Bench", *more])

    run.out = out
    run.log = tmp_path / "log"
    return run


def trials(log):
    """Checks by trial, those of the final rounds too."""
    return collections.Counter(line.split(" ", 1)[1] for line in log.read_text().splitlines())


def start(out, log, *more, env=None):
    """The same in another process."""
    variables = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    variables |= {"TUNE_LOG": str(log), **(env or {})}
    command = [sys.executable, "-m", "tiercel", "tune", *ARGS, "--output", str(out)]
    command += ["--bench", "stand_in:Bench", *more]
    return subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def expected(tokens):
    from tiercel.workbench.tune import hardware

    tunable = ops.load()["nvfp4-linear"]
    every = tunable.candidates(SHAPE, tokens, True, False)
    return [c for c in every if hardware.why_not(tunable.needs(SHAPE, tokens, c)) is None]


def test_the_fastest_wins(tune, capsys):
    assert tune() == 0
    data = json.loads(tune.out.read_text())
    assert [row["tokens"] for row in data["results"]] == [1, 8]
    for row in data["results"]:
        tokens = row["tokens"]
        times = {
            name_of(c): stand_in().milliseconds(SHAPE, tokens, c) * 1e3 for c in expected(tokens)
        }
        best = min(times, key=times.get)
        assert name_of(row["best"]["candidate"]) == best
        assert row["best"]["us"] == pytest.approx(times[best])
        assert row["today_us"] == pytest.approx(500)
    assert data["trials"] == {"ok": sum(len(expected(t)) for t in (1, 8))}
    assert data["command"].startswith("tiercel tune nvfp4-linear --problem N=4096,K=4096")
    said = capsys.readouterr()
    assert "ratio" in said.out and "left" in said.err and "nvfp4_linear: " in said.out


def test_every_trial_once_and_finalists_again(tune):
    tune("--finalists", "3")
    counts = trials(tune.log)
    for tokens in (1, 8):
        names = [f"{SHAPE.name} T={tokens} {name_of(c)}" for c in expected(tokens)]
        assert all(counts[name] in (1, 2) for name in names)
        assert sum(counts[name] == 2 for name in names) == 3
        assert counts[f"{SHAPE.name} T={tokens} today"] == 1


def test_a_second_run_measures_nothing(tune):
    tune()
    first, before = tune.out.read_text(), tune.log.read_text()
    assert tune() == 0
    assert tune.log.read_text() == before
    assert json.loads(tune.out.read_text())["results"] == json.loads(first)["results"]


def test_more_tokens_measure_only_those(tune):
    tune()
    tune.log.write_text("")
    assert tune("--num-tokens", "1", "8", "2") == 0
    assert all(" T=2 " in line for line in tune.log.read_text().splitlines())


def test_wrong_and_broken_candidates_never_win(tune, monkeypatch, capsys):
    tune()
    best = json.loads(tune.out.read_text())["results"][0]["best"]["candidate"]
    monkeypatch.setenv("TUNE_WRONG", f"tiles={best['tiles']},")
    monkeypatch.setenv("TUNE_BROKEN", "cluster=8")
    out = tune.out.with_name("again.json")
    assert tune("--output", str(out)) == 0
    for row in json.loads(out.read_text())["results"]:
        assert row["best"]["candidate"]["tiles"] != best["tiles"]
        assert row["best"]["candidate"]["cluster"] != 8
    said = capsys.readouterr().out
    assert "wrong, the first" in said and "off by 7.0 times" in said
    assert "does not compile, the first" in said and "ptxas said no" in said
    assert "at length" not in said


def test_nothing_runs(tune, monkeypatch):
    monkeypatch.setenv("TUNE_BROKEN", "cluster")
    assert tune() == 1
    assert all(row["best"] is None for row in json.loads(tune.out.read_text())["results"])


def test_resumes_after_kill(tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    process = start(out, log, env={"TUNE_DELAY": "0.02"})
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    (journal,) = (tmp_path / "r.json.journal").glob("*.jsonl")
    with journal.open("a") as file:  # as if the kill had come within a write
        file.write('{"kind": "resu')
    before = trials(log)
    process = start(out, log)
    said = process.communicate()[0].decode()
    assert process.returncode == 0, said
    assert "trials are in the journal already" in said
    counts = trials(log)
    finals = {n for row in json.loads(out.read_text())["results"] for n in [row["tokens"]]}
    assert finals == {1, 8}
    # What the first process had begun, at most one trial, is all that was measured once more.
    again = sum(counts[name] - 1 for name in before)
    total = sum(len(expected(t)) for t in (1, 8))
    assert len([n for n in counts if not n.endswith("today")]) == total
    assert again <= 1 + 2 * 8  # and finalists
    once = [n for n in before if counts[n] == 1]
    assert len(once) >= len(before) - 1 - 10


def test_a_candidate_that_kills_is_left_out_at_last(tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    victim = name_of(expected(1)[5])
    env = {"TUNE_KILL": victim}
    for _ in range(2 * 2):  # it is in both token counts' lists, twice each
        process = start(out, log, env=env)
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    process = start(out, log, env=env)
    said = process.communicate()[0].decode()
    assert process.returncode == 0, said
    assert "its process ended 2 times" in said
    assert max(n for name, n in trials(log).items() if name.endswith(victim)) == 2


def test_a_hung_trial_ends_the_process(tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    process = start(out, log, "--trial-limit", "0.5", env={"TUNE_DELAY": "30"})
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 75
    assert "took more than 0 s" in said or "took more than 1 s" in said


def test_two_processes_do_not_share_a_journal(tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    first = start(out, log, env={"TUNE_DELAY": "0.2"})
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = start(out, log)
    assert "another process is tuning into" in second.communicate()[0].decode()
    assert second.returncode == 2
    first.kill()
    first.communicate()


def test_another_gpus_journal_is_refused(tune, monkeypatch, capsys):
    tune()
    (journal,) = tune.out.with_name("results.json.journal").glob("*.jsonl")
    journal.write_text(journal.read_text().replace("NVIDIA Stand-in", "NVIDIA H100"))
    assert tune() == 2
    assert "holds a sweep with gpu 'NVIDIA H100', and here it is" in capsys.readouterr().err


def test_what_is_no_journal_is_named(tune, capsys):
    tune()
    (journal,) = tune.out.with_name("results.json.journal").glob("*.jsonl")
    journal.write_text("hello\n")
    assert tune() == 2
    assert "line 1: is no journal of tiercel tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["linear", "--problem", "N=12,K=64"], "N and K must be multiples of 8"),
        (["nvfp4-linear", "--problem", "N=8,K=96"], "K must be a multiple of 64"),
        (["nvfp4-linear", "--num-tokens", "17"], "at most 16 tokens are supported, got 17"),
        (["linear", "--dtype", "float32"], "--dtype must be one of bfloat16, float16, got float32"),
    ],
)
def test_bad_problems_are_named(args, text, capsys):
    assert main(["tune", *args]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("problem", ["N=8", "4096", "N=0,K=8", "N=8,K=x"])
def test_bad_shapes_are_named(problem, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "linear", "--problem", problem])
    assert "must look like N=4096,K=4096" in capsys.readouterr().err
