# SPDX-License-Identifier: Apache-2.0
"""Choosing a backend, what happens where none applies, and what explain says of it."""

import dataclasses
import threading
import warnings

import pytest
import torch

import tiercel
from tiercel.core import dispatch as _op
from tiercel.core import eager, platform, selection
from tiercel.core.dispatch import Backend
from tiercel.core.op import ops

pytestmark = pytest.mark.torch

ON_CPU = "the sm90 kernels need CUDA tensors, these are on cpu"


@pytest.fixture
def scores():
    return torch.randn(4, 8)


@pytest.fixture
def probe(monkeypatch):
    """A third backend, with the calls that it got."""
    calls = []
    op = _op.registry["topk_softmax"]

    def run(scores, k, *options):
        calls.append(k)
        return op.backends["ref"].run(scores, k, *options)

    monkeypatch.setitem(op.backends, "probe", Backend("probe", run, "counts calls", "torch"))
    return calls


def _launches(monkeypatch, op, run):
    for eager_call in op.eager_calls:
        monkeypatch.setattr(eager_call, "run", run)
        monkeypatch.setattr(eager_call, "native", None)
    monkeypatch.setitem(op.backends, "sm90", dataclasses.replace(op.backends["sm90"], run=run))


def test_no_python_before_the_launch(monkeypatch):
    """From `torch.ops`, with a gradient and with `out=`, too."""
    launched = []
    op = ops["rms_norm"]

    def python(*args):
        raise AssertionError("the generic path")

    for operator in (op.operator, op.out):
        for eager_call in operator.eager_calls:
            monkeypatch.setattr(eager_call, "run", python)
            monkeypatch.setattr(eager_call, "native", lambda *args: launched.append(args))
        monkeypatch.setitem(
            operator.backends, "sm90", dataclasses.replace(operator.backends["sm90"], run=python)
        )
    monkeypatch.setattr(op, "_into_in_python", python)
    platform.ready.add(-1)
    x = torch.randn(4, 8)
    out = torch.empty_like(x)
    try:
        tiercel.rms_norm(x)
        tiercel.rms_norm(x, out=out)
        torch.ops.tiercel.rms_norm(x)
        torch.ops.tiercel.rms_norm.out(x, out=out)
        tiercel.rms_norm(x.clone().requires_grad_())
        torch.ops.tiercel.rms_norm(x.clone().requires_grad_())
    finally:
        platform.ready.discard(-1)
    assert len(launched) == 6


def test_torch_ops_and_compiled_graphs_skip_the_dispatcher(monkeypatch):
    op, launched = ops["rms_norm"].operator, []

    def dispatched(*args):
        raise AssertionError("the dispatcher")

    for eager_call in op.eager_calls:
        monkeypatch.setattr(eager_call, "native", dispatched)
    monkeypatch.setattr(op.eager, "native", lambda *args: launched.append(args))
    x, operator = torch.randn(4, 8), torch.ops.tiercel.rms_norm
    compiled = torch.compile(operator.default, backend="aot_eager", fullgraph=True)
    compiled(x)
    platform.ready.add(-1)
    try:
        assert [call(x).shape for call in (operator, operator.default, compiled)] == [x.shape] * 3
        assert len(launched) == 3
        operator.default(x, weight=None, bias=None, eps=1e-6, backend=None)  # as inductor does
        assert len(launched) == 4
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            with pytest.raises(AssertionError, match="the dispatcher"):
                operator.default(x)
    finally:
        platform.ready.discard(-1)


@pytest.fixture
def fast(monkeypatch):
    """The fast path on the CPU: a device that counts as ready, and a launch of our own."""
    calls = []
    op = _op.registry["topk_softmax"]

    def run(*args):
        calls.append(args)
        return op.backends["ref"].run(*args)

    _launches(monkeypatch, op, run)
    platform.ready.add(-1)
    yield calls
    platform.ready.discard(-1)


@pytest.fixture
def counted(monkeypatch):
    """The calls that go through the dispatcher."""
    calls = []
    op = _op.registry["topk_softmax"]
    overload = op.overload
    monkeypatch.setattr(op, "overload", lambda *args: calls.append(args) or overload(*args))
    return calls


