# SPDX-License-Identifier: Apache-2.0
"""How topk_softmax launches: streams, graphs, first calls, threads, processes, several GPUs."""

import sys

import pytest
import torch
from support.truth import assert_right

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


# What every script below starts with; `check` compares with ref on the CPU.
START = """
import os, threading, warnings
import torch, tiercel
warnings.simplefilter("error", tiercel.FallbackWarning)
def check(scores, result):
    weights, indices = tiercel.ref.topk_softmax(scores.cpu(), result[0].shape[1])
    assert torch.equal(result[1].cpu(), indices)
    torch.testing.assert_close(result[0].cpu(), weights, rtol=1e-5, atol=1e-7)
"""


def test_runs_on_the_current_stream():
    scores = torch.zeros(1000, 64, device="cuda")
    fresh = torch.randn(1000, 64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the default stream would read zeros meanwhile
        scores.copy_(fresh)
        result = tiercel.topk_softmax(scores, 4)
    stream.synchronize()
    assert_right(result, fresh, 4)


def test_never_synchronises():
    scores = torch.randn(100, 64, device="cuda")
    tiercel.topk_softmax(scores, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tiercel.topk_softmax(scores, 4)
        torch.ops.tiercel.topk_softmax(scores, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [7, 300, 5000])
def test_graph_replay(rows):
    scores = torch.randn(rows, 128, device="cuda")
    tiercel.topk_softmax(scores, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Back to back: the second must not start on the first one's inputs too early.
        first = tiercel.topk_softmax(scores, 8)
        second = tiercel.topk_softmax(first[0], 4)
    for _ in range(3):
        scores.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(first, scores, 8)
        assert_right(second, first[0], 4)


def test_the_very_first_call_may_be_in_a_capture(run_python):
    run_python(
        START
        + """
scores = torch.randn(300, 64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = tiercel.topk_softmax(scores, 8)
scores.normal_()
graph.replay()
torch.cuda.synchronize()
check(scores, result)
"""
    )


def test_threads_at_first_use(run_python):
    run_python(
        START
        + """
inputs = [torch.randn(10 * i + 1, 64, device="cuda") for i in range(8)]
results, failures = [None] * 8, []
barrier = threading.Barrier(8)
def work(i):
    try:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                results[i] = tiercel.topk_softmax(inputs[i], 8)
            torch.cuda.current_stream().synchronize()
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failures, failures
for scores, result in zip(inputs, results):
    check(scores, result)
"""
    )


def test_a_new_thread_has_no_context_of_its_own(run_python):
    run_python(
        START
        + """
scores = torch.randn(5, 64, device="cuda")
out = torch.empty(5, 8, device="cuda"), torch.empty(5, 8, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
thread = threading.Thread(target=lambda: tiercel.topk_softmax(scores, 8, out=out))
thread.start()
thread.join()
torch.cuda.synchronize()
check(scores, out)
"""
    )


def test_forked_child(run_python):
    out = run_python(
        START
        + """
scores = torch.randn(5, 64, device="cuda")
out = tiercel.topk_softmax(scores, 8)
torch.cuda.synchronize()
reader, writer = os.pipe()
if os.fork() == 0:
    try:
        tiercel.topk_softmax(scores, 8, out=out)
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    os.write(writer, text.encode())
    os._exit(0)
print(os.read(reader, 10000).decode())
os.wait()
check(scores, tiercel.topk_softmax(scores, 8))
"""
    ).stdout
    assert "CUDA cannot be used in a forked child process; use the 'spawn' start method" in out


def test_two_processes_at_once(tmp_path):
    import subprocess

    code = (
        START
        + """
for seed in range(50):
    torch.manual_seed(seed)
    scores = torch.randn(500, 64, device="cuda")
    check(scores, tiercel.topk_softmax(scores, 8))
"""
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors.decode()


needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs a machine with two GPUs"
)


@needs_two
def test_the_device_is_the_tensors():
    for device in (1, 0):
        scores = torch.randn(100, 64, device=f"cuda:{device}")
        with torch.cuda.device(1 - device):
            result = tiercel.topk_softmax(scores, 8)
        assert result[0].device == result[1].device == scores.device
        torch.cuda.synchronize(device)
        assert_right(result, scores, 8)
        assert torch.cuda.current_device() == 0


@needs_two
def test_the_first_call_on_the_second_device(run_python):
    run_python(
        START
        + """
for device in (1, 0):
    scores = torch.randn(100, 512, device=f"cuda:{device}")
    result = tiercel.topk_softmax(scores, 16)
    torch.cuda.synchronize(device)
    check(scores, result)
"""
    )


@needs_two
def test_two_gpus_do_not_mix():
    scores = torch.randn(4, 8, device="cuda:0")
    out = (
        torch.empty(4, 2, device="cuda:1"),
        torch.empty(4, 2, dtype=torch.int32, device="cuda:0"),
    )
    with pytest.raises(ValueError, match="a tensor on cuda:0, got a tensor on cuda:1"):
        tiercel.topk_softmax(scores, 2, out=out)
