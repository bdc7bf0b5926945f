# SPDX-License-Identifier: Apache-2.0
"""copy_transpose with PyTorch and without a GPU: reference, public function, registration."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-9, 10, shape, generator=generator).float().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4), (4, 0), (2, 3, 4), (0, 3, 4)])
def test_every_dtype(dtype, shape):
    x = draw(*shape, dtype=dtype)
    got = tiercel.copy_transpose(x)
    assert got.dtype == dtype and got.is_contiguous()
    assert got.float().tolist() == x.float().transpose(-2, -1).tolist()
    out = torch.empty_like(got)
    assert tiercel.copy_transpose(x, out=out) is out
    assert out.float().tolist() == got.float().tolist()


def test_it_is_a_copy_even_where_a_view_would_do():
    for x in (draw(1, 5), draw(5, 1), draw(4, 6).t()):
        got = tiercel.copy_transpose(x)
        got.fill_(77)
        assert not (x == 77).any()


def test_strided():
    base = draw(6, 8, 10)
    for x in (base[:, ::2], base[:, :, 1:4], base[::2], base[0].t(), base[0, :1].expand(4, 10)):
        assert torch.equal(tiercel.copy_transpose(x), x.transpose(-2, -1))


BAD = [
    (
        {"x": torch.zeros(1, 2, 3, 4)},
        ValueError,
        "`x` must have 2 or 3 dimensions, got 4 (shape [1, 2, 3, 4])",
    ),
    ({"tile_size": 16}, ValueError, "`tile_size` must be 32, 64 or 128, got 16"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(changes, error, text):
    with pytest.raises(error) as info:
        tiercel.copy_transpose(**({"x": torch.zeros(4, 8)} | changes))
    assert str(info.value) == f"copy_transpose: {text}"


def test_gradient():
    for shape in ((3, 4), (2, 3, 4)):
        x = draw(*shape).double().requires_grad_()
        assert torch.autograd.gradcheck(tiercel.ref.copy_transpose, x)
        x = draw(*shape).requires_grad_()
        pull = draw(*shape[:-2], 4, 3)
        (grad,) = torch.autograd.grad((tiercel.copy_transpose(x) * pull).sum(), x)
        assert torch.equal(grad, pull.transpose(-2, -1))
    with pytest.raises(RuntimeError, match="there is no derivative for `out=`"):
        tiercel.copy_transpose(x, out=torch.empty(2, 4, 3))


def test_transforms():
    x = draw(4, 3, 5)
    assert torch.equal(torch.vmap(tiercel.copy_transpose)(x), x.transpose(-2, -1))
