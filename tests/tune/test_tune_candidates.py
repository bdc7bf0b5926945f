# SPDX-License-Identifier: Apache-2.0
"""Candidates: what fits, what is pruned, and that the launchers take what is left."""

import pytest
from support import few_tokens
from support.dlpack_tensor import ExchangeTensor

import tiercel.ops.moe.tune as moe
from tiercel import _C
from tiercel.workbench.tune import hardware, ops
from tiercel.workbench.tune.hardware import Needs, blocks_per_sm, why_not
from tiercel.workbench.tune.problem import Problem, name_of

LINEAR = ops.load()["linear"]
NVFP4 = ops.load()["nvfp4-linear"]
SQUARE = Problem.of("linear_act", "bfloat16", N=4096, K=4096)


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (Needs(1056, 0, 32), "1056 threads a block, 1024 is the most"),
        (Needs(800, 0, 32, most_threads=768), "800 threads a block, 768 is the most"),
        (Needs(128, 232449, 32), "232449 bytes of shared memory, 232448 is the most"),
        (Needs(128, 0, 256), "256 registers a thread, 255 is the most"),
        (Needs(384, 0, 168, busiest=250, most=240), "250 registers a thread, 240 is the most"),
        (Needs(128, 0, 32, cluster=16), "clusters of 16, 8 is the most"),
        (Needs(512, 0, 168), "0 blocks a multiprocessor, 1 are needed"),
        (Needs(128, 120_000, 32, least_blocks=2), "1 blocks a multiprocessor, 2 are needed"),
        (Needs(384, 232448, 168, busiest=240, most=240, cluster=8), None),
    ],
)
def test_what_cannot_fit(needs, text):
    assert why_not(needs) == text


def test_occupancy():
    assert blocks_per_sm(Needs(256, 0, 32)) == 8
    assert blocks_per_sm(Needs(32, 0, 32)) == 32
    assert blocks_per_sm(Needs(128, 113 * 1024, 64)) == 2
    assert blocks_per_sm(Needs(384, 1024, 168)) == 1  # registers


def linear_plan(m, candidate):
    n, k = SQUARE["N"], SQUARE["K"]
    x, w, b, y = (
        ExchangeTensor(*shape, dtype="bfloat16") for shape in ((m, k), (n, k), (n,), (m, n))
    )
    return _C.linear_act_plan(x, w, b, None, y, None, 3, tuple(LINEAR.config(candidate).values()))


@pytest.mark.parametrize("tokens", [1, 16, 64, 200, 1024, 8192])
def test_linears_candidates_are_launched_as_said(tokens):
    found = LINEAR.candidates(SQUARE, tokens, False, False)
    assert len({name_of(c) for c in found}) == len(found) > 10
    for c in found:
        assert LINEAR.precompiled(c)
        plan, needs = linear_plan(tokens, c), LINEAR.needs(SQUARE, tokens, c)
        assert why_not(needs) is None
        assert (plan["tile_m"], plan["tile_n"]) == (c["tile_m"], c["tile_n"])
        assert plan["dynamic_smem"] == needs.shared
        assert plan["block"] == needs.threads
        assert plan["cluster"] == needs.cluster
        assert plan["splits"] == c["splits"]
        if c["group"]:
            assert plan["group"] == c["group"]


def test_quick_tries_fewer():
    for tunable in (LINEAR, NVFP4):
        problem = Problem.of(tunable.op, tunable.dtypes[0], N=4096, K=4096)
        for tokens in (1, 16):
            every = {name_of(c) for c in tunable.candidates(problem, tokens, False, False)}
            quick = {name_of(c) for c in tunable.candidates(problem, tokens, True, False)}
            assert quick < every


