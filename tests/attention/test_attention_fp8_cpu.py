# SPDX-License-Identifier: Apache-2.0
"""attention of float8_e4m3fn without a GPU: reference, factors, errors, registration."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

FLOAT8 = torch.float8_e4m3fn


def make(length=9, heads=2, d=16, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, heads, d, generator=generator).to(FLOAT8)


def arguments():
    return make(9, 4, seed=1), make(7, seed=2), make(7, seed=3)


def factors(*shape, seed=4):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def test_it_is_attention_of_what_the_tensors_stand_for():
    q, k, v = arguments()
    result, lse = tiercel.attention(q, k, v, causal=True, return_lse=True)
    truth, sums = tiercel.ref.attention(
        q.double(), k.double(), v.double(), causal=True, return_lse=True
    )
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == (3, 4, 9)
    torch.testing.assert_close(result.double(), truth, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums.double())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (3, 2)])
def test_factors(shape):
    q, k, v = arguments()
    scales = [factors(*shape, seed=seed) for seed in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    result = tiercel.attention(q, k, v, softcap=3.0, **named)
    of_heads = [scale.expand(3, 2).double()[:, None, :, None] for scale in scales]
    shared = of_heads[0].repeat_interleave(2, 2)
    wide = q.double() * shared, k.double() * of_heads[1], v.double() * of_heads[2]
    truth = tiercel.ref.attention(*wide, softcap=3.0)
    torch.testing.assert_close(result.double(), truth, rtol=2**-8, atol=1e-6)


def test_out():
    tensors = arguments()
    scale = factors(2)
    expected, sums = tiercel.attention(*tensors, v_descale=scale, return_lse=True)
    out = torch.empty(3, 9, 4, 16, dtype=torch.bfloat16)
    assert tiercel.attention(*tensors, v_descale=scale, out=out) is out
    assert torch.equal(out, expected)
    out.zero_()
    result, lse = tiercel.attention(*tensors, v_descale=scale, out=out, return_lse=True)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, sums)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            ValueError,
            r"`q_descale` must have shape \[B, Hk\] = \[3, 2\], \[Hk\] or one element, got \[4\]",
            {"q_descale": torch.ones(4)},
        ),
    ],
)
def test_bad_arguments(error, text, changes):
    given = dict(zip("qkv", arguments(), strict=True))
    for name, value in changes.items():
        given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(error, match=f"^attention: {text}"):
        tiercel.attention(**given)


def test_no_gradients():
    q, k, v = arguments()
    with pytest.raises(RuntimeError, match="attention: there is no derivative"):
        tiercel.attention(q.requires_grad_(), k, v)


def test_the_operator_refuses_factors_of_others():
    with pytest.raises(ValueError, match="`q_descale` must be None unless `q` is float8_e4m3fn"):
        torch.ops.tiercel.attention(*(x.bfloat16() for x in arguments()), q_descale=factors(1))


def test_compile_and_explain():
    tensors, scale = arguments(), factors(1)
    function = torch.compile(
        lambda *x: tiercel.attention(*x, causal=True, k_descale=scale, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = tiercel.attention(*tensors, causal=True, k_descale=scale, return_lse=True)
    torch.testing.assert_close(function(*tensors), expected)
    assert tiercel.explain(tiercel.attention, *tensors, k_descale=scale).backend == "ref"


def test_a_registered_backend_does_not_take_it():
    def mine(q, k, v, causal, window, scale, softcap, sinks, return_lse):
        raise AssertionError

    tiercel.backends.register(op="attention", name="mine", fn=mine, language="torch")
    try:
        with pytest.raises(NotImplementedError, match="does not take float8_e4m3fn"):
            tiercel.attention(*arguments(), backend="mine")
    finally:
        tiercel.backends.unregister("attention", "mine")
