# SPDX-License-Identifier: Apache-2.0
"""No call waits for the GPU: each returns while an earlier kernel still runs."""

import re
from collections.abc import Callable

import pytest
import torch
from support.every_op import calls, has_gradient, public_ops

pytestmark = pytest.mark.torch

WARM_UP = 3
SLEEP_SECONDS = 0.2
# The backward's kernels do not take these cases: torch's own operations stand in, and read lengths.
BY_REFERENCE = re.compile(r"gated_delta_rule .*( K=64 | channels)")


def test_every_public_operator_has_calls() -> None:
    names = public_ops()
    assert {"attention", "fused_mlp", "kv_cache_write", "rms_norm", "silu"} <= set(names)
    for name in names:
        assert next(calls(name, "cpu", "ref"), None), f"{name} has no call to try"


@pytest.mark.parametrize("name", public_ops())
def test_the_calls_are_right_and_reach_the_gradient(name: str) -> None:
    reached = []
    for call in calls(name, "cpu", "ref"):
        assert call.forward()
        backward = call.backward()
        reached.append(backward is not None)
        if backward:
            assert any(grad is not None for grad in backward())
    assert any(reached) == has_gradient(name)


def _sleep_cycles() -> int:
    """Of a kernel that keeps the GPU busy for as long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    trial = 20_000_000
    torch.cuda._sleep(trial)  # the first one is loaded
    start.record()
    torch.cuda._sleep(trial)
    end.record()
    end.synchronize()
    return int(trial * SLEEP_SECONDS * 1e3 / start.elapsed_time(end))


@pytest.fixture(scope="module")
def waits() -> Callable[[Callable[[], object]], bool]:
    """Whether a function returns only when what was launched before it has ended."""
    cycles = _sleep_cycles()

    def waits(function: Callable[[], object]) -> bool:
        busy = torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        busy.record()
        kept = function()
        waited = busy.query()
        torch.cuda.synchronize()
        del kept
        return waited

    return waits


@pytest.mark.gpu
def test_a_wait_is_seen(waits) -> None:
    x = torch.ones(1, device="cuda")
    x + 1  # loading a kernel waits for the GPU
    assert waits(x.item) and waits(torch.cuda.synchronize)
    assert not waits(lambda: x + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", public_ops())
def test_a_forward_returns_at_once(name: str, waits, no_fallback) -> None:
    tried = 0
    for call in calls(name, "cuda", "sm90"):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                for _ in range(WARM_UP):
                    call.forward()
                assert not waits(call.forward), f"{call.title}: it waited, {gradients=}"
        tried += 1
    assert tried, f"sm90 takes none of the cases of {name}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in public_ops() if has_gradient(name)])
def test_a_backward_returns_at_once(name: str, waits, no_fallback) -> None:
    waited, tried = [], 0
    for call in calls(name, "cuda", "sm90"):
        if BY_REFERENCE.match(call.title):
            continue
        for _ in range(WARM_UP):
            if backward := call.backward():
                backward()
        if backward := call.backward():
            tried += 1
            if waits(backward):
                waited.append(call.title)
    assert tried, f"no case of {name} has a gradient"
    assert not waited, f"the backward waited for the GPU: {waited}"
