# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope and its gradients on an H100 or H200."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

NAMES = ("q", "k", "q_weight", "k_weight")


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(3)
    like = {"device": "cuda", "generator": generator}

    def draw(tokens, heads, kv_heads, size, rotated, dtype=torch.bfloat16, strided=False):
        packed = torch.randn(tokens, heads + 2 * kv_heads, size, **like).to(dtype)
        q, k, _ = packed.split([heads, kv_heads, kv_heads], dim=1)
        angles = torch.rand(500, rotated // 2, **like) * 6.3
        return {
            "q": q if strided else q.contiguous(),
            "k": k if strided else k.contiguous(),
            "positions": torch.randint(500, (tokens,), **like),
            "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
            "q_weight": torch.rand(size, **like) + 0.5,
            "k_weight": torch.randn(size, **like).to(dtype),
        }

    return draw


def step(function, given, grads, interleaved):
    leaves = {n: given[n].detach().requires_grad_() for n in NAMES if given[n] is not None}
    out = function(**given | leaves, interleaved=interleaved)
    found = torch.autograd.grad(out, list(leaves.values()), grads, materialize_grads=True)
    return {
        "q_out": out[0].detach(),
        "k_out": out[1].detach(),
        **dict(zip(leaves, found, strict=True)),
    }


def assert_right(got, given, grads, interleaved):
    """float64, rounded once; float32's sums of as many numbers."""
    wide = {
        n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()
    }
    due = step(tiercel.ref.qk_norm_rope, wide, [g.double() for g in grads], interleaved)
    for name, exact in due.items():
        one = got[name]
        if one.numel() == 0:
            continue
        half_unit = torch.finfo(one.dtype).eps / 2
        sums = 2e-5 if name.endswith("weight") else 4e-6
        allowed = 1.02 * half_unit * exact.abs() + sums * exact.abs().max() + 1e-6
        error = (one.double() - exact).abs()
        assert (error <= allowed).all(), (name, error.max().item())


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [(128, 128), (64, 32), (80, 16), (256, 64), (512, 512), (8, 0)])
def test_sizes(make, size, interleaved, dtype):
    for tokens in (0, 1, 7, 300):
        for heads, kv_heads in ((32, 8), (1, 1), (5, 0)):
            given = make(tokens, heads, kv_heads, *size, dtype, strided=tokens == 7)
            grads = [
                torch.randn_like(given[n], memory_format=torch.contiguous_format) for n in "qk"
            ]
            got = step(tiercel.qk_norm_rope, given, grads, interleaved)
            assert_right(got, given, grads, interleaved)


@pytest.mark.parametrize("missing", [("q_weight",), ("q_weight", "k_weight")])
def test_heads_without_a_norm(make, missing):
    given = make(500, 8, 2, 128, 64) | dict.fromkeys(missing)
    grads = [torch.randn_like(given[n]) for n in "qk"]
    assert_right(step(tiercel.qk_norm_rope, given, grads, False), given, grads, False)


def test_many_tokens_give_equal_bits_again(make):
    given = make(8192, 32, 4, 128, 128, strided=True)
    grads = [torch.randn_like(given[n], memory_format=torch.contiguous_format) for n in "qk"]
    first = step(tiercel.qk_norm_rope, given, grads, False)
    assert_right(first, given, grads, False)
    for _ in range(3):
        again = step(tiercel.qk_norm_rope, given, grads, False)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_gradients_of_other_layouts(make):
    """Heads before tokens, and one expanded number."""
    given = make(64, 4, 2, 64, 64)
    grads = [torch.randn_like(given[n].transpose(0, 1).contiguous()).transpose(0, 1) for n in "qk"]
    assert_right(step(tiercel.qk_norm_rope, given, grads, False), given, grads, False)
    grads = [torch.ones(1, 1, 1, device="cuda").bfloat16().expand_as(given[n]) for n in "qk"]
    assert_right(step(tiercel.qk_norm_rope, given, grads, False), given, grads, False)


def test_a_graph_of_forward_and_backward(make):
    given = make(256, 8, 2, 128, 128)
    grads = [torch.randn_like(given[n]) for n in "qk"]
    step(tiercel.qk_norm_rope, given, grads, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(tiercel.qk_norm_rope, given, grads, False)
    for _ in range(3):
        given["q"].normal_()
        grads[1].normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(got, given, grads, False)


def test_compiled(make):
    given = make(200, 8, 2, 128, 128)
    grads = [torch.randn_like(given[n]) for n in "qk"]

    def function(q, k, positions, cos_sin_cache, q_weight, k_weight, interleaved):
        q, k = tiercel.qk_norm_rope(q, k, positions, cos_sin_cache, q_weight, k_weight)
        return q * 1.0, k * 1.0

    compiled = torch.compile(function, fullgraph=True)
    got = step(compiled, given, grads, False)
    due = step(tiercel.qk_norm_rope, given, grads, False)
    assert all(torch.equal(due[name], got[name]) for name in due)
