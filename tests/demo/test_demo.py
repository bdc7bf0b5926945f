# SPDX-License-Identifier: Apache-2.0
"""`tiercel demo`: every operator has its stop, right or wrong, on whatever machine."""

import itertools
import sys
import time
import types

import pytest
import torch

import tiercel
from tiercel.cli import demo, main
from tiercel.plugins.contracts import CONTRACTS
from tiercel.workbench.demo import plot, tour
from tiercel.workbench.smoke import measure


def test_a_quick_tour_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "demo.png"
    assert main(["demo", "--quick", "--device", "cpu", "--plot", str(path)]) == 0
    text = capsys.readouterr().out
    for op in CONTRACTS:
        assert op in text  # in its line, or among those that there was no time for
    assert "WRONG" not in text and "0 of " in text
    assert "these are on cpu" in text and "tiercel doctor" in text
    drawn = "matplotlib" in sys.modules
    assert path.exists() == drawn and ("wrote" in text or "tiercel[bench]" in text)


def test_the_quick_tour_shows_every_operator():
    """In a few seconds of one processor's time, and PyTorch has its threads again after it."""
    before, started = torch.get_num_threads(), time.process_time()
    stops = list(tour.tour("cpu", float("inf"), quick=True))
    assert time.process_time() - started < 15 and torch.get_num_threads() == before
    assert [stop.op for stop in stops] == list(CONTRACTS)
    assert all(
        stop.right and stop.cost and "of PyTorch alone" in tour.as_line(stop) for stop in stops
    )
    assert demo._SECONDS >= 60.0


def test_what_is_left_is_said_with_the_time_that_was_up(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "_SECONDS", 0.0)
    monkeypatch.setattr(tour, "_stop", lambda contract, *rest: stop(contract.op))
    ticks = itertools.count()
    real = tour.tour
    monkeypatch.setattr(
        tour, "tour", lambda *a, **k: real(*a, **k, now=lambda: float(next(ticks) > 2))
    )
    main(["demo", "--quick", "--device", "cpu", "--plot", str(tmp_path / "x.png")])
    assert "the 0 seconds were up before: " in capsys.readouterr().out


def test_a_quick_time_is_short(monkeypatch):
    asked = []

    def race(*args, rounds, round_ms):
        asked.append(rounds * round_ms)
        return 1.0, 2.0

    monkeypatch.setattr(measure, "race_plain", race)
    contract = CONTRACTS["silu"]
    assert tour._stop(contract, "cpu", True).cost == 0.5 and tour._stop(contract, "cpu", False)
    assert asked[0] < 20 <= asked[1]


def test_one_that_fails_while_it_is_timed_does_not_end_the_tour(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(measure, "race_plain", fail)
    made = tour._stop(CONTRACTS["silu"], "cpu", True)
    assert not made.right and made.wrong == "RuntimeError while it was timed: out of memory"


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert (
        said == "tiercel demo: --device cuda: PyTorch sees no GPU here; tiercel doctor says why\n"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none/x.png", "there is no folder"),
        ("folder.png", "is a folder"),
        ("x", "must end in one of .png, .svg"),
        ("x.exe", "must end in one of .png, .svg"),
        ("file/x.png", "there is no folder"),
    ],
)
def test_a_bad_place_for_the_picture_is_said_first(monkeypatch, capsys, tmp_path, name, text):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tour, "tour", lambda *args, **kwargs: pytest.fail("the tour began"))
    assert main(["demo", "--device", "cpu", "--plot", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tiercel demo: --plot") and text in said and said.count("\n") == 1


def test_a_disk_that_does_not_take_the_picture(monkeypatch, capsys, tmp_path):
    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(plot, "draw", fail)
    monkeypatch.setattr(tour, "tour", lambda *args, **kwargs: iter([stop("a")]))
    assert main(["demo", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 0
    assert "no picture: No space left" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    assert main(["demo", "--quick", "--plot", str(tmp_path / "demo.png")]) == 0
    assert "times PyTorch's" in capsys.readouterr().out


def test_a_wrong_answer_is_said_and_counts(monkeypatch, capsys, tmp_path):
    wrong = {"status": "wrong", "share": 0.5, "reason": "1 of 2 rows of `y` are wrong"}
    monkeypatch.setattr(measure, "try_case", lambda *args: wrong)
    assert main(["demo", "--quick", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 1
    assert "WRONG  1 of 2 rows of `y` are wrong" in capsys.readouterr().out


def test_it_ends_when_the_minute_is_up(monkeypatch):
    monkeypatch.setattr(tour, "_stop", lambda contract, *rest: contract.op.upper())
    times = iter([0.0, 1.0, *[100.0] * 99])
    stops = list(tour.tour("cpu", 60.0, now=lambda: next(times)))
    ops = list(CONTRACTS)
    assert stops == [ops[0].upper(), *ops[1:]]


def stop(op, backend="sm90", ms=0.01, torch_ms=0.02):
    return tour.Stop(op, "M=1", backend, "", True, None, ms, torch_ms)


def test_a_speed_up_is_of_a_kernel_only():
    assert stop("a").speedup == 2.0 and stop("a", "ref").speedup is None
    assert "2.00 times PyTorch's 0.020 ms" in tour.as_line(stop("a"))


def test_the_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot.draw([stop("a")], tmp_path / "x.png", "title")


def test_the_picture(monkeypatch, tmp_path):
    calls = {}

    class Axes:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.setdefault(name, args)

    figure = types.SimpleNamespace(tight_layout=lambda: None, savefig=lambda p: p.touch())
    pyplot = types.ModuleType("matplotlib.pyplot")
    pyplot.subplots = lambda **kwargs: (figure, Axes())
    pyplot.close = lambda figure: None
    matplotlib = types.ModuleType("matplotlib")
    matplotlib.use, matplotlib.pyplot = lambda name: None, pyplot
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    path = tmp_path / "x.png"
    assert plot.draw([stop("a"), stop("b", "ref")], path, "title") and path.exists()
    assert calls["barh"] == (["a"], [2.0])  # what is not accelerated has no bar beside it
    calls.clear()
    assert plot.draw([stop("b", "ref")], path, "title")
    assert calls["barh"] == (["b"], [0.01])


def test_without_torch(monkeypatch, capsys):
    monkeypatch.delattr(tiercel, "_needs_torch", raising=False)
    monkeypatch.setitem(sys.modules, "tiercel._needs_torch", None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("tiercel demo: ")
