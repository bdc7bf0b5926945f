# SPDX-License-Identifier: Apache-2.0
"""Winners in files, files in launchers: the nearest count, the hint, and what is no such file."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import few_tokens
from support.dlpack_tensor import ExchangeTensor

import tiercel.ops.moe.tune as moe
from tiercel import _C
from tiercel.cli import main
from tiercel.core import tuned
from tiercel.workbench.tune import ops

GPU = "NVIDIA Test"


def winner(us, **candidate):
    return {"candidate": candidate, "us": us, "spread_us": [us, us]}


def small(splits, us=5.0, tile_n=32):
    fixed = {"cluster": 1, "stages": 8, "epi_stages": 0, "group": 0}
    tile = {"tile_m": 64, "tile_n": tile_n, "pingpong": False, "split_k": True}
    return winner(us, **tile, **fixed, splits=splits)


@pytest.fixture
def results(tmp_path):
    def write(rows, n=256, k=1024, **more):
        problem = {"N": n, "K": k, "dtype": "bfloat16"}
        data = {"schema": 1, "op": "linear_act", "command": "tiercel tune linear", "gpu": GPU}
        data |= {"date": "2026-01-01T00:00:00Z", "driver": "1", "torch": "2", "commit": "abc"}
        data |= {"tiercel": "0.1.0", "trials": {}, "results": []}
        for tokens, best in rows.items():
            row = {"problem": problem, "tokens": tokens, "today_us": 6.0, "problems": {}}
            data["results"].append(row | {"best": best, "best_precompiled": best})
        path = tmp_path / "results.json"
        path.write_text(json.dumps(data | more))
        return path

    return write


def apply(path, folder):
    return main(["tune", "apply", str(path), "--to", str(folder)])


def plan(m, n=256, k=1024, device=0):
    def make(*shape):
        return ExchangeTensor(*shape, dtype="bfloat16", device=f"cuda:{device}")

    return _C.linear_act_plan(make(m, k), make(n, k), None, None, make(m, n), None, 3)


def test_a_file_says_where_it_is_from(results, tmp_path):
    assert apply(results({16: small(3), 8: small(2)}), tmp_path / "c") == 0
    name = "N=256-K=1024-dtype=bfloat16-device=NVIDIA_Test.json"
    data = json.loads((tmp_path / "c" / "linear_act" / name).read_text())
    assert list(data["configs"]) == ["8", "16"]
    entry = data["configs"]["16"]
    assert (entry["splits"], entry["us"], entry["before_us"]) == (3, 5.0, 6.0)
    (source,) = data["sources"]
    assert source["gpu"] == GPU and source["command"] == "tiercel tune linear"
    assert source["date"] == "2026-01-01T00:00:00Z" and source["driver"] == "1"


def test_a_second_sweep_adds_and_replaces(results, tmp_path):
    apply(results({8: small(2), 16: small(3)}), tmp_path)
    apply(results({16: small(4), 32: small(5)}, date="2026-02-02T00:00:00Z"), tmp_path)
    (path,) = (tmp_path / "linear_act").glob("*.json")
    data = json.loads(path.read_text())
    assert {t: c["splits"] for t, c in data["configs"].items()} == {"8": 2, "16": 4, "32": 5}
    dates = [data["sources"][c["source"]]["date"][:7] for c in data["configs"].values()]
    assert dates == ["2026-01", "2026-02", "2026-02"]


def test_the_nearest_count_is_used(results, tmp_path, monkeypatch):
    apply(results({4: small(7), 16: small(3), 64: small(5)}), tmp_path)
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))
    untuned = {m: plan(m) for m in (1, 2, 200)}
    tuned.load(0, GPU)
    try:
        nearest = {2: 7, 4: 7, 7: 7, 9: 3, 16: 3, 31: 3, 33: 5, 64: 5, 128: 5}
        assert {m: plan(m)["splits"] for m in nearest} == nearest
        # Far from anything tuned, the heuristic: a kernel for few rows does not suit many.
        assert {m: plan(m) for m in (1, 200)} == {m: untuned[m] for m in (1, 200)}
        assert plan(16, device=1) != plan(16) or plan(16, device=1)["splits"] != 3
        assert plan(16, k=2048)["splits"] == plan(16, k=2048, device=1)["splits"]
    finally:
        _C.linear_act_tuned(0, [("bfloat16", 256, 1024, [])])
    assert plan(2) == untuned[2]


def test_what_does_not_fit_this_m_is_left(results, tmp_path, monkeypatch):
    """A split that this K is too short for."""
    apply(results({8: small(4)}, n=512, k=128), tmp_path)
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))
    before = plan(8, 512, 128)
    tuned.load(0, GPU)
    assert plan(8, 512, 128) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(schema=2), "schema 2, this version reads 1"),
        (lambda d: d.update(op="softmax"), "is for softmax, and lies with linear_act's"),
        (lambda d: d["configs"]["8"].pop("splits"), "KeyError: 'splits'"),
        (lambda d: d["configs"]["8"].update(splits="2"), "`splits` must be a int, got '2'"),
        (lambda d: d["configs"]["8"].update(pingpong=0), "`pingpong` must be a bool, got 0"),
        (lambda d: d["configs"].update(x=d["configs"]["8"]), "invalid literal for int"),
    ],
)
def test_bad_files_are_said_and_left_out(results, tmp_path, monkeypatch, caplog, change, text):
    apply(results({8: small(2)}, n=768), tmp_path)
    (path,) = (tmp_path / "linear_act").glob("*.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))
    with caplog.at_level(logging.WARNING, "tiercel"):
        tuned.load(0, GPU)
    assert "a tuned configuration is left out" in caplog.text and text in caplog.text


def test_apply_does_not_write_over_what_it_cannot_read(results, tmp_path, capsys):
    apply(results({8: small(2)}), tmp_path)
    (path,) = (tmp_path / "linear_act").glob("*.json")
    path.write_text("{")
    assert apply(results({8: small(3)}), tmp_path) == 2
    assert "remove or mend it first" in capsys.readouterr().err
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no result of tiercel tune"),
        ("[]", "is no result of tiercel tune"),
        ('{"schema": 9, "op": "linear_act", "results": []}', "has schema 9, this version reads 1"),
        ('{"schema": 1, "op": "x", "results": []}', "is for x, which is no operator"),
        ('{"schema": 1, "op": "linear_act", "results": []}', "the results lack 'gpu'"),
    ],
)
def test_bad_results_are_named(text, said, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(text)
    assert apply(path, tmp_path) == 2
    assert said in capsys.readouterr().err
    assert main(["tune", "apply", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_no_winner_is_said(results, tmp_path, capsys):
    assert apply(results({8: None}), tmp_path) == 2
    assert "has no winner" in capsys.readouterr().err


def test_fused_moe_takes_the_nearest_count(tmp_path, monkeypatch, results):
    fields = {"block_size": 64, "up_tile": 64, "up_cluster": 1, "down_tile": 128}
    best = {t: winner(5.0, **fields, down_cluster=1) for t in (4, 16)}
    best[64] = winner(5.0, **(fields | {"block_size": 128, "up_tile": 256}), down_cluster=1)
    problem = {"E": 6, "k": 2, "H": 64, "I": 32, "dtype": "bfloat16"}
    path = results(best, op="fused_moe")
    data = json.loads(path.read_text())
    for row in data["results"]:
        row["problem"] = problem
    path.write_text(json.dumps(data))
    assert apply(path, tmp_path) == 0
    (file,) = (tmp_path / "fused_moe").glob("*.json")
    assert file.name == "E=6-k=2-H=64-I=32-dtype=bfloat16-device=NVIDIA_Test.json"
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))
    tuned.load(7, GPU)

    def find(tokens, device=7, experts=6, dtype="bfloat16"):
        return _C.fused_moe_config(device, (dtype, experts, 2, 64, 32), tokens)

    first = (64, 64, 1, 128, 1)
    assert {t: find(t) for t in (2, 4, 7, 9, 31)} == dict.fromkeys((2, 4, 7, 9, 31), first)
    assert find(33) == find(128) == (128, 256, 1, 128, 1)
    assert find(1) is find(129) is find(4, device=8) is None
    assert find(4, experts=5) is find(5, dtype="float16") is None


def test_bad_arguments_of_a_look_up():
    with pytest.raises(TypeError, match="expected 3 positional arguments, got 1"):
        _C.fused_moe_config(0)
    with pytest.raises(TypeError, match="expected a tuple, got list"):
        _C.fused_moe_config(0, ["bfloat16", 1, 2, 3, 4], 1)
    with pytest.raises(TypeError, match="expected a dtype and one to four sizes"):
        _C.fused_moe_config(0, ("bfloat16",), 1)
    with pytest.raises(ValueError, match="no dtype is named 'bf16'"):
        _C.fused_moe_config(0, ("bf16", 1, 2, 3, 4), 1)


HINT = """
from support.dlpack_tensor import ExchangeTensor as make
from tiercel import _C
from tiercel.core import tuned

