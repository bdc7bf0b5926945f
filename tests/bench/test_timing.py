# SPDX-License-Identifier: Apache-2.0
"""The CUDA clock on a CUDA that only counts: every launch takes 10 us, a replay 3 us more."""

import contextlib
from types import SimpleNamespace

import pytest

from tiercel.workbench.bench.launch import Launch
from tiercel.workbench.bench.timing import CudaClock


class Cuda:
    """Stands in for torch.cuda; `now` is the GPU's time in milliseconds."""

    def __init__(self):
        self.now = 0.0
        self.graph_now = None
        self.ran = []
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def elapsed_time(self, later):
                return later.at - self.at

        class Graph:
            kernels = 0

            def replay(self):
                cuda.now += 0.003 + 0.010 * self.kernels

        self.Event, self.CUDAGraph = Event, Graph
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.current_stream = self.Stream
        self.stream = lambda stream: contextlib.nullcontext()
        self.synchronize = self.empty_cache = lambda: None

    @contextlib.contextmanager
    def graph(self, graph):
        self.graph_now = graph
        self.ran.clear()
        yield
        self.graph_now = None

    def launch(self, name):
        self.ran.append(name)
        if self.graph_now is not None:
            self.graph_now.kernels += 1
        else:
            self.now += 0.010
        return (name, len(self.ran))


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def clock(cuda):
    made = CudaClock()
    made._torch = SimpleNamespace(cuda=cuda)
    return made


def launches(cuda, names, **options):
    return [Launch(lambda name=name: cuda.launch(name), **options) for name in names]


def test_a_graph_holds_whole_turns_through_the_inputs(cuda, clock):
    replay = clock.prepare(launches(cuda, "abc"))
    # Half a millisecond at (20 + 1) launches' 10.14 us: 50, in turns of three.
    assert replay.timing == "graph" and replay.launches == 51
    assert "".join(cuda.ran) == "abc" * 17
    assert replay.outputs == ("a", 49)  # of the last turn: its memory is nobody else's


def test_a_sample_is_a_launch_s_share_of_a_replay(cuda, clock):
    replay = clock.prepare(launches(cuda, "a"))
    assert replay.launches == 50
    assert replay.sample(3) == pytest.approx([(0.003 + 0.5) / 50] * 3)
    before = cuda.now
    replay.run()
    assert cuda.now - before == pytest.approx(0.503)


def test_what_no_graph_can_hold_is_timed_in_a_loop(cuda, clock):
    replay = clock.prepare(launches(cuda, "ab", graph=False))
    assert replay.timing == "events" and replay.launches == 50
    assert replay.sample(2) == pytest.approx([0.010] * 2)
    assert cuda.ran[-4:] == ["a", "b", "a", "b"]
