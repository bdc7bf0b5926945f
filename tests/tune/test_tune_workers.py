# SPDX-License-Identifier: Apache-2.0
"""Several workers on one store: nothing is measured twice, a dead one's share is taken over."""

import collections
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiercel.workbench.tune import TuneError
from tiercel.workbench.tune.board import StoreBoard
from tiercel.workbench.tune.command import _agree
from tiercel.workbench.tune.problem import name_of
from tiercel.workbench.tune.shared import Place

HERE = Path(__file__).parent
COMMAND = ["nvfp4-linear", "--problem", "N=4096,K=4096", "--num-tokens", "1", "8", "--quick"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def place(tmp_path):
    """(variables, arguments) of a worker."""
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": paths, "TUNE_LOG": str(tmp_path / "log")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    more = ["--output", str(tmp_path / "r.json"), "--bench", "stand_in:Bench", "--lease", "3"]
    return env | {"TUNE_DELAY": "0.05"}, ["tune", *COMMAND, *more]


def worker(place, rank, count, port):
    env, args = place
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return subprocess.Popen(
        [sys.executable, "-m", "tiercel", *args],
        env=env | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def workers(place, count, port):
    return [worker(place, rank, count, port) for rank in range(count)]


def finish(processes):
    said = [process.communicate(timeout=120)[0].decode() for process in processes]
    return [process.returncode for process in processes], said


def sweep_counts(tmp_path):
    """How often each trial was checked, without the final rounds (by the journals)."""
    starts = collections.Counter()
    for path in (tmp_path / "r.json.journal").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            data = json.loads(line)
            if data["kind"] == "start":
                starts[data["trial"]] += 1
    return starts


def ranks(tmp_path):
    return collections.Counter(line[0] for line in (tmp_path / "log").read_text().splitlines())


def test_three_share_the_work(place, tmp_path):
    codes, said = finish(workers(place, 3, free_port()))
    assert codes == [0, 0, 0], said
    starts = sweep_counts(tmp_path)
    assert set(starts.values()) == {1}
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["trials"] == {"ok": len(starts)}
    shares = ranks(tmp_path)
    assert set(shares) == {"0", "1", "2"} and min(shares.values()) > 20
    assert "wrote" in said[0] and "wrote" not in said[1] + said[2]


def test_a_dead_ones_share_is_taken_over(place, tmp_path):
    victim = 1
    processes = workers(place, 3, free_port())
    wait_for(tmp_path, victim)
    processes[victim].send_signal(signal.SIGKILL)
    codes, said = finish(processes)
    assert codes[victim] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0, 0], said
    starts = sweep_counts(tmp_path)
    twice = [trial for trial, count in starts.items() if count > 1]
    assert len(twice) <= 1  # what it had begun
    rows = json.loads((tmp_path / "r.json").read_text())
    assert rows["trials"] == {"ok": len(starts)}
    # The winners are those that one worker alone finds.
    sys.path.insert(0, str(HERE))
    from stand_in import milliseconds
    from test_tune_sweep import SHAPE, expected

    for row in rows["results"]:
        tokens = row["tokens"]
        best = min(expected(tokens), key=lambda c: milliseconds(SHAPE, tokens, c))
        assert name_of(row["best"]["candidate"]) == name_of(best)


def wait_for(tmp_path, rank):
    """Until this worker has checked a few candidates."""
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() or ranks(tmp_path)[str(rank)] < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_torchrun_starts_them_again(place, tmp_path):
    """torchrun ends all workers with the first that dies; then the journals bring what they had."""
    env, args = place
    env = env | {"TUNE_KILL": f"tiles=4,parts=2@{tmp_path / 'killed'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += ["--max-restarts", "1", "-m", "tiercel", *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "killed").exists()
    starts = sweep_counts(tmp_path)
    assert sum(count > 1 for count in starts.values()) <= 2  # what the two had begun
    assert "trials are in the journal already" in result.stdout


def test_the_worker_that_differs_is_refused(place, tmp_path):
    """It is not the one whose store the others use, even where it comes first."""
    env, args = place
    port, go_on = free_port(), tmp_path / "go on"
    env = env | {"TUNE_DELAY": "0", "TUNE_WAIT": str(go_on)}
    other = worker((env, [*args, "--num-tokens", "2"]), 1, 2, port)
    first = worker((env, [*args, "--num-tokens", "1"]), 0, 2, port)
    (refused,), (said,) = finish([other])
    go_on.touch()  # the sweep of rank 0 may not end before the other worker has come
    (ended,), (also_said,) = finish([first])
    assert refused == 2 and "workers differ: rank 0 runs" in said, said
    assert ended == 0 and "wrote" in also_said, also_said


def test_rank_0_says_what_is_measured():
    heart = SimpleNamespace(store=torch.distributed.HashStore())
    facts = {"gpu": "g", "tiercel": "0", "commit": "c"}
    with ThreadPoolExecutor() as pool:
        early = pool.submit(_agree, heart, Place(1, 2, 1), "mine", facts)
        time.sleep(0.2)
        _agree(heart, Place(0, 2, 0), "what all run", facts)
        with pytest.raises(TuneError, match="rank 0 runs `what all run .*this one `mine "):
            early.result()


def test_workers_without_their_store_say_so(place, tmp_path):
    processes = workers(place, 2, free_port())
    wait_for(tmp_path, 1)
    processes[0].kill()
    codes, said = finish(processes)
    assert codes[1] == 2 and "store is gone" in said[1] and "Traceback" not in said[1], said


def test_half_of_torchruns_environment_is_named(monkeypatch, capsys):
    from tiercel.cli import main

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", *COMMAND, "--bench", "stand_in:Bench"]) == 2
    assert "WORLD_SIZE is set as torchrun does, but not all else: 'RANK'" in capsys.readouterr().err


def test_a_record_from_anothers_journal_counts_once():
    """A worker that starts late reads what the others have written and publishes it again."""
    heart = SimpleNamespace(store=torch.distributed.HashStore(), worker="0")
    board = StoreBoard(heart, "sweep", ["batch"])
    assert board.publish("trial", {"us": 1.0})
    assert not board.publish("trial", {"us": 1.0})
    assert not board.publish("trial", {"us": 2.0})
    assert board.count() == 1
    assert board.find("trial") == {"us": 1.0}