def test_default_warns_once_a_reason(scores):
    with pytest.warns(tiercel.FallbackWarning) as caught:
        tiercel.topk_softmax(scores, 2)
    assert len(caught) == 1
    assert str(caught[0].message) == f"topk_softmax runs on the slower 'ref' backend: {ON_CPU}"
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiercel.topk_softmax(scores, 2)
        torch.ops.tiercel.topk_softmax(scores, 2)
        tiercel.topk_softmax(scores, 2, backend="ref")


def test_asking_for_ref_does_not_warn(scores):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiercel.topk_softmax(scores, 2, backend="ref")
        with tiercel.use_backend("ref"):
            tiercel.topk_softmax(scores, 2)


def test_strict_is_an_error(scores, monkeypatch):
    monkeypatch.setenv("TIERCEL_STRICT", "1")
    with pytest.raises(RuntimeError, match="TIERCEL_STRICT is set, so ref does not stand in"):
        tiercel.topk_softmax(scores, 2)
    tiercel.topk_softmax(scores, 2, backend="ref")
    monkeypatch.setenv("TIERCEL_STRICT", "0")
    with pytest.warns(tiercel.FallbackWarning):
        tiercel.topk_softmax(scores, 2)


def test_asking_for_sm90_is_an_error_where_it_does_not_apply(scores):
    with pytest.raises(RuntimeError) as info:
        tiercel.topk_softmax(scores, 2, backend="sm90")
    assert str(info.value) == f"topk_softmax: backend 'sm90' was asked for, but {ON_CPU}"


def test_precedence(scores, probe):
    def chosen(**call):
        before = len(probe)
        tiercel.topk_softmax(scores, 2, **call)
        return len(probe) > before

    tiercel.set_backend("topk_softmax", "ref")
    assert not chosen()
    assert chosen(backend="probe")
    with tiercel.use_backend("probe"):
        assert chosen()
        assert not chosen(backend="ref")
        with tiercel.use_backend("ref", op="topk_softmax"):
            assert not chosen()
        assert chosen()
    assert not chosen()
    tiercel.set_backend("topk_softmax", "probe")
    assert chosen()
    assert chosen(out=None)
    tiercel.set_backend("topk_softmax", None)
    tiercel.set_backend(None, "ref")
    assert not chosen()
    tiercel.set_backend(None, None)


def test_a_context_is_of_its_thread(scores, probe):
    with tiercel.use_backend("probe"):
        thread = threading.Thread(
            target=tiercel.topk_softmax, args=(scores, 2), kwargs={"backend": "ref"}
        )
        thread.start()
        thread.join()
        assert probe == []
        tiercel.set_backend(None, "ref")
        other = threading.Thread(target=tiercel.topk_softmax, args=(scores, 3))
        other.start()
        other.join()
        assert probe == []
        tiercel.topk_softmax(scores, 4)
    assert probe == [4]


def test_unknown_names(scores):
    with pytest.raises(ValueError, match="tiercel has no operator 'nope'; it has .*topk_softmax"):
        tiercel.set_backend("nope", "ref")
    with pytest.raises(ValueError, match="topk_softmax has no backend 'nope'"):
        tiercel.set_backend("topk_softmax", "nope")
    with pytest.raises(ValueError, match="no operator has a backend 'nope'"):
        with tiercel.use_backend("nope"):
            pass
    with pytest.raises(ValueError, match="topk_softmax has no backend 'nope'; it has ref, sm90"):
        tiercel.topk_softmax(scores, 2, backend="nope")


def test_choices_by_keyword_in_one_order(scores, probe):
    tiercel.set_backend(op="topk_softmax", name="probe")
    tiercel.topk_softmax(scores, 2)
    with tiercel.use_backend(op="topk_softmax", name="ref"):
        tiercel.topk_softmax(scores, 3)
    tiercel.set_backend(op="topk_softmax", name=None)
    with tiercel.use_backend(op="topk_softmax", name="probe"):
        tiercel.topk_softmax(scores, 4)
    tiercel.set_backend(name="probe")  # of every operator
    tiercel.topk_softmax(scores, 5)
    assert probe == [2, 4, 5]


