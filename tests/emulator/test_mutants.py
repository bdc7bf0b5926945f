# SPDX-License-Identifier: Apache-2.0
"""What the emulator finds: a linear_act kernel with one instruction taken out or changed."""

import multiprocessing
import os
import pathlib
import re
import sys

import pytest
from support.mutant import KERNEL, multiply

pytestmark = pytest.mark.torch

# One process imports PyTorch, and each mutant's is forked from it.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["support.mutant"])


def replace(pattern, by="", count=1):
    return lambda text: re.sub(pattern, by, text, count=count)


MUTANTS = {
    "none": (lambda text: text, "right"),
    "an mbarrier that is not initialised": (
        replace(r"mbarrier\.init[^;]*;"),
        "there is no mbarrier object here",
    ),
    "a consumer that does not release its tile": (
        replace(r"mbarrier\.arrive\.shared\.b64[^;]*;", count=0),
        "is deadlocked",
    ),
    "fewer bytes expected than come": (
        replace(r"(arrive\.expect_tx\.shared\.b64 [^;]*\+\d+\]), %r\d+;", r"\1, 64;"),
        "mbarrier.complete_tx: ",
    ),
    "products that are read before they are done": (
        replace(r"wgmma\.wait_group\.sync\.aligned\s+0;"),
        "wrong",
    ),
    "a tile that is released before it is multiplied": (
        replace(r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>63;"),
        "wrong",
    ),
    "sums that are read before all are there": (
        replace(r"(mbarrier\.try_wait[^;]*, )0(, \d+;)", r"\g<1>1\2"),
        "has ended",
    ),
    "fewer sums expected than others send": (
        replace(r"(arrive\.expect_tx\.shared\.b64 [^;]*\[%r\d+\]), %r\d+;", r"\1, 0;"),
        "has ended",
    ),
    "sums that nobody is told of": (
        replace(r"mbarrier\.arrive\.shared\.b64 [^;+]*;"),
        "is deadlocked",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for what is imported ahead
    paths = os.environ["TIERCEL_EMULATOR_PTX"].split(":")
    ptx = next(
        path.read_text() for folder in paths for path in pathlib.Path(folder).rglob(f"{KERNEL}.ptx")
    )
    mutate, expected = MUTANTS[name]
    mutant = mutate(ptx)
    assert (mutant == ptx) == (name == "none")
    (tmp_path / "mutant.ptx").write_text(mutant)
    given, answer = processes.Pipe(duplex=False)
    child = processes.Process(target=multiply, args=(str(tmp_path), answer))
    child.start()
    answer.close()
    assert expected in given.recv()
    child.join()
