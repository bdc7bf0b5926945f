# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d on an H100 or H200, against float64."""

import pytest
import torch

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def wide(*tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


def near(got, due, dtype):
    torch.testing.assert_close(got.double(), due.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


def starts_of(count, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(rows + 1, (count - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([rows])]).int().cuda()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 33, 24), (2, 300, 136)])
def test_small(shape, width, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], width, dtype=dtype, seed=1)
    bias = normal(shape[-1], dtype=dtype, seed=2)
    got = tiercel.causal_conv1d(x, weight, bias, activation="silu")
    near(got, ref.causal_conv1d(*wide(x, weight, bias), None, "silu"), dtype)
    starts = starts_of(5, shape[0] * shape[1])
    x = x.flatten(0, 1)
    got = tiercel.causal_conv1d(x, weight, cu_seqlens=starts)
    near(got, ref.causal_conv1d(*wide(x, weight), None, starts), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 65536, 2048), (4, 4096, 8192), (256, 3, 8192)])
def test_large(shape, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], 4, dtype=dtype, seed=1)
    bias = normal(shape[-1], dtype=dtype, seed=2)
    got = tiercel.causal_conv1d(x, weight, bias, activation="silu")
    padded = torch.nn.functional.pad(x.float().transpose(1, 2), (3, 0))
    due = torch.nn.functional.conv1d(
        padded, weight.float()[:, None], bias.float(), groups=shape[-1]
    )
    near(got, torch.nn.functional.silu(due).transpose(1, 2), dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 1, 40), (6, 2, 40), (6, 50, 40), (64, 1, 2048)])
def test_update(shape, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], 4, dtype=dtype, seed=1)
    pool = normal(2 * shape[0], 3, shape[-1], dtype=dtype, seed=2)
    indices = torch.randperm(2 * shape[0], device="cuda")[: shape[0]].int()
    indices[1::5] = -1
    flags = torch.arange(shape[0], device="cuda") % 3 != 0
    due, due_pool = torch.empty_like(x).double(), pool.double()
    ref.causal_conv1d_update(*wide(x), due_pool, *wide(weight), due, None, indices, flags)
    got = torch.empty_like(x)
    tiercel.causal_conv1d_update(x, pool, weight, got, state_indices=indices, has_state=flags)
    near(got, due, dtype)
    assert torch.equal(pool.double(), due_pool)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_update_of_packed_sequences(count):
    x, weight = normal(1, 5000, 1024), normal(1024, 4, seed=1)
    starts = starts_of(count, 5000)
    pool = normal(count, 3, 1024, seed=2)
    due, due_pool = torch.empty_like(x).double(), pool.double()
    ref.causal_conv1d_update(
        *wide(x), due_pool, *wide(weight), due, cu_seqlens=starts, activation="silu"
    )
    got = torch.empty_like(x)
    tiercel.causal_conv1d_update(x, pool, weight, got, cu_seqlens=starts, activation="silu")
    near(got, due, x.dtype)
    assert torch.equal(pool.double(), due_pool)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(2, 70, 36), (1, 400, 40), (500, 24)])
def test_gradients(shape, activation, dtype):
    leaves = [
        normal(*size, dtype=dtype, seed=seed).requires_grad_()
        for seed, size in enumerate([shape, (shape[-1], 4), shape[-1:]])
    ]
    starts = starts_of(9, shape[0]) if len(shape) == 2 else None
    grad = normal(*shape, dtype=dtype, seed=9)
    out = tiercel.causal_conv1d(*leaves, activation=activation, cu_seqlens=starts)
    got = torch.autograd.grad(out, leaves, grad)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    due = torch.autograd.grad(ref.causal_conv1d(*exact, starts, activation), exact, grad.double())
    near(got[0], due[0], dtype)
    for one, all_ in zip(got[1:], due[1:], strict=True):
        error = (one.double() - all_).abs().max() / all_.abs().max()
        assert error < NEAR[dtype]


def test_gradients_of_long_sequences_are_reproducible():
    x = normal(2, 16384, 2048).requires_grad_()
    weight = normal(2048, 4, seed=1).requires_grad_()
    grad = normal(2, 16384, 2048, seed=2)

    def gradients():
        out = tiercel.causal_conv1d(x, weight, activation="silu")
        return torch.autograd.grad(out, (x, weight), grad)

    first, again = gradients(), gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    exact = [t.detach().float().requires_grad_() for t in (x, weight)]
    padded = torch.nn.functional.pad(exact[0].transpose(1, 2), (3, 0))
    out = torch.nn.functional.conv1d(padded, exact[1][:, None], groups=2048).transpose(1, 2)
    due = torch.autograd.grad(torch.nn.functional.silu(out), exact, grad.float())
    near(first[0], due[0], x.dtype)
    assert (first[1].float() - due[1]).abs().max() < 2**-8 * due[1].abs().max()


def test_graph_in_the_first_call():
    x, weight = normal(16, 1, 2048), normal(2048, 4, seed=1)
    pool = normal(16, 3, 2048, seed=2)
    due_pool = pool.clone()
    out = torch.empty_like(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        tiercel.causal_conv1d_update(x, pool, weight, out, activation="silu")
    for seed in range(4):
        x.copy_(normal(16, 1, 2048, seed=seed))
        graph.replay()
        due = torch.empty_like(x)
        ref.causal_conv1d_update(x, due_pool, weight, due, activation="silu")
        near(out, due, x.dtype)
        assert torch.equal(pool, due_pool)