def test_compiled_candidates_are_others_and_are_pruned():
    for tokens in (16, 4096):
        every = LINEAR.candidates(SQUARE, tokens, False, True)
        more = [c for c in every if not LINEAR.precompiled(c)]
        fitting = [c for c in more if why_not(LINEAR.needs(SQUARE, tokens, c)) is None]
        assert len(fitting) > 20
    # 128 rows of a warpgroup times 256 columns are 256 sums a thread: before any compiler is asked.
    too_large = next(c for c in more if c["pingpong"] and c["tile_m"] == 128 and c["tile_n"] == 256)
    assert "registers a thread" in why_not(LINEAR.needs(SQUARE, 4096, too_large))


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (7168, 16384), (100, 64)])
def test_nvfp4_linear_takes_what_is_not_pruned(tokens, n, k):
    problem = Problem.of("nvfp4_linear", "float4_e2m1fn_x2", N=n, K=k)
    x, out = (
        ExchangeTensor(tokens, k, dtype="bfloat16"),
        ExchangeTensor(tokens, n, dtype="bfloat16"),
    )
    w, scale = (
        ExchangeTensor(n, k // 2, dtype=problem.dtype),
        ExchangeTensor(n, k // 16, dtype="float8_e4m3fn"),
    )
    launched = pruned = 0
    for c in NVFP4.candidates(problem, tokens, False, False):
        config = tuple(NVFP4.config(c).values())
        if why_not(NVFP4.needs(problem, tokens, c)) is None:
            plan = _C.nvfp4_linear_plan(x, w, scale, None, out, config)
            assert plan["block"] == c["tiles"] * c["parts"] * 32
            assert (plan["cluster"], plan["parts"]) == (c["cluster"], c["parts"])
            launched += 1
        else:
            with pytest.raises(NotImplementedError, match="cannot run: "):
                _C.nvfp4_linear_plan(x, w, scale, None, out, config)
            pruned += 1
    assert launched > 5
    assert (pruned > 0) == (tokens != 8 or k > 4096)  # there all of them fit


MOE = ops.load()["moe"]


def moe_plan(problem, tokens, candidate, half):
    """Of the launcher's own choice without a candidate."""
    experts, k, hidden, inner = (size for _, size in problem.sizes)
    float8 = problem.dtype == "float8_e4m3fn"
    up, block = half == "up", candidate["block_size"]
    rows, columns = (inner, hidden) if up else (hidden, inner)
    elements = tokens * k

    def make(*shape, dtype="int32"):
        return ExchangeTensor(*shape, dtype=dtype)

    x = make(tokens if up else elements, columns, dtype=problem.dtype)
    w = make(experts, 2 * rows if up else rows, columns, dtype=problem.dtype)
    out = make(elements, rows, dtype="bfloat16" if float8 else problem.dtype)
    scales = (
        (make(1, dtype="float32"), make(experts, 1, dtype="float32")) if float8 else (None,) * 2
    )
    blocks = min(elements, experts + elements // block)
    routing = (make(blocks * block), make(blocks), make(1))
    given = () if candidate.get(f"{half}_tile") is None else candidate
    config = (candidate[f"{half}_tile"], candidate[f"{half}_cluster"]) if given else None
    plan = _C.moe_up_plan if up else _C.moe_down_plan
    return plan(x, w, *routing, None, out, block, 0, None, 0, *scales, config)


@pytest.mark.parametrize("dtype", MOE.dtypes)
@pytest.mark.parametrize("tokens", [1, 16, 100, 1024, 8192])
def test_moes_candidates_are_launched_as_said(tokens, dtype):
    problem = Problem.of("fused_moe", dtype, E=64, k=8, H=2048, I=1024)
    found = MOE.candidates(problem, tokens, False, False)
    least = 1 if tokens >= 1024 else 2 if dtype.startswith("float8") else 4
    assert len({name_of(c) for c in found}) == len(found) >= least
    quick = {name_of(c) for c in MOE.candidates(problem, tokens, True, False)}
    assert quick <= {name_of(c) for c in found}
    for c in found:
        assert why_not(MOE.needs(problem, tokens, c)) is None
        if c["block_size"] == 0:  # in one launch
            given = few_tokens.arguments(tokens, *(size for _, size in problem.sizes))
            plan = _C.fused_moe_few_tokens_plan(*given.values())
            needs = MOE.needs(problem, tokens, c)
            assert tokens == 1 and plan["block"] == needs.threads
            assert plan["dynamic_smem"] <= needs.shared
            continue
        for half in ("up", "down"):
            plan = moe_plan(problem, tokens, c, half)
            needs = moe.half_needs(problem, c, half)
            assert plan["tile_m"] == c["block_size"]
            assert (plan["tile_n"], plan["cluster"]) == (c[f"{half}_tile"], needs.cluster)
            assert (plan["dynamic_smem"], plan["block"]) == (needs.shared, needs.threads)


@pytest.mark.parametrize("dtype", MOE.dtypes)
@pytest.mark.parametrize("block", [64, 128])
def test_what_moe_runs_untuned_is_a_candidate(block, dtype):
    for tokens in (1, 64, 4096):
        problem = Problem.of("fused_moe", dtype, E=8, k=2, H=4096, I=14336)
        for half in ("up", "down"):
            plan = moe_plan(problem, tokens, {"block_size": block}, half)
            assert (plan["tile_n"], plan["cluster"]) in moe.tiles(block, half, dtype)


def test_bad_configurations_are_named():
    args = [ExchangeTensor(1, 64, dtype="bfloat16"), ExchangeTensor(8, 64, dtype="bfloat16"), None]
    args += [None, ExchangeTensor(1, 8, dtype="bfloat16"), None, 0]
    with pytest.raises(NotImplementedError, match="tile 96x32.*no precompiled kernel has it"):
        _C.linear_act_plan(*args, (96, 32, 0, 1, 1, 0))
    with pytest.raises(NotImplementedError, match="split K by 2: K splits by 1 to 1"):
        _C.linear_act_plan(*args, (64, 32, 0, 1, 2, 0))
    problem = Problem.of("fused_moe", "bfloat16", E=8, k=2, H=64, I=64)
    bad = {"block_size": 64, "up_tile": 96, "up_cluster": 1}
    with pytest.raises(NotImplementedError, match="block 64, tile 96, cluster 1: no precompiled"):
        moe_plan(problem, 1, bad, "up")
    with pytest.raises(TypeError, match="a configuration must be a tuple of 6 whole numbers"):
        _C.linear_act_plan(*args, (64, 32))
    with pytest.raises(ValueError, match="small and not negative"):
        _C.linear_act_plan(*args, (64, 32, 0, 1, -1, 0))


def test_a_multiprocessors_limits_are_hoppers():
    assert hardware.SHARED_PER_BLOCK == 232448
    assert hardware.REGISTERS_PER_SM == 65536
