# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope and its gradients on the emulator, against autograd through float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.near import BF16, F16, F32, normal

from tiercel.ops.rotary import reference as ref

OPTIONS = ("positions", "cos_sin_cache", "q_weight", "k_weight")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(tokens, heads, kv_heads, size, rotated, dtype, angles=F32, strided=False):
    packed = normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, _ = packed.split([heads, kv_heads, kv_heads], dim=1)
    turns = torch.rand(50, rotated // 2) * 6.3
    return {
        "q": q if strided else q.contiguous(),
        "k": k if strided else k.contiguous(),
        "positions": torch.randint(50, (tokens,)),
        "cos_sin_cache": torch.cat([turns.cos(), turns.sin()], dim=1).to(angles),
        "q_weight": torch.rand(size) + 0.5,
        "k_weight": normal(size, dtype=dtype),
    }


def exact(given, grads, interleaved, eps):
    """Results and gradients in float64; None where there is no weight."""
    wide = {
        n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()
    }
    names = [n for n in ("q", "k", *OPTIONS[2:]) if wide[n] is not None]
    leaves = {n: wide[n].requires_grad_() for n in names}
    out = ref.qk_norm_rope(**wide, eps=eps, interleaved=interleaved)
    found = torch.autograd.grad(
        out, list(leaves.values()), [g.double() for g in grads], materialize_grads=True
    )
    return [t.detach() for t in out], dict(zip(leaves, found, strict=True))


def assert_near(got, due):
    """Rounded once, and float32's sums."""
    assert got.shape == due.shape
    if got.numel() == 0:
        return
    half_unit = torch.finfo(got.dtype).eps / 2
    allowed = 1.02 * half_unit * due.abs() + 1e-5 * due.abs().max() + 1e-6
    assert ((got.double() - due).abs() <= allowed).all()


def check(given, interleaved=False, wanted=(True, True), eps=1e-5):
    grads = [normal(*given[n].shape, dtype=given[n].dtype) for n in "qk"]
    due, due_grads = exact(given, grads, interleaved, eps)
    rest = [given[n] for n in OPTIONS]
    out = sm90("qk_norm_rope")(given["q"], given["k"], *rest, eps, interleaved, None)
    for got, exactly in zip(out, due, strict=True):
        assert_near(got, exactly)
    backward = sm90("qk_norm_rope_backward")
    call = (given["q"], given["k"], *grads, *rest, eps, interleaved, *wanted, None)
    found = dict(zip(("q", "k", *OPTIONS[2:]), backward(*call), strict=True))
    for name, want in zip(OPTIONS[2:], wanted, strict=True):
        if not want or given[name] is None:
            assert found.pop(name).numel() == 0
    for name, got in found.items():
        assert got.dtype == given[name].dtype
        assert_near(got, due_grads[name])
    again = dict(zip(("q", "k", *OPTIONS[2:]), backward(*call), strict=True))
    assert all(torch.equal(got, again[name]) for name, got in found.items())
    return found


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "rotated"),
    [
        (3, 4, 2, 128, 128),
        (5, 3, 1, 64, 32),
        (2, 1, 2, 80, 16),
        (2, 2, 1, 512, 0),
        (9, 1, 1, 16, 16),
        (2, 3, 1, 8, 0),
        (4, 2, 0, 64, 64),
    ],
)
def test_sizes(tokens, heads, kv_heads, size, rotated, interleaved, dtype):
    angles = dtype if size == 64 else F32
    check(make(tokens, heads, kv_heads, size, rotated, dtype, angles, size == 128), interleaved)


@pytest.mark.parametrize("missing", [("q_weight",), ("k_weight",), ("q_weight", "k_weight")])
def test_heads_without_a_norm(missing):
    given = make(7, 3, 2, 64, 32, BF16)
    check(given | dict.fromkeys(missing))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_of_weights_that_nobody_wants(wanted):
    given = make(7, 3, 2, 64, 64, BF16)
    all_of_them = check(given)
    torch.manual_seed(0)
    some = check(make(7, 3, 2, 64, 64, BF16), wanted=wanted)
    assert all(torch.equal(all_of_them[name], got) for name, got in some.items())


def test_blocks_of_several_rows_each():
    """More rows than all blocks take in one step, of both tensors; the last step is not full."""
    given = make(1061, 50, 18, 16, 16, BF16)
    found = check(given)
    grads = [normal(*given[n].shape, dtype=BF16) for n in "qk"]
    rest = [given[n] for n in OPTIONS]
    outs = [torch.empty_like(given[n]) for n in "qk"]
    plan = kernels.qk_norm_rope_backward_plan(
        *(given["q"], given["k"], *grads, *rest, 1e-5, False, *outs, None, None, None)
    )
    assert plan["grid"] == plan["parts"] == 528 and plan["lanes"] == 1
    assert found["q_weight"].abs().sum() > 0


def test_the_sums_do_not_depend_on_the_device():
    given = make(300, 8, 3, 16, 16, BF16)
    torch.manual_seed(3)
    found = check(given)
    torch.manual_seed(3)
    with options(multiprocessors=7):
        again = check(given)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_eps_of_0():
    """Rows that a block lacks in its last step add nothing, not 0 times infinity."""
    found = check(make(3, 3, 2, 128, 128, BF16), eps=0.0)
    assert not found["q_weight"].isnan().any()


def test_no_token():
    given = make(0, 3, 2, 64, 32, BF16)
    found = check(given)
    assert not found["q_weight"].any() and not found["k_weight"].any()


def test_positions_that_are_no_rows():
    given = make(6, 2, 1, 64, 64, BF16)
    given["positions"] = torch.tensor([-1, 50, 2**40, -(2**40), 49, 0])
    check(given)


@pytest.mark.parametrize("large", [1e-20, 1e4])
def test_large_and_small_heads(large):
    given = make(4, 2, 1, 64, 64, BF16)
    check(given | {"q": given["q"] * large})


def test_a_head_that_is_not_a_number_stays_alone():
    given = make(4, 2, 1, 64, 64, BF16)
    grads = [normal(*given[n].shape, dtype=BF16) for n in "qk"]
    given["q"][1, 0, 3] = float("nan")
    rest = [given[n] for n in OPTIONS]
    backward = sm90("qk_norm_rope_backward")
    found = backward(given["q"], given["k"], *grads, *rest, 1e-5, False, False, False, None)
    bad = found[0].isnan().any(dim=-1)
    assert bad[1, 0] and bad.sum() == 1 and not found[1].isnan().any()
