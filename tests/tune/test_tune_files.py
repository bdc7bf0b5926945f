# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations and results from elsewhere: a bad one is said and left, and leaves nothing
outside of its folder."""

import argparse
import json
import logging

import pytest
from support import mutate

from tiercel import _C
from tiercel.core import tuned
from tiercel.workbench.tune import command

GPU = "NVIDIA Test"
LABEL = tuned.device_label(GPU)
NAMES = {
    "linear_act": {"N": 256, "K": 1024, "dtype": "bfloat16"},
    "nvfp4_linear": {"N": 256, "K": 1024, "dtype": "float4_e2m1fn_x2"},
    "fused_moe": {"E": 6, "k": 2, "H": 64, "I": 32, "dtype": "bfloat16"},
    "rms_norm_backward": {"N": 256, "dtype": "bfloat16"},
    "layer_norm_backward": {"N": 256, "dtype": "bfloat16"},
}
_NORM = {"vectors": 2, "rows": 1, "cluster": 1, "threads": 128, "stages": 2}
_NORM |= {"prefetch_rows": 0, "even": False, "pairs": False}
FIELDS = {
    "linear_act": {"tile_m": 64, "tile_n": 32, "pingpong": False, "split_k": True}
    | {"splits": 3, "group": 0},
    "nvfp4_linear": {"cluster": 1, "tiles": 2, "parts": 2, "stages": 4},
    "fused_moe": {"block_size": 64, "up_tile": 64, "up_cluster": 1}
    | {"down_tile": 128, "down_cluster": 1},
    "rms_norm_backward": _NORM,
    "layer_norm_backward": _NORM,
}


def a_file(op, **problem):
    entry = FIELDS[op] | {"us": 1.0, "before_us": 2.0, "source": 0}
    head = {"schema": 1, "op": op, "problem": NAMES[op] | problem, "device": GPU}
    return head | {"sources": [{"gpu": GPU}], "configs": {"16": entry}}


def results(op="linear_act", gpu=GPU, tokens=16, **problem):
    best = {"candidate": dict(FIELDS[op]), "us": 5.0, "spread_us": [5.0, 5.0]}
    row = {"problem": NAMES[op] | problem, "tokens": tokens, "today_us": 6.0, "problems": {}}
    data = {"schema": 1, "op": op, "command": "tiercel tune", "gpu": gpu, "driver": "1"}
    data |= {"date": "2026-01-01T00:00:00Z", "torch": "2", "commit": "abc", "tiercel": "0.1.0"}
    return data | {"trials": {}, "results": [row | {"best": best, "best_precompiled": best}]}


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """TIERCEL_CONFIGS, and (file name, text) -> what loading it says."""
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "none")

    def load(text, caplog, op="linear_act", name=f"a-device={LABEL}.json"):
        (tmp_path / op).mkdir(exist_ok=True)
        mutate.write(tmp_path / op / name, text)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tiercel"):
            tuned.load(0, GPU)
        return caplog.text

    return load


@pytest.fixture(autouse=True)
def _nothing_is_tuned():
    yield
    for op, entry in tuned.OPS.items():
        names = NAMES[op]
        entry.set(0, [(names["dtype"], *(names[size] for size in entry.sizes), [])])


@pytest.mark.parametrize(
    ("op", "problem", "text"),
    [
        ("linear_act", {"dtype": "bf16"}, "`dtype` must be one of bfloat16,"),
        ("linear_act", {"dtype": ["bfloat16"]}, "`dtype` must be one of"),
        ("linear_act", {"K": 2**63}, "`K` must be a whole number from 1 to 2**40"),
        ("linear_act", {"N": 0}, "`N` must be a whole number"),
        ("linear_act", {"N": True}, "`N` must be a whole number"),
        ("linear_act", {"N": "256"}, "`N` must be a whole number"),
        ("linear_act", {"N": float("inf")}, "`N` must be a whole number"),
        ("fused_moe", {"E": 10**400}, "`E` must be a whole number"),
        ("fused_moe", {"dtype": "x\x1b[2J"}, "got 'x\\x1b[2J'"),
    ],
)
def test_a_problem_that_no_launcher_takes_is_said_and_left(configs, caplog, op, problem, text):
    said = configs(json.dumps(a_file(op, **problem)), caplog, op)
    assert "a tuned configuration is left out" in said and text in said and "\x1b" not in said


@pytest.mark.parametrize("text", ["[" * 100_000, "NaN", "\udc80", '{"schema": ' + "9" * 5000 + "}"])
def test_text_that_json_does_not_take_is_said_and_left(configs, caplog, text):
    assert "a tuned configuration is left out" in configs(text, caplog)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"splits": 2**31}, "`splits` must be from 0 to 4096"),
        ({"splits": -1}, "`splits` must be from 0 to 4096, got -1"),
        ({"tile_m": 64.0}, "`tile_m` must be a int"),
    ],
)
def test_a_field_that_no_launcher_takes(configs, caplog, change, text):
    data = a_file("linear_act")
    data["configs"]["16"] |= change
    assert text in configs(json.dumps(data), caplog)
    data["configs"] = {str(2**62): FIELDS["linear_act"]}
    assert "a number of tokens must be a whole number" in configs(json.dumps(data), caplog)


def test_the_good_files_beside_it_count(configs, caplog):
    """Whatever a launcher itself may refuse: each file is handed over on its own."""
    label = tuned.device_label(GPU)
    configs(json.dumps(a_file("fused_moe")), caplog, "fused_moe", f"z-device={label}.json")
    said = configs("{", caplog, "fused_moe", f"a-device={label}.json")
    assert "a-device" in said and "z-device" not in said
    found = _C.fused_moe_config(0, ("bfloat16", 6, 2, 64, 32), 16)
    assert found == tuple(FIELDS["fused_moe"].values())


def test_a_launcher_that_refuses_a_file_keeps_no_other(configs, caplog, monkeypatch):
    import dataclasses

    handed = []

    def pick(device, problems):
        if problems and problems[0][1] == 256:
            raise OverflowError("no")
        handed.extend(problems)

    monkeypatch.setitem(
        tuned.OPS, "linear_act", dataclasses.replace(tuned.OPS["linear_act"], set=pick)
    )
    label = tuned.device_label(GPU)
    name = f"z-device={label}.json"
    configs(json.dumps(a_file("linear_act", N=512)), caplog, name=name)
    said = configs(json.dumps(a_file("linear_act")), caplog)
    assert "a-device" in said and handed[-1][1] == 512


@pytest.mark.parametrize("op", NAMES)
def test_fuzz_nothing_in_a_file_makes_an_operator_raise(configs, caplog, op):
    kept = 0
    for text in mutate.texts(a_file(op), 400, seed=len(op)):
        said = configs(text, caplog, op)
        kept += "is left out" not in said
        assert "\x1b" not in said
    assert 0 < kept < 400


@pytest.mark.parametrize(
    "path", ["a folder", "a pattern", "a file for a folder", "a folder for a file"]
)
def test_odd_places(tmp_path, monkeypatch, caplog, path):
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path / "x"))
    label = tuned.device_label(GPU)
    if path == "a file for a folder":
        (tmp_path / "x").mkdir()
        (tmp_path / "x/linear_act").write_text("")
    if path == "a folder for a file":
        (tmp_path / f"x/linear_act/a-device={label}.json").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "tiercel"):
        tuned.load(0, "NVIDIA [*] Test" if path == "a pattern" else GPU)
    assert ("is left out" in caplog.text) == (path == "a folder for a file")


def apply(path, folder):
    return command.main(command.apply, argparse.Namespace(results=path, to=folder))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "made",
    [
        results(dtype="../../../../victim/owned"),
        results(dtype="bf16"),
        results(dtype=3),
        results(N=2**63),
        results(tokens=0),
        results(tokens="16"),
        results(tokens=True),
        results(gpu="x" * 300),
        results(gpu=None),
        results() | {"command": {}},
    ],
)
def test_apply_writes_nothing_that_no_operator_could_read(tmp_path, capsys, made):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(made))
    assert apply(path, tmp_path / "to") == 2
    error = capsys.readouterr().err
    assert error.startswith("tiercel tune: ") and error.count("\n") == 1
    assert files(tmp_path) == ["results.json"]


@pytest.mark.parametrize("gpu", ["../../victim", "a/b\\c", "x\0y", "..", "NVIDIA *", "H\u0130\n"])
def test_a_device_leads_nowhere_else(tmp_path, gpu):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(gpu=gpu)))
    assert apply(path, tmp_path / "to") == 0
    (made,) = set(files(tmp_path)) - {"results.json"}
    label = tuned.device_label(gpu)
    assert made == f"to/linear_act/N=256-K=1024-dtype=bfloat16-device={label}.json"
    assert tuned.device_label("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3"


def test_a_bad_problem_leaves_no_half_of_the_others(tmp_path, capsys):
    both, bad = results(), results(dtype="no")
    both["results"] += bad["results"]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(both))
    assert apply(path, tmp_path / "to") == 2 and files(tmp_path) == ["results.json"]


@pytest.mark.parametrize("op", NAMES)
def test_fuzz_apply_says_it_in_a_line_or_writes_what_is_read(tmp_path, capsys, op):
    folder, wrote = tmp_path / "deep" / "to", 0
    for text in mutate.texts(results(op), 300, seed=len(op)):
        path = mutate.write(tmp_path / "results.json", text)
        status = apply(path, folder)
        error = capsys.readouterr().err
        assert status in (0, 2) and error.count("\n") == (status == 2) and "\x1b" not in error
        wrote += status == 0
        for name in files(folder) if folder.exists() else ():
            tuned.read(folder / name, op)
            (folder / name).unlink()
    assert wrote and files(tmp_path) == ["results.json"]


def test_a_damaged_file_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()))
    assert apply(path, tmp_path) == 0
    (made,) = (tmp_path / "linear_act").glob("*.json")
    good = json.loads(made.read_text())
    for change in ({"sources": []}, {"sources": None}, {"configs": {"16": FIELDS["linear_act"]}}):
        made.write_text(json.dumps(good | change))
        assert apply(path, tmp_path) == 2
        assert "remove or mend it first" in capsys.readouterr().err
