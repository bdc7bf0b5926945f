# SPDX-License-Identifier: Apache-2.0
"""mbarrier objects: phases, bytes, tokens, and every misuse."""

import pytest
import torch
from support.tensor_probe import call, u64


class Barrier:
    def __init__(self, count=None):
        self.state = torch.zeros(1, dtype=torch.int64)
        if count is not None:
            self("init", count)

    def __call__(self, what, argument=0):
        out = torch.zeros(1, dtype=torch.int64)
        call("probe_mbarrier", what, self.state, u64(argument), out)
        return out.item() % 2**64


def test_phases_by_parity():
    barrier = Barrier(3)
    for phase in range(5):
        parity = phase % 2
        assert barrier("test_wait.parity", parity) == 0
        assert barrier("test_wait.parity", 1 - parity) == 1
        barrier("arrive", 1)
        assert barrier("test_wait.parity", parity) == 0
        barrier("arrive", 2)
        assert barrier("test_wait.parity", parity) == 1


def test_tokens():
    barrier = Barrier(2)
    first = barrier("arrive", 1)
    assert barrier("pending_count", first) == 2
    assert barrier("test_wait", first) == 0
    second = barrier("arrive", 1)
    assert barrier("pending_count", second) == 1
    assert barrier("test_wait", first) == barrier("test_wait", second) == 1
    third = barrier("arrive", 1)
    assert barrier("test_wait", third) == 0


@pytest.mark.parametrize("bytes_first", [False, True])
def test_bytes(bytes_first):
    barrier = Barrier(1)
    if bytes_first:
        barrier("complete_tx", 1000)
        assert barrier("test_wait.parity", 0) == 0
    barrier("expect_tx", 4096)
    barrier("arrive", 1)
    assert barrier("test_wait.parity", 0) == 0
    if not bytes_first:
        barrier("complete_tx", 1000)
    assert barrier("test_wait.parity", 0) == 0
    barrier("complete_tx", 3096)
    assert barrier("test_wait.parity", 0) == 1
    barrier("arrive", 1)  # the next phase expects no bytes
    assert barrier("test_wait.parity", 1) == 1


def test_those_who_leave():
    barrier = Barrier(3)
    barrier("arrive_drop", 1)
    barrier("arrive", 2)
    barrier("arrive", 2)
    assert barrier("test_wait.parity", 1) == 1


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([("arrive", 1)], "no mbarrier object here"),
        ([("test_wait.parity", 0)], "no mbarrier object here"),
        ([("complete_tx", 16)], "no mbarrier object here"),
        ([("init", 1), ("inval", 0), ("arrive", 1)], "no mbarrier object here"),
        ([("init", 0)], "the count is 0, expected 1 to 1048575"),
        ([("init", 2**20)], "the count is 1048576"),
        ([("init", 2), ("arrive", 3)], "3 arrive where the phase expects 2"),
        ([("init", 1), ("expect_tx", 16), ("arrive", 1), ("arrive", 1)], "0 are still to come"),
        ([("init", 1), ("expect_tx", 2**20 - 1), ("expect_tx", 1)], "are more than 1048575"),
        ([("init", 1), ("expect_tx", 16), ("arrive", 1), ("complete_tx", 32)], "16 are expected"),
        ([("init", 1), ("arrive.noComplete", 1)], "completes the phase"),
        ([("init", 1), ("test_wait.parity", 2)], "the parity is 2"),
        ([("init", 1), ("test_wait", 12345)], "is no state"),
    ],
)
def test_misuse(steps, wrong):
    barrier = Barrier()
    for step in steps[:-1]:
        barrier(*step)
    with pytest.raises(ValueError, match=wrong):
        barrier(*steps[-1])