def plan(n, k):
    def tensor(*shape):
        return make(*shape, dtype="bfloat16")
    _C.linear_act_plan(tensor(4, k), tensor(n, k), None, None, tensor(4, n), None, 0)
    _C.fused_moe_config(0, ("bfloat16", 6, 2, n, k), 4)

plan(512, 64)           # nothing is said before a device's files were read
tuned.load(0, "NVIDIA Test")
plan(256, 1024)         # has a file
for n in (640, 768, 640):
    plan(n, 64)
"""


def test_a_problem_without_a_file_is_hinted_at_once(results, tmp_path):
    apply(results({4: small(7)}), tmp_path)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    env = {"TIERCEL_LOG": "info", "TIERCEL_CONFIGS": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", HINT]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (moe, line) = sorted(result.stderr.splitlines(), key=lambda text: "linear_act" in text)
    assert "fused_moe: nothing is tuned for E=6, k=2, H=256, I=1024, bfloat16 on GPU 0" in moe
    assert "`tiercel tune moe --problem E=6,k=2,H=256,I=1024 --dtype bfloat16`" in moe
    assert "linear_act: nothing is tuned for N=640, K=64, bfloat16 on GPU 0" in line
    assert "`tiercel tune linear --problem N=640,K=64 --dtype bfloat16`" in line


def test_shipped_files_can_be_launched():
    """Every file of the package is read, is named as what it holds, and its kernels are here."""
    tunables = {tunable.op: tunable for tunable in ops.load().values()}
    paths = sorted(path for op in tuned.OPS for path in (tuned.FOLDER / op).glob("*.json"))
    assert paths
    for path in paths:
        op = path.parent.name
        dtype, sizes, entries = tuned.read(path, op)
        data = json.loads(path.read_text())
        assert path.name == tuned.file_name(op, sizes, dtype, data["device"])
        assert tunables[op].op == op
        for tokens, fields in entries:
            assert launchable(op, dtype, sizes, tokens, fields)
        for config in data["configs"].values():
            source = data["sources"][config["source"]]
            assert source["gpu"] == data["device"] and source["date"] and source["command"]


def launchable(op, dtype, sizes, tokens, fields):
    if op == "fused_moe" and not any(fields):  # in one launch
        return _C.fused_moe_few_tokens_plan(*few_tokens.arguments(tokens, *sizes).values())
    if op == "fused_moe":  # its launches are test_tune_candidates'
        up, down = (moe.tiles(fields[0], half, dtype) for half in ("up", "down"))
        return fields[1:3] in up and fields[3:] in down
    n, k = sizes

    def make(*shape, dtype=dtype):
        return ExchangeTensor(*shape, dtype=dtype)

    if op == "linear_act":
        return _C.linear_act_plan(
            make(tokens, k), make(n, k), None, None, make(tokens, n), None, 3, fields
        )
    x, out = (make(tokens, columns, dtype="bfloat16") for columns in (k, n))
    scale = make(n, k // 16, dtype="float8_e4m3fn")
    return _C.nvfp4_linear_plan(x, make(n, k // 2), scale, None, out, fields)
