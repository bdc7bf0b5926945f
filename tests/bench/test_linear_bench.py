# SPDX-License-Identifier: Apache-2.0
"""linear_act's benchmark: what its check lets through, and its peers."""

import dataclasses
import sys

import pytest
import torch

from tiercel.ops.linear.cases import ACTIVATIONS, activate
from tiercel.workbench.bench import adapters, ops, ours, peers, runner
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Launch, Unsupported, WrongResult

BENCH = ops.load()["linear_act"]
PEERS = peers.load()
ADAPTERS = adapters.load()
ANY = Launch(run=tuple)


def case(act="gelu_tanh", dtype="bfloat16", bias=True, host=False, residual=False, **sizes):
    params = {"M": 33, "N": 72, "K": 136} | sizes
    params |= {"act": act, "bias": bias, "residual": residual}
    return Case("linear", "linear_act", dtype, params, host)


def solved(problem):
    """The inputs, the reference, and a right answer that a test may spoil."""
    inputs = BENCH.make(problem, "cpu", 0)
    expected = BENCH.reference(problem, inputs)
    return inputs, expected, expected.to(inputs["x"].dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_and_our_reference_agree_with_float64(act, dtype, bias):
    problem = case(act, dtype, bias)
    inputs = BENCH.make(problem, "cpu", 3)
    expected = BENCH.reference(problem, inputs)
    launches = [impl.prepare(problem, inputs) for impl in ours.impls(BENCH, ["ref"])]
    launches.append(ADAPTERS["torch"]["linear_act"](problem, inputs))
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    for launch in launches:
        error = BENCH.check(inputs, expected, launch.run(), launch)
        assert 0.1 * unit < error.rms < unit and error.maximum < 2 * unit


def test_sums_are_about_one():
    problem = case("none", bias=False, M=64, K=1032)
    inputs = BENCH.make(problem, "cpu", 0)
    assert 0.9 < float(BENCH.reference(problem, inputs).std()) < 1.1


def test_the_two_forms_of_gelu():
    sums = torch.linspace(-6, 6, 100, dtype=torch.float64)
    exact = sums * (1 + torch.erf(sums / 2**0.5)) / 2
    tanh = sums * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (sums + 0.044715 * sums**3))) / 2
    torch.testing.assert_close(activate("gelu", sums), exact)
    torch.testing.assert_close(activate("gelu_tanh", sums), tanh)


def test_bytes_moved_and_flops():
    sizes = {"M": 16, "N": 14336, "K": 4096}
    moved = 2 * (16 * 4096 + 14336 * 4096 + 16 * 14336)
    assert BENCH.bytes_moved(case(bias=False, **sizes)) == moved
    assert BENCH.bytes_moved(case(**sizes)) == moved + 2 * 14336
    assert BENCH.flops(case(**sizes)) == 2 * 16 * 14336 * 4096


def test_weights_are_rotated_past_the_cache():
    assert runner.input_sets(BENCH, case(M=1, N=4096, K=4096)) == 4
    assert runner.input_sets(BENCH, case(M=8192, N=14336, K=4096)) == 2


def spoil_one(result):
    result[7, 5] += 0.05


def spoil_nan(result):
    result[7, 5] = torch.nan


def spoil_infinity(result):
    result[7, 5] = torch.inf


def spoil_row(result):
    result[32] = 0


def spoil_largest(result):
    row, column = divmod(int(result.argmax()), result.shape[1])
    result[row, column] *= 1 + 2.0**-5


def spoil_everywhere(result):
    result *= 1 + 2.0**-7


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_one, "times its tolerance"),
        (spoil_nan, "not finite"),
        (spoil_infinity, "not finite"),
        (spoil_row, "times its tolerance"),
        (spoil_largest, "times its tolerance"),
        (spoil_everywhere, "RMS error"),
    ],
)
def test_a_wrong_answer_is_caught(spoil, text):
    inputs, expected, result = solved(case())
    BENCH.check(inputs, expected, (result,), ANY)
    spoil(result)
    with pytest.raises(WrongResult, match=text):
        BENCH.check(inputs, expected, (result,), ANY)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_that_lacks_a_part_is_caught(act, dtype):
    problem = case(act, dtype, M=64, N=64, K=1024)
    inputs, expected, _ = solved(problem)
    inputs["x"][:, 512:520] = 0  # eight of its columns
    wrong = BENCH.reference(problem, inputs).to(inputs["x"].dtype)
    with pytest.raises(WrongResult, match="times its tolerance"):
        BENCH.check(inputs, expected, (wrong,), ANY)
    inputs, expected, _ = solved(problem)
    inputs["bias"] = None
    wrong = BENCH.reference(problem, inputs).to(inputs["x"].dtype)
    with pytest.raises(WrongResult, match="times its tolerance"):
        BENCH.check(inputs, expected, (wrong,), ANY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_activation_is_caught(dtype):
    for act in ACTIVATIONS:
        inputs, expected, _ = solved(case(act, dtype, M=256, N=256))
        for other in ACTIVATIONS:
            # The two forms of GELU differ by less than bfloat16 shows.
            if other == act or {act, other} == {"gelu", "gelu_tanh"}:
                continue
            _, _, wrong = solved(case(other, dtype, M=256, N=256))
            with pytest.raises(WrongResult):
                BENCH.check(inputs, expected, (wrong,), ANY)


def test_another_shape_or_dtype_is_caught():
    inputs, expected, result = solved(case())
    for wrong in (result[:5], result.float()):
        with pytest.raises(WrongResult, match="shape"):
            BENCH.check(inputs, expected, (wrong,), ANY)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"act": "tanh"}, "`act` must be one of none, relu"),
        ({"bias": "yes"}, "`bias` must be true or false"),
        ({"K": 0}, "must be positive"),
        ({"N": "many"}, "must be positive"),
    ],
)
def test_wrong_parameters_are_named(wrong, text):
    params = {"M": 1, "N": 8, "K": 8, "act": "gelu", "bias": True, "residual": False}
    assert BENCH.invalid(params) is None
    assert text in BENCH.invalid(params | wrong)


@pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning")
def test_a_case_from_end_to_end(fake_clock):
    problem = case("relu", host=True)
    versions = {"torch": "2", "cublaslt": "of torch 2"}
    impls = ours.impls(BENCH, ["ref"])
    impls += peers.impls([PEERS["torch"], PEERS["cublaslt"]], versions, problem, False)

    def named(impl):
        def prepare(*args):
            launch = impl.prepare(*args)
            return dataclasses.replace(launch, details=launch.details | {"name": impl.name})

        return dataclasses.replace(impl, prepare=prepare)

    clock = fake_clock({"tiercel:ref": 2.0, "torch": 3.0, "cublaslt": 1.0})
    settings = runner.Settings(warmup=1, iterations=2, rounds=5)
    impls = [named(impl) for impl in impls]
    results = runner.run_case(BENCH, problem, impls, clock, settings, "cpu")
    graphs = {r.impl.name: r for r in results if r.timing != "host"}
    assert {name: r.reason for name, r in graphs.items() if r.status != "ok"} == {}
    assert (graphs["torch"].ratio, graphs["cublaslt"].ratio) == (1.5, 0.5)
    assert graphs["torch"].sets == runner.input_sets(BENCH, problem)
    hosts = {r.impl.name for r in results if r.timing == "host"}
    assert hosts == {"tiercel:ref", "torch", "cublaslt", "torch.linear"}


def test_cublaslt_declines_what_torch_does_not_offer():
    prepare = ADAPTERS["cublaslt"]["linear_act"]
    for problem in (case("silu"), case("gelu"), case("none"), case("relu", bias=False)):
        with pytest.raises(Unsupported, match="relu and gelu_tanh, with a bias"):
            prepare(problem, BENCH.make(problem, "cpu", 0))
    for act in ("relu", "gelu_tanh"):
        inputs, expected, _ = solved(case(act))
        launch = prepare(case(act), inputs)
        BENCH.check(inputs, expected, launch.run(), launch)
        torch.testing.assert_close(launch.host(), launch.run()[0])


@pytest.mark.parametrize("name", ["quack", "quack.tuned"])
@pytest.mark.parametrize(
    ("act", "theirs"),
    [("none", None), ("relu", "relu"), ("silu", "silu"), ("gelu", "gelu_erf")]
    + [("gelu_tanh", "gelu_tanh_approx")],
)
def test_how_quack_is_called(monkeypatch, name, act, theirs):
    calls = []

    def gemm_act(x, weight, *, bias, activation, store_preact, tuned, postact_out=None):
        calls.append((activation, store_preact, tuned))
        result = activate(act, (x @ weight + bias).float()).to(x.dtype)
        if postact_out is not None:
            postact_out.copy_(result)
        return None, result

    module = type(sys)("quack.gemm_interface")
    module.gemm_act = gemm_act
    monkeypatch.setitem(sys.modules, "quack", type(sys)("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    inputs, expected, _ = solved(case(act))
    launch = ADAPTERS[name]["linear_act"](case(act), inputs)
    BENCH.check(inputs, expected, launch.run(), launch)
    launch.host()
    assert calls == [(theirs, False, name == "quack.tuned")] * 2


def test_compiled_code_is_compiled_once_a_case(monkeypatch):
    compiled = []

    def compile_(function, **options):
        compiled.append(options["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    prepare = ADAPTERS["torch.compile"]["linear_act"]
    for problem in (case("relu", M=3), case("relu", M=4)):
        for seed in range(3):
            inputs = BENCH.make(problem, "cpu", seed)
            launch = prepare(problem, inputs)
            BENCH.check(inputs, BENCH.reference(problem, inputs), launch.run(), launch)
    assert compiled == ["max-autotune-no-cudagraphs"] * 2
