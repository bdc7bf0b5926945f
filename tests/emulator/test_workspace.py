# SPDX-License-Identifier: Apache-2.0
"""The memory that bindings keep for a stream, when several threads launch on it."""

import threading

import pytest
import torch
from support.dlpack_tensor import as_cuda
from support.emulator import driver, kernels, registered
from support.paged import assert_close, make, wide
from support.paged_emulator import arguments

import tiercel

pytestmark = pytest.mark.torch


@pytest.fixture
def allocations():
    """Workspaces that a call has allocated; they stay, as the stream keeps the last one."""
    made = []

    def empty(size, dtype, device):
        tensor = torch.full(size, torch.nan, dtype=dtype)
        driver.emulator_register(tensor.data_ptr(), 4 * tensor.numel(), b"workspace")
        made.append(tensor)
        return as_cuda(tensor, tensor.data_ptr())

    kernels.set_allocation_hooks(empty, None, None, torch.float32)
    yield made
    kernels.set_allocation_hooks(torch.empty, None, None, torch.float32)


def call(given):
    """A launch of two kernels, the second of which reads what the first has left."""
    values = arguments(given)
    plan = kernels.paged_attention_plan(*values)
    assert plan["combine"] != "none"
    with registered(*(x for x in values if isinstance(x, torch.Tensor))):
        described = [as_cuda(x, x.data_ptr() if hasattr(x, "data_ptr") else 0) for x in values]
        described[0].device = "cuda"
        kernels.paged_attention(*described)
    return values[10:12]


def check(given, results):
    assert_close(*results, *tiercel.ref.paged_attention(*wide(given), return_lse=True))


def test_a_stream_keeps_one_and_threads_do_not_share_it(allocations):
    given, other = (make([(40, 2300)], seed=seed) for seed in (1, 2))
    check(given, call(given))
    check(other, call(other))
    assert len(allocations) == 1  # it is kept
    results = []
    thread = threading.Thread(target=lambda: results.append([call(given) for _ in range(3)]))
    thread.start()
    mine = []
    while thread.is_alive():
        mine.append(call(other))
    thread.join()
    assert len(allocations) > 1
    for found in results[0]:
        check(given, found)
    for found in mine:
        check(other, found)
    before = len(allocations)
    call(given)
    assert len(allocations) == before
