# SPDX-License-Identifier: Apache-2.0
"""What `tiercel smoke` takes for right: sums that cancel, and no kernel that is wrong."""

import pytest
import torch

from tiercel.ops.linear.contract import FP8_LINEAR
from tiercel.workbench.smoke.measure import _expected, compare

pytestmark = pytest.mark.torch
BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def case(request):
    """Inputs as smoke has them; with K = 1024, as what it times on a GPU, and fewer rows."""
    timed = FP8_LINEAR.timing["cuda"] if request.param == "cuda" else FP8_LINEAR.cases[2]
    sizes = {**timed.sizes, "M": 64, "N": 256}
    arguments = FP8_LINEAR.make(type(timed)(sizes, timed.dtype, timed.options), "cpu", 3)
    return arguments, _expected(FP8_LINEAR, arguments)


def product(arguments, **changes):
    """In float64, the sums alone."""
    given = arguments | changes
    rows, columns = (
        given[name].double() * given[f"{name}_scale"].double().reshape(-1, 1)
        for name in ("x", "weight")
    )
    return rows @ columns.T


def judge(case, sums):
    """Of what a kernel makes of these sums."""
    arguments, expected = case
    activation = torch.nn.functional.gelu if arguments["activation"] == "gelu" else lambda x: x
    out = activation(sums + arguments["bias"].double()).to(BF16)
    return compare(FP8_LINEAR, arguments, expected, (out,))[:2]


def magnitudes(arguments):
    return product(
        arguments, x=arguments["x"].float().abs(), weight=arguments["weight"].float().abs()
    )


def test_what_short_adders_lose_is_right(case):
    """Where a sum cancels, it is more than any fixed part of what is left."""
    arguments, _ = case
    sums, sizes = product(arguments), magnitudes(arguments)
    signs = torch.randint(0, 2, sums.shape) * 2 - 1
    assert judge(case, sums) == (1.0, None)
    assert judge(case, sums + signs * sizes * 2**-11.5) == (1.0, None)
    share, reason = judge(case, sums + signs * sizes * 2**-9)
    assert share == 0.0 and "64 of 64 rows of `out` are wrong" in reason


def test_a_wrong_k_block_is_wrong(case):
    """Of 32 products, as one instruction adds: left out, or read from the next row."""
    arguments, _ = case
    sums = product(arguments)
    wide = arguments["x"].float()
    wide[:, 32:64] = 0
    assert judge(case, product(arguments, x=wide))[0] == 0.0
    wide[:, 32:64] = arguments["x"].float().roll(1, 0)[:, 32:64]
    assert judge(case, product(arguments, x=wide))[0] == 0.0
    one = sums.clone()
    one[5, 128:] = product(arguments, x=wide)[5, 128:]
    share, reason = judge(case, one)
    assert share == 63 / 64 and reason.startswith("1 of 64 rows")


@pytest.mark.parametrize("name", ["x_scale", "weight_scale"])
def test_a_neighbours_scale_is_wrong(case, name):
    arguments, _ = case
    wrong = product(arguments, **{name: arguments[name].roll(1)})
    assert judge(case, wrong)[0] < 0.05
    assert judge(case, 1.03 * product(arguments))[0] < 0.05


def test_nan_and_infinities(case):
    arguments, expected = case
    sums = product(arguments)
    sums[3, 4] = torch.nan
    assert judge(case, sums)[0] == 63 / 64
    sums[3, 4] = torch.inf
    assert judge(case, sums)[0] == 63 / 64
    infinite = [due.index_fill(0, torch.tensor([3]), torch.inf) for due in expected]
    same = compare(FP8_LINEAR, arguments, tuple(infinite), tuple(t.to(BF16) for t in infinite))
    assert same[:2] == (1.0, None)