def test_the_wrong_order_is_told():
    told = r"has no operator 'ref' \(did you mean op='topk_softmax', name='ref'\?\)"
    with pytest.raises(ValueError, match=told):
        tiercel.set_backend("ref", "topk_softmax")
    with pytest.raises(ValueError, match=told):
        with tiercel.use_backend("topk_softmax", "ref"):
            pass


@pytest.mark.parametrize("value", ["ref", "topk_softmax=ref", " topk_softmax = ref ,other=sm90"])
def test_environment(run_python, value):
    code = """
import warnings, torch, tiercel
warnings.simplefilter("error")
tiercel.topk_softmax(torch.zeros(1, 2), 1)
print(tiercel.explain(tiercel.topk_softmax, torch.zeros(1, 2), 1))
"""
    out = run_python(code, TIERCEL_BACKEND=value).stdout
    assert out.strip() == "topk_softmax runs on ref: it was asked for"


def test_environment_that_names_nothing(run_python):
    code = "import torch, tiercel; tiercel.topk_softmax(torch.zeros(1, 2), 1)"
    result = run_python(code, check=False, TIERCEL_BACKEND="nope")
    assert (
        "ValueError: topk_softmax has no backend 'nope' (TIERCEL_BACKEND asks for it); it has ref, "
        "sm90" in result.stderr
    )


def test_a_compiled_graph_follows_the_choice_of_the_moment(scores, probe):
    compiled = torch.compile(
        lambda s: tiercel.topk_softmax(s, 2), backend="aot_eager", fullgraph=True
    )
    with tiercel.use_backend("ref"):
        compiled(scores)
    assert probe == []
    with tiercel.use_backend("probe"):
        compiled(scores)
    assert probe == [2]


def test_explain(scores):
    told = tiercel.explain(tiercel.topk_softmax, scores, 2)
    assert (told.op, told.backend, told.configuration) == ("topk_softmax", "ref", {})
    assert str(told) == f"topk_softmax runs on ref: sm90 does not apply, {ON_CPU}"
    told = tiercel.explain("topk_softmax", scores, k=2, renormalize=True, backend="ref")
    assert str(told) == "topk_softmax runs on ref: it was asked for"
    with pytest.raises(ValueError, match="tiercel has no operator 'nope'; it has .*topk_softmax"):
        tiercel.explain("nope", scores)
    with pytest.raises(ValueError, match="k must be between 1 and the number of experts"):
        tiercel.explain("topk_softmax", scores, 9)
    with pytest.raises(TypeError, match="missing a required argument: 'k'"):
        tiercel.explain("topk_softmax", scores)
    with pytest.raises(TypeError, match="topk_softmax: `scores` must be a torch.Tensor, got list"):
        tiercel.explain("topk_softmax", [1.0], 1)


