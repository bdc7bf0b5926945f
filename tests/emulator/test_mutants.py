# SPDX-License-Identifier: Apache-2.0
"""What the emulator finds: a linear_act kernel with one instruction taken out or changed."""

import multiprocessing
import os
import pathlib
import re

import pytest
import torch
from support.emulator import kernels, options

pytestmark = pytest.mark.torch

# A ring of TMA tiles, wgmma, and a sum over a cluster's shared memory.
KERNEL = "linear_act_bf16_none_64x32_split_k"
M, N, K = 20, 72, 8200

CLUSTER_BARRIER = r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;"


def replace(pattern, by="", count=1):
    return lambda text: re.sub(pattern, by, text, count=count)


def replace_last(pattern):
    return lambda text: re.sub(rf"(.*){pattern}", r"\1", text, flags=re.DOTALL)


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
        replace(r"(arrive\.expect_tx\.shared\.b64 [^;]*), %r\d+;", r"\1, 64;"),
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
    "sums that are read before all are there": (replace(CLUSTER_BARRIER), "wrong"),
    "a block that ends while others read its sums": (replace_last(CLUSTER_BARRIER), "has ended"),
}


def multiply(folder, answer):
    os.environ["TIERCEL_EMULATOR_PTX"] = str(folder)
    torch.manual_seed(0)
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    truth = x.float() @ w.float().T
    result = "right"
    for seed in range(4):
        y = torch.zeros(M, N).bfloat16()
        try:
            assert kernels.linear_act_plan(x, w, None, y, 0)["kernel"] == KERNEL
            with options(seed=seed):
                kernels.linear_act(x, w, None, y, 0)
        except Exception as error:
            result = str(error)
            break
        if not ((y - truth).abs() <= 0.004 * truth.abs() + 0.01).all():
            result = "wrong"
            break
    answer.send(result)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name, tmp_path):
    paths = os.environ["TIERCEL_EMULATOR_PTX"].split(":")
    ptx = next(
        path.read_text() for folder in paths for path in pathlib.Path(folder).rglob(f"{KERNEL}.ptx")
    )
    mutate, expected = MUTANTS[name]
    mutant = mutate(ptx)
    assert (mutant == ptx) == (name == "none")
    (tmp_path / "mutant.ptx").write_text(mutant)
    # PTX is read once in a process. The driver has not been initialised in this one.
    fork = multiprocessing.get_context("fork")
    given, answer = fork.Pipe(duplex=False)
    child = fork.Process(target=multiply, args=(tmp_path, answer))
    child.start()
    answer.close()
    assert expected in given.recv()
    child.join()
