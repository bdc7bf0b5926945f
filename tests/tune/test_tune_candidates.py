# SPDX-License-Identifier: Apache-2.0
"""Candidates: what fits, what is pruned, and that the launchers take what is left."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C
from tiercel.tune import hardware, ops
from tiercel.tune.hardware import Needs, blocks_per_sm, why_not
from tiercel.tune.problem import Problem, name_of

LINEAR = ops.load()["linear"]
NVFP4 = ops.load()["nvfp4-linear"]
SQUARE = Problem("linear_act", 4096, 4096, "bfloat16")


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
    n, k = SQUARE.n, SQUARE.k
    x, w, b, y = (
        ExchangeTensor(*shape, dtype="bfloat16") for shape in ((m, k), (n, k), (n,), (m, n))
    )
    return _C.linear_act_plan(x, w, b, y, 3, tuple(LINEAR.config(candidate).values()))


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
        problem = Problem(tunable.op, 4096, 4096, tunable.dtypes[0])
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
    problem = Problem("nvfp4_linear", n, k, "float4_e2m1fn_x2")
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
    assert pruned or tokens == 1 or k == 64


def test_bad_configurations_are_named():
    args = [ExchangeTensor(1, 64, dtype="bfloat16"), ExchangeTensor(8, 64, dtype="bfloat16"), None]
    args += [ExchangeTensor(1, 8, dtype="bfloat16"), 0]
    with pytest.raises(NotImplementedError, match="tile 96x32.*no precompiled kernel has it"):
        _C.linear_act_plan(*args, (96, 32, 0, 1, 1, 0))
    with pytest.raises(NotImplementedError, match="split K by 2: K splits by 1 to 1"):
        _C.linear_act_plan(*args, (64, 32, 0, 1, 2, 0))
    with pytest.raises(TypeError, match="a configuration must be a tuple of 6 whole numbers"):
        _C.linear_act_plan(*args, (64, 32))
    with pytest.raises(ValueError, match="small and not negative"):
        _C.linear_act_plan(*args, (64, 32, 0, 1, -1, 0))


def test_a_multiprocessors_limits_are_hoppers():
    assert hardware.SHARED_PER_BLOCK == 232448
    assert hardware.REGISTERS_PER_SM == 65536
