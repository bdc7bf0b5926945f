# SPDX-License-Identifier: Apache-2.0
"""attention's gradients on the emulator, against float64."""

import pytest
import torch
from support.attention import compare_gradients, limits
from support.emulator import kernels
from support.emulator import options as running
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiercel
from tiercel.ops.attention.reference import attention_backward as reference

pytestmark = pytest.mark.torch


def gradients(tensors, deterministic=False, **options):
    """(dq, dk, dv), which were NaN before."""
    scale = tensors[1].shape[-1] ** -0.5
    found = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
    rest = (*limits(options), scale, options.get("softcap", 0.0), deterministic)
    size = kernels.attention_backward_plan(*tensors, *found, None, *rest)["workspace"]
    kernels.attention_backward(*tensors, *found, torch.full((size,), torch.nan), *rest)
    return found


def draw(batch, seq_q, seq_k, heads, d, dtype=torch.bfloat16, with_lse=False, **options):
    """(grad, q, k, v, out, lse, grad_lse) as a launch takes them, and the truth. `d` may be two
    head dimensions, the second one that of v."""
    d, d_v = d if isinstance(d, tuple) else (d, d)
    generator = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    q, grad = (rand(batch, seq_q, heads[0], columns).to(dtype) for columns in (d, d_v))
    k, v = (rand(batch, seq_k, heads[1], columns).to(dtype) for columns in (d, d_v))
    grad_lse = rand(batch, heads[0], seq_q) if with_lse else None
    doubles = [x.double() for x in (grad, q, k, v)]
    out, lse = tiercel.ref.attention(*doubles[1:], return_lse=True, **options)
    truth = reference(*doubles, out, lse, grad_lse=grad_lse, **options)
    return (grad, q, k, v, out.to(dtype), lse.float(), grad_lse), truth


def check(*sizes, **options):
    tensors, truth = draw(*sizes, **options)
    options.pop("with_lse", None)
    compare_gradients(gradients(tensors, **options), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}])
def test_every_kernel(d, dtype, options):
    check(1, 70, 140, (2, 1), d, dtype, **options)


@pytest.mark.parametrize(
    "d", [8, 72, (136, 128), (64, 128), (96, 40), (192, 8), 136, (256, 64), (64, 256), (8, 136)]
)
def test_head_dimensions_of_no_kernel_s_own(d):
    check(1, 65, 129, (1, 1), d, causal=True)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 70, 140, (2, 1)), {}),
        ((1, 200, 200, (1, 1)), {"causal": True}),
        ((2, 1, 1, (1, 1)), {}),
        ((1, 200, 60, (1, 1)), {"causal": True}),  # queries that see no key
        ((1, 150, 300, (4, 2)), {"window": (40, 5), "with_lse": True}),
    ],
)
def test_values_of_fewer_columns_than_keys(sizes, options):
    check(*sizes, (192, 128), **options)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((3, 70, 140, (4, 2)), {}),
        ((2, 200, 200, (1, 1)), {"causal": True}),
        ((2, 1, 1, (1, 1)), {}),
        ((2, 200, 60, (1, 1)), {"causal": True}),  # queries that see no key
        ((2, 60, 300, (1, 1)), {"window": (20, 0)}),  # keys that no query sees
        ((2, 150, 300, (4, 2)), {"window": (40, 5), "with_lse": True}),
        ((2, 150, 100, (2, 1)), {"window": (40, 5), "softcap": 2.0}),
    ],
)
def test_wide_heads(sizes, options):
    """Several batch entries: the kernel numbers the tiles of all of them in one sequence."""
    check(*sizes, 256, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_only_the_wide_kernel_takes_of_fewer_columns(dtype):
    check(2, 70, 140, (2, 1), (192, 128), dtype, causal=True, softcap=2.0)
    check(1, 70, 140, (1, 1), (192, 128), torch.float16)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1, (1, 1)), {}),
        ((1, 130, 70, (2, 1)), {"window": (0, 0)}),
        ((1, 200, 60, (1, 1)), {"causal": True}),  # queries that see no key
        ((1, 60, 300, (1, 1)), {"window": (20, 0)}),  # keys that no query sees
        ((1, 150, 300, (4, 2)), {"window": (40, 5), "with_lse": True}),
    ],
)
def test_edges(sizes, options):
    check(*sizes, 64, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 60)}])
@pytest.mark.parametrize("d", [64, (192, 128), 256])
def test_a_fixed_order(d, options):
    tensors, truth = draw(2, 200, 300, (2, 1), d, **options)
    found = gradients(tensors, deterministic=True, **options)
    compare_gradients(found, truth)
    again = gradients(tensors, deterministic=True, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("keys", [1, 2, 3])
def test_queries_that_see_few_keys(keys):
    """No worse than PyTorch's flash kernel, which rounds in the same places."""
    tensors, truth = draw(1, 5, keys, (128, 128), 128)
    found = gradients(tensors)
    grad, q, k, v = (x.transpose(1, 2) for x in tensors[:4])
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(*inputs).backward(grad)
    if keys == 1:  # a probability of 1, whatever q is
        assert found[0].abs().max() < 1e-5
    for ours, theirs, true in zip(found, inputs, truth, strict=True):
        error = (ours.double() - true).norm()
        other = (theirs.grad.transpose(1, 2).double() - true).norm()
        assert error <= 1.25 * other + 1e-4, (error / other).item()


@pytest.mark.parametrize("seed", [3, 11])
@pytest.mark.parametrize("d", [128, (192, 128), 256])
def test_warps_in_other_orders(d, seed):
    with running(seed=seed):
        check(1, 200, 140, (2, 1), d, causal=True)


def ordered(x, *order):
    """`x` with other strides: in memory, its dimensions are in this order."""
    back = [order.index(i) for i in range(4)]
    return x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("d", [64, 256])
def test_strides(d):
    tensors, truth = draw(2, 100, 100, (2, 2), d)
    packed = torch.stack(tensors[1:4], dim=2).unbind(2)
    heads_first = ordered(tensors[0], 0, 2, 1, 3)
    compare_gradients(gradients((heads_first, *packed, *tensors[4:])), truth)
    # Each tensor has strides of its own, and entries alternate in memory.
    grad, q, k, v, out, *sums = tensors
    grad, q, k = ordered(grad, 1, 0, 2, 3), ordered(q, 2, 1, 0, 3), ordered(k, 1, 2, 0, 3)
    compare_gradients(gradients((grad, q, k, v, ordered(out, 0, 2, 1, 3), *sums)), truth)


def test_strides_of_one_row():
    """A dimension of one row may have any stride."""
    tensors, truth = draw(3, 1, 1, (2, 1), 256)
    strange = [x.as_strided(x.shape, (x.stride(0), 3, *x.stride()[2:])) for x in tensors[:5]]
    compare_gradients(gradients((*strange, *tensors[5:])), truth)


def test_next_to_foreign_rows():
    """NaNs lie before and behind each entry's rows."""
    tensors, truth = draw(3, 70, 90, (2, 1), 200)
    grown = []
    for x in tensors[:5]:
        wide = torch.full((3, x.shape[1] + 8, *x.shape[2:]), torch.nan, dtype=x.dtype)
        wide[:, 4:-4] = x
        grown.append(wide[:, 4:-4])
    compare_gradients(gradients((*grown, *tensors[5:])), truth)
