# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm with PyTorch and without a GPU."""

import pytest
import torch

import tiercel

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _on_ref():
    with tiercel.use_backend("ref"):
        yield


def data(rows=20, groups=4, columns=16, k=24, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    w = (torch.randn(groups, columns, k, generator=generator) * k**-0.5).to(dtype)
    return x, w


@pytest.mark.parametrize("offsets", [[0, 3, 3, 11, 20], [2, 2, 9, 10, 15], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_by_the_definition(offsets, dtype):
    x, w = data()
    got = tiercel.grouped_gemm(x, w, torch.tensor(offsets, dtype=dtype))
    due = torch.zeros(20, 16, dtype=torch.float64)
    for row in range(20):
        for group in range(4):
            if offsets[group] <= row < offsets[group + 1]:
                due[row] = w[group].double() @ x[row].double()
    torch.testing.assert_close(got.double(), due, rtol=8e-3, atol=1e-3)


def test_opcheck():
    x, w = data()
    offsets = torch.tensor([0, 5, 9, 9, 20], dtype=torch.int32)
    torch.library.opcheck(torch.ops.tiercel.grouped_gemm, (x, w, offsets))


BAD = [
    (0, lambda x: x.float(), TypeError, "`x` must have dtype bfloat16 or float16, got float32"),
    (1, lambda w: w.half(), TypeError, "`w` must have dtype bfloat16, got float16"),
    (1, lambda w: w[:, :, :8], ValueError, "`w` must have shape [E, N, K] = [4, 16, 24], got"),
    (2, lambda o: o[:4], ValueError, "`offsets` must have shape [E + 1] = [5], got [4]"),
    (2, lambda o: o.float(), TypeError, "`offsets` must have dtype int32 or int64, got float32"),
    (2, lambda o: o.repeat(2)[::2], ValueError, "`offsets` must be contiguous, got strides [2]"),
]


@pytest.mark.parametrize(("place", "change", "error", "text"), BAD)
def test_bad_arguments_are_named(place, change, error, text):
    values = [*data(), torch.arange(0, 25, 5, dtype=torch.int32)]
    values[place] = change(values[place])
    with pytest.raises(error) as info:
        tiercel.grouped_gemm(*values)
    assert str(info.value).startswith(f"grouped_gemm: {text}")


def test_a_tensor_that_requires_grad_is_refused():
    x, w = data()
    with pytest.raises(RuntimeError, match="grouped_gemm: there is no derivative"):
        tiercel.grouped_gemm(x.requires_grad_(), w, torch.arange(5, dtype=torch.int32))
