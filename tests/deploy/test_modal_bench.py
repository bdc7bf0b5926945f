# SPDX-License-Identifier: Apache-2.0
"""ci/modal_bench.py with a stand-in for Modal's client: what it rents, says, and brings back."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

PATH = Path(os.environ.get("MODAL_BENCH", Path(__file__).parents[2] / "ci" / "modal_bench.py"))
RECORDS = '{"op": "topk_softmax"}\n'


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("modal_bench", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Process:
    def __init__(self, out="", err="", status=0, error=None):
        self.out, self.status, self.error = out, status, error
        self.stdout = self
        self.stderr = types.SimpleNamespace(read=lambda: err)

    def __iter__(self):
        if self.error:
            raise self.error
        return iter(self.out.splitlines(keepends=True))

    def read(self):
        return self.out

    def wait(self):
        return self.status


@pytest.fixture
def modal(monkeypatch):
    """The client; `modal.answers` says what a command does there."""
    made = types.ModuleType("modal")
    made.commands, made.layers, made.rented, made.ended = [], [], [], []
    made.answers = {"bench": Process("[1/1] topk_softmax\n"), "cat": Process(RECORDS)}

    class Image:
        def __getattr__(self, name):
            return lambda *args, **kwargs: made.layers.append((name, args, kwargs)) or self

    class Sandbox:
        @staticmethod
        def create(**kwargs):
            made.rented.append(kwargs)
            return Sandbox()

        def exec(self, *command):
            made.commands.append(command)
            kind = next((k for k in made.answers if k in command), None)
            return made.answers.get(kind, Process())

        def terminate(self):
            made.ended.append(True)

    made.Image, made.Sandbox = Image(), Sandbox
    made.App = types.SimpleNamespace(lookup=lambda name, create_if_missing: name)
    monkeypatch.setitem(sys.modules, "modal", made)
    return made


@pytest.fixture
def wheels(tmp_path):
    (tmp_path / "tiercel-0.1.0-cp311-cp311-x.whl").touch()
    (tmp_path / "tiercel-0.1.0-cp312-cp312-x.whl").touch()
    return tmp_path


@pytest.fixture
def run(program, wheels, tmp_path):
    def call(*words, rate="3.60"):
        out = tmp_path / "results.jsonl"
        return program.main(["--rate", rate, "--wheel", str(wheels), "--out", str(out), *words])

    return call


def test_what_is_rented_run_and_brought_back(run, modal, tmp_path, capsys):
    words = ["--suite", "full", "--op", "topk_softmax", "--minutes", "10"]
    assert run(*words, "--packages", "quack-kernels", "--yes") == 0
    (rented,) = modal.rented
    assert (rented["gpu"], rented["timeout"]) == ("H200", 600)
    installed = next(args for name, args, _ in modal.layers if name == "pip_install")
    assert "quack-kernels" in installed and "torch>=2.9" in installed
    added = next(args for name, args, _ in modal.layers if name == "add_local_file")
    assert "cp312" in added[0]
    bench = next(command for command in modal.commands if "bench" in command)
    text = " ".join(bench)
    assert "--suite full" in text and "--op topk_softmax" in text and "--peers all" in text
    assert (tmp_path / "results.jsonl").read_text() == RECORDS
    assert modal.ended == [True]
    assert "[1/1] topk_softmax" in capsys.readouterr().out


def test_cost_and_time_limit_are_said_before_it_starts(run, modal, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(capsys.readouterr().out) or "n")
    assert run("--minutes", "15") == 1
    assert "at most 15 minutes: at most $0.90 for the GPU" in asked[0]
    assert modal.rented == [] and modal.layers == []


def test_nobody_to_ask(run, modal, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: False))
    assert run() == 2
    assert "--yes starts it" in capsys.readouterr().err and modal.rented == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [(Process(status=1, err="no GPU"), 1), (Process(error=KeyboardInterrupt()), 130)],
)
def test_the_machine_always_ends(run, modal, answer, status):
    modal.answers["bench"] = answer
    assert run("--yes") == status
    assert modal.ended == [True]


def test_a_failed_run_keeps_the_records_that_it_had(run, modal, tmp_path):
    modal.answers["bench"] = Process(status=1)
    assert run("--yes") == 1
    assert (tmp_path / "results.jsonl").read_text() == RECORDS


def test_without_the_client(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "modal", None)
    assert run("--yes") == 2
    assert "pip install modal" in capsys.readouterr().err


def test_without_a_wheel(program, tmp_path, capsys):
    assert program.main(["--rate", "1", "--wheel", str(tmp_path)]) == 2
    assert "no cp312 wheel" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--rate", "0"], ["--rate", "1", "--minutes", "0"]])
def test_a_price_is_needed(program, words):
    with pytest.raises(SystemExit):
        program.main(words)
