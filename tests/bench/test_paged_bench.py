# SPDX-License-Identifier: Apache-2.0
"""The benchmark of paged_attention: what its check lets through."""

import pytest

from tiercel.workbench.bench import ops, ours
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import WrongResult

BENCH = ops.load()["paged_attention"]


def prepared(**sizes):
    params = {**BENCH.params, "H": 4, "Hk": 2, "D": 16, "context": 40, **sizes}
    assert BENCH.invalid(params) is None
    case = Case("attention", "paged_attention", "bfloat16", params)
    inputs = BENCH.make(case, "cpu", 3)
    return case, inputs, BENCH.reference(case, inputs)


@pytest.mark.parametrize(
    "sizes",
    [
        {"new": 70},
        {"new": 9, "decoding": 3},
        {"new": 64, "B": 2, "tree": True},
        {"new": 7, "decoding": 2, "tree": True, "cache": "float8_e4m3fn"},
        {"new": 70, "cache": "float8_e4m3fn"},
    ],
)
def test_the_reference_agrees_with_float64(sizes):
    case, inputs, expected = prepared(**sizes)
    (impl,) = ours.impls(BENCH, ["ref"])
    launch = impl.prepare(case, inputs)
    (out,) = launch.run()
    assert BENCH.check(inputs, expected, (out,), launch).rms < 1e-2
    with pytest.raises(WrongResult, match="off by|RMS"):
        BENCH.check(inputs, expected, (out * 1.1,), launch)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"cache": "int8"}, "`cache` must be one of same, float8_e4m3fn"),
        ({"tree": 1}, "`tree` must be true or false"),
        ({"tree": True, "new": 65}, "`tree` must be true or false, and false for more than 64"),
    ],
)
def test_sizes_that_it_does_not_take(params, text):
    assert BENCH.invalid({**BENCH.params, **params}).startswith(text)


def test_bytes_of_a_float8_cache():
    of = {cache: BENCH.bytes_moved(prepared(cache=cache)[0]) for cache in ("same", "float8_e4m3fn")}
    assert of["same"] - of["float8_e4m3fn"] == 2 * 41 * 2 * 16