def test_plain_calls_skip_the_dispatcher(scores, fast, counted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiercel.topk_softmax(scores, 2)
        tiercel.topk_softmax(torch.nn.Parameter(scores, requires_grad=False), 2)
        with tiercel.use_backend("sm90"):
            tiercel.topk_softmax(scores, 2)
        weights, _ = tiercel.topk_softmax(scores.clone().requires_grad_(), 2)
        weights.sum().backward()
    assert len(fast) == 4 and counted == []


def test_watched_calls_go_through_the_dispatcher(scores, fast, counted):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Subclass(torch.Tensor):
        pass

    class SeesFunctions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class SeesOps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (SeesFunctions, SeesOps):
        seen = []
        with mode():
            tiercel.topk_softmax(scores, 2)
        assert torch.ops.tiercel.topk_softmax.default in seen
    assert isinstance(tiercel.topk_softmax(scores.as_subclass(Subclass), 2)[0], torch.Tensor)
    traced = torch.jit.trace(lambda s: tiercel.topk_softmax(s, 2)[0], scores)
    assert "tiercel::topk_softmax" in str(traced.graph)
    assert len(counted) >= 4


def test_routes(scores):
    assert eager.route(scores) == eager.DIRECT
    assert eager.route(scores, scores) == eager.DIRECT
    assert eager.route(scores, [1]) == eager.DISPATCH
    negated = torch.view_as_complex(torch.ones(4, 8, 2)).conj().imag
    assert negated.is_neg() and eager.route(negated) == eager.DISPATCH
    wanted = scores.clone().requires_grad_()
    assert eager.route(scores, wanted) == eager.GRAD
    with torch.no_grad():
        assert eager.route(wanted) == eager.DIRECT
    with torch.inference_mode():
        assert eager.route(scores) == eager.DIRECT
    torch.vmap(lambda s: [s, _transformed(s)][0])(scores)


def _transformed(tensor):
    assert eager.route(tensor) == eager.TRANSFORMED


def test_a_launch_that_has_no_kernel_falls_back(scores, fast, monkeypatch):
    def refuse(*args):
        raise NotImplementedError("topk_softmax: at most 4 experts are supported, got 8")

    _launches(monkeypatch, _op.registry["topk_softmax"], refuse)
    with pytest.warns(tiercel.FallbackWarning, match="backend: at most 4 experts are supported"):
        tiercel.topk_softmax(scores, 2)
    with pytest.raises(NotImplementedError, match="at most 4 experts"):
        tiercel.topk_softmax(scores, 2, backend="sm90")


def test_a_failed_launch_is_no_fallback(scores, fast, monkeypatch):
    def fail(*args):
        raise RuntimeError("launch failed")

    _launches(monkeypatch, _op.registry["topk_softmax"], fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        tiercel.topk_softmax(scores, 2)
    with pytest.raises(ValueError, match="k must be between"):  # a bad argument comes first
        tiercel.topk_softmax(scores, 9)


def test_logging(run_python):
    code = "import torch, tiercel; tiercel.topk_softmax(torch.zeros(1, 2), 1)"
    err = run_python(code, TIERCEL_LOG="info").stderr
    assert "tiercel INFO topk_softmax runs on the slower 'ref' backend" in err
    assert "INFO" not in run_python(code).stderr
    assert "TIERCEL_LOG=LOUD is no logging level" in run_python(code, TIERCEL_LOG="loud").stderr


def test_auto_overrides_what_is_set_further_out(scores, probe):
    with tiercel.use_backend("probe"), tiercel.use_backend("auto"):
        tiercel.topk_softmax(scores, 2)
    assert probe == []


@pytest.mark.parametrize("value", ["0", "false", "no", "OFF", ""])
def test_strict_can_be_said_off(monkeypatch, scores, value):
    monkeypatch.setenv("TIERCEL_STRICT", value)
    tiercel.topk_softmax(scores, 2)


def test_environment_that_names_no_operator_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(
        selection, "_environment", {"topk_sofmax": "ref", "topk_softmax": "", None: "ref"}
    )
    with caplog.at_level("WARNING", logger="tiercel"):
        selection.warn_of_unknown_names(_op.registry)
    assert ["topk_sofmax" in r.getMessage() for r in caplog.records] == [True, False]


def test_explain_checks_out(scores):
    good = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32))
    assert tiercel.explain(tiercel.topk_softmax, scores, 2, out=good).backend == "ref"
    bad = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int16))
    with pytest.raises(TypeError, match="`indices` must have dtype int32 or int64, got int16"):
        tiercel.explain(tiercel.topk_softmax, scores, 2, out=bad)
    with pytest.raises(ValueError, match=r"`weights` must have shape \[T, k\] = \[4, 3\], got"):
        tiercel.explain(tiercel.topk_softmax, scores, 3, out=good)


def test_who_asked_for_it(scores, monkeypatch):
    monkeypatch.setattr(selection, "_environment", {None: "sm90"})
    monkeypatch.setattr(selection, "overriding", True)
    with pytest.raises(RuntimeError, match="backend 'sm90' was asked for by TIERCEL_BACKEND, but"):
        tiercel.topk_softmax(scores, 2)
    with tiercel.use_backend("sm90"), pytest.raises(RuntimeError, match="asked for by use_backend"):
        tiercel.topk_softmax(scores, 2)
