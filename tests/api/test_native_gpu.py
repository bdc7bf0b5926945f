# SPDX-License-Identifier: Apache-2.0
"""Operators that C++ calls without Python, on the GPU: by the dispatcher, in AOTInductor's packages
and in Inductor's C++ wrappers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support import contract_calls as calls
from support import stable_dispatch

import tiercel
from tiercel import _C
from tiercel.core import native
from tiercel.core.dispatch import operators

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
    pytest.mark.skipif(not _C.has_native_ops(), reason="torch is not in native.TESTED"),
]
NATIVE = [op for op in calls.OPS if op in operators and op not in native.through_python]


@pytest.fixture
def no_python():
    """Fails if a call goes on to Python."""
    before = _C.calls_through_python()
    yield
    assert _C.calls_through_python() == before


def in_c(op, values):
    """The results of a call from C, or the arguments if they are what it writes."""
    overload = operators[op].overload
    given = calls.copied(values)
    named = {k: v for k, v in given.items() if k in operators[op].argument_names}
    with torch.no_grad():
        result = stable_dispatch.call(overload, **named)
    return tuple(given.values()) if op in calls.WRITING else result


@pytest.mark.parametrize("op", NATIVE)
def test_the_same_bits(op, no_python):
    values = calls.without_defaults(op, calls.arguments(op, device="cuda"))
    given = calls.copied(values)
    expected = calls.function(op)(**given, **calls.AS_OPERATOR.get(op, {}))
    if op in calls.WRITING:
        expected = tuple(given.values())
    got = in_c(op, values)
    tensors = [t for t in calls.tensors_of(expected) if isinstance(t, torch.Tensor)]
    calls.same([t for t in calls.tensors_of(got) if isinstance(t, torch.Tensor)], tensors)


def test_most_operators_are_native():
    assert len(NATIVE) > 25 and "rms_norm" in NATIVE and "kv_cache_write" in NATIVE


def arguments():
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(*s, device="cuda", generator=generator) for s in ((64, 128), (128,))]
    return [t.bfloat16() for t in made]


def test_the_callers_stream(no_python):
    """A thread that never had the GIL, a stream of its own, a graph."""
    x, weight = arguments()
    expected = tiercel.rms_norm(x, weight)
    overload = torch.ops.tiercel.rms_norm.default
    stream, out = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())

    def work():
        with torch.no_grad(), torch.cuda.stream(stream):
            out.append(stable_dispatch.call(overload, x, weight))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stream.synchronize()
    assert torch.equal(out[0], expected)
    graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.no_grad(), torch.cuda.graph(graph):
        y.copy_(stable_dispatch.call(overload, x, weight))
    x.neg_()
    graph.replay()
    assert torch.equal(y, -expected)


def apart(*words, native_ops="1"):
    """What support/native_compiled.py prints."""
    program = Path(__file__).parents[1] / "support" / "native_compiled.py"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", program, *words],
        env=os.environ | {"TIERCEL_NATIVE": native_ops},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{words}, TIERCEL_NATIVE={native_ops}: {done.stderr[-4000:]}"
    return None if words[0] == "write" else json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_cpp_wrapper():
    assert apart("wrapper") == [True, True, 0]


@pytest.mark.timeout(300)
def test_aotinductor_package(tmp_path):
    """A package also runs where operators are called through Python."""
    package = tmp_path / "graph.pt2"
    apart("write", package)
    for native_ops in ("0", "1"):
        found = apart("load", package, native_ops=native_ops)
        assert found == [native_ops == "1", True, 0]


def test_gradients_go_through_python():
    x, weight = (t.requires_grad_() for t in arguments())
    out = stable_dispatch.call(torch.ops.tiercel.rms_norm.default, x, weight)
    expected = tiercel.rms_norm(x, weight)
    for got, due in zip(
        torch.autograd.grad(out.float().square().sum(), (x, weight)),
        torch.autograd.grad(expected.float().square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, due, rtol=2e-2, atol=2e-2)
