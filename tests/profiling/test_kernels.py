# SPDX-License-Identifier: Apache-2.0
"""`tiercel kernels`: what the build wrote down of this wheel's kernels."""

import json
import subprocess
import sys

import pytest

from tiercel.cli import kernels, main


def listed(capsys, *words):
    assert main(["kernels", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_of_them(capsys):
    found = listed(capsys)
    assert found["arch"] == "sm_90a"
    assert {"linear", "routing"} <= {kernel["family"] for kernel in found["kernels"]}
    assert {kernel["language"] for kernel in found["kernels"]} == {"cuda", "cute"}
    for kernel in found["kernels"]:
        assert 0 < kernel["registers"] <= 255 and 0 <= kernel["shared"] <= 233472
        assert kernel["bytes"] > 0 and "tiercel::" not in kernel["name"]
    names = [(kernel["family"], kernel["name"]) for kernel in found["kernels"]]
    assert names == sorted(names) and len(names) == len(set(names))


def test_some_of_them(capsys):
    rounds = listed(capsys, "topk_softmax_by_rounds")["kernels"]
    assert len(rounds) == 12 and {kernel["family"] for kernel in rounds} == {"routing"}
    family = listed(capsys, "--family", "linear")["kernels"]
    assert all(kernel["language"] == "cute" and kernel["block"] for kernel in family)
    assert main(["kernels", "--family", "poetry"]) == 2
    assert "no family 'poetry'; there are " in capsys.readouterr().err


def test_tables(capsys):
    assert main(["kernels", "--family", "routing"]) == 0
    text = capsys.readouterr().out
    assert "routing:\n" in text and " kernels for sm_90a" in text
    assert main(["kernels", "--summary"]) == 0
    assert "family" in capsys.readouterr().out


def test_configurations_that_use_a_kernel():
    nested = {"schema": 1, "tiles": [{"kernel": "a_128x64", "stages": 3}, ["b"]]}
    assert kernels._words(nested) == {"a_128x64", "b"}
    entry = {"family": "f", "name": "a", "registers": 40, "shared": 1024, "bytes": 2048}
    entry |= {"block": [384, 1, 1], "cluster": [2, 1, 1], "configurations": ["E=64"]}
    assert "block 384, cluster 2  used by E=64" in kernels.table([entry])


def test_an_installation_without_the_list(monkeypatch, capsys):
    def missing():
        raise FileNotFoundError

    monkeypatch.setattr(kernels, "load", missing)
    assert main(["kernels"]) == 1
    assert "has no list of its kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extents", "text"), [([1, 1, 1], "1"), ([2, 1, 1], "2"), ([1, 2, 1], "1x2")]
)
def test_sizes(extents, text):
    assert kernels._size(extents) == text


def test_a_reader_that_has_seen_enough():
    command = f"'{sys.executable}' -m tiercel kernels --json | head -c 10"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("{") and done.stderr == ""
