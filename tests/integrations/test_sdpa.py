# SPDX-License-Identifier: Apache-2.0
"""`tiercel.integrations.torch`: torch's flash attention on our kernels."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tiercel
from tiercel.integrations import torch as door

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this torch has no registry of flash attention implementations",
)
NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
)


def _right(q, k, v, causal=False, scale=None):
    """``[..., S, D]`` in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.dim() == 4)


def _close(got, right):
    """In bfloat16; of a sum over many rows single elements may be further off."""
    error = (got.double() - right.double()).norm() / right.double().norm()
    assert got.shape == right.shape and error < 0.015, float(error)


def _inputs(heads_first=True, d=16, heads=2, sq=5, sk=5, device="cpu", dtype=torch.bfloat16):
    """q, k and v in both of the layouts that models have, as SDPA takes them."""
    torch.manual_seed(0)
    made = []
    for h, s in ((2 * heads, sq), (heads, sk), (heads, sk)):
        shape = (2, h, s, d) if heads_first else (2, s, h, d)
        x = torch.randn(shape, dtype=dtype, device=device)
        made.append(x if heads_first else x.transpose(1, 2))
    return made


@pytest.fixture
def own(monkeypatch):
    """The implementation for the CPU, where torch has none of its own, with stand-ins for that."""
    calls = []
    library = torch.library.Library("aten", "IMPL")

    def stand_in(name):
        def run(*args, **named):
            calls.append((name, args, named))
            tensors = [torch.empty_like(x) for x in args[:3]]
            if name.endswith("backward"):
                return tuple(torch.empty_like(x) for x in args[1:4])
            more = (None, None, 1, 1) if name.startswith("_scaled") else ()
            return (tensors[0], args[0].new_zeros(1), *more, *tensors)

        return run

    for name in NAMES:
        library.impl(name, stand_in(name), "CPU")
    monkeypatch.setattr(door.platform, "why_not", lambda device: None)
    monkeypatch.setattr(door, "has_kernels", lambda *_: True)
    implementation = door._Implementation("CPU")
    with tiercel.use_backend("ref"):
        yield calls
    implementation.remove()
    calls.clear()
    getattr(torch.ops.aten, NAMES[0])(*_inputs())
    assert [call[0] for call in calls] == [NAMES[0]]  # undone
    library._destroy()


@needs_registry
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("d", [16, 256])
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3)])
def test_sdpa(own, heads_first, d, causal, scale):
    inputs = _inputs(heads_first, d)
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    found = forward(*leaves, 0.0, causal, scale=scale)
    again = [x.detach().double().requires_grad_() for x in inputs]
    right = _right(*again, causal, scale)
    _close(found[0], right)
    # The strides that torch's fake kernels promise to compiled graphs.
    assert found[0].stride() == torch.empty_like(inputs[0]).stride()
    assert found[1].shape == inputs[0].shape[:3] and found[4:6] == (5, 5)
    grad = torch.randn_like(found[0])
    found[0].backward(grad)
    right.backward(grad.double())
    for got, leaf in zip(leaves, again, strict=True):
        _close(got.grad, leaf.grad)
    assert not own


@needs_registry
def test_gradients_have_the_strides_of_their_inputs(own):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    for heads_first in (True, False):
        inputs = _inputs(heads_first)
        out, lse, *_, state, unused, _ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs)
        saved = (*inputs, out, lse, None, None, 5, 5, 0.0, False, state, unused)
        for got, x in zip(backward(torch.ones_like(out), *saved), inputs, strict=True):
            assert got.stride() == torch.empty_like(x).stride()


@needs_registry
@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ({}, {"dropout_p": 0.5}),
        ({}, {"return_debug_mask": True}),
        ({"sk": 7}, {"is_causal": True}),
        ({"d": 12}, {}),
        ({"d": 264}, {}),
        ({"sk": 0}, {}),
        ({"dtype": torch.float32}, {}),
    ],
)
def test_what_runs_on_torchs_own(own, inputs, options):
    torch.ops.aten._scaled_dot_product_flash_attention(*_inputs(**inputs), **options)
    assert [call[0] for call in own] == [NAMES[0]]
    _, args, named = own[0]
    given = dict(zip(("dropout_p", "is_causal", "return_debug_mask"), args[3:], strict=False))
    assert {**given, **named}.items() >= options.items()


@needs_registry
def test_gradients_without_kernels_are_torchs_own(own, monkeypatch):
    monkeypatch.setattr(door, "has_kernels", lambda *_: False)
    leaves = [x.requires_grad_() for x in _inputs()]
    found = torch.ops.aten._scaled_dot_product_flash_attention(*leaves)
    assert not own
    found[0].sum().backward()
    assert [call[0] for call in own] == [NAMES[1]]


@needs_registry
def test_packed(own):
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, h, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(q, k, v, starts, starts, 5, 5, 0.0, True, False, scale=0.2)
    for rows in (slice(0, 3), slice(3, 8)):
        right = _right(*(x[None, rows].transpose(1, 2) for x in (q, k, v)), True, 0.2)
        _close(out[rows], right[0].transpose(0, 1))
    assert lse.shape == (4, 8) and not own
    window = {"window_size_left": 0, "window_size_right": 0}
    alone = forward(q, k, v, starts, starts, 5, 5, 0.0, False, False, **window)[0]
    _close(alone, v.repeat_interleave(2, 1))
    # A query that sees no key has an infinity, as torch's backward wants it.
    keys = torch.tensor([0, 0, 0, 8], dtype=torch.int32)
    lse = forward(q, k, v, starts, keys, 5, 8, 0.0, False, False)[1]
    assert (lse[:, :3] == math.inf).all() and lse[:, 3:].isfinite().all() and not own
    used = {"seqused_k": torch.tensor([3, 0, 5], dtype=torch.int32)}
    forward(q, k, v, starts, starts, 5, 5, 0.0, True, False, **used)
    forward(q, k, v, starts, starts, 5, 5, 0.1, True, False)
    assert [call[0] for call in own] == [NAMES[2]] * 2
    assert own[0][2]["seqused_k"] is used["seqused_k"]


@needs_registry
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize(("causal", "d"), [(False, 16), (True, 16), (True, 256)])
def test_gradients_of_packed(own, causal, d, window):
    """Torch's formula of the gradient passes an infinity where no key is seen."""
    starts = [torch.tensor(x, dtype=torch.int32) for x in ((0, 3, 3, 8), (0, 0, 2, 8))]
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(8, h, d, dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    left, right = window or (None, None)
    windows = {"window_size_left": left, "window_size_right": right}
    call = (*starts, 5, 6, 0.0, causal)
    ops = torch.ops.aten
    out, lse, state, unused, _ = ops._flash_attention_forward(
        q, k, v, *call, False, scale=0.2, **windows
    )
    saved = (out, lse, *call, state, unused)
    found = ops._flash_attention_backward(grad, q, k, v, *saved, scale=0.2, **windows)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    options = {"causal": causal, "window": window, "scale": 0.2}
    right = tiercel.ref.attention_varlen(*leaves, *starts, 5, 6, **options)
    for got, truth in zip(found, torch.autograd.grad(right, leaves, grad.double()), strict=True):
        _close(got, truth)
    assert not own


@needs_registry
def test_gradients_of_packed_that_run_on_torchs_own(own):
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    for d, dropout, kind in (
        (264, 0.0, torch.int32),
        (16, 0.5, torch.int32),
        (16, 0.0, torch.int64),
    ):
        q = torch.randn(8, 2, d, dtype=torch.bfloat16)
        lse, state = torch.zeros(2, 8), torch.zeros(2, dtype=torch.uint64)
        call = (q, lse, starts.to(kind), starts.to(kind), 5, 5, dropout, True, state, state)
        own.clear()
        torch.ops.aten._flash_attention_backward(q, q, q, q, *call, window_size_left=3)
        assert [call[0] for call in own] == [NAMES[3]]
        assert own[0][2]["window_size_left"] == 3


@needs_registry
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a PyTorch without CUDA")
def test_without_cuda():
    before = torch._C._get_sdp_priority_order()
    with pytest.raises(RuntimeError, match="needs a PyTorch with CUDA"):
        door.enable_sdpa()
    assert torch.nn.attention.current_flash_attention_impl() is None
    door.disable_sdpa()
    assert torch._C._get_sdp_priority_order() == before


def test_an_older_torch(monkeypatch):
    for name in ("register_flash_attention_impl", "current_flash_attention_impl"):
        monkeypatch.delattr(torch.nn.attention, name, raising=False)
    with pytest.raises(RuntimeError, match=r"enable_sdpa needs PyTorch 2\.11 or newer"):
        door.enable_sdpa()
    door.disable_sdpa()


@pytest.fixture
def enabled():
    # Torch sets its own order at the first call for a GPU.
    few = torch.ones(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(few, few, few)
    before = torch._C._get_sdp_priority_order()
    door.enable_sdpa()
    door.enable_sdpa()
    yield
    door.disable_sdpa()
    assert torch._C._get_sdp_priority_order() == before


def _is_torchs_own(function):
    """True if torch's flash attention or cuDNN's is among the kernels that it launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = {event.name for event in profile.events() if event.device_type == cuda}
    assert names
    return any(own in name for own in ("flash_fwd", "flash_bwd", "cudnn") for name in names)


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_on_a_gpu(enabled, d, heads_first, compiled):
    inputs = _inputs(heads_first, d=d, sq=300, sk=300, device="cuda")
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch._dynamo.reset()

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    run = torch.compile(attend, fullgraph=True) if compiled else attend
    out = run(*leaves)
    again = [x.detach().double().requires_grad_() for x in inputs]
    right = _right(*again, causal=True)
    _close(out, right)
    grad = torch.randn_like(out)
    out.backward(grad)
    right.backward(grad.double())
    for got, leaf in zip(leaves, again, strict=True):
        _close(got.grad, leaf.grad)
    assert not _is_torchs_own(lambda: run(*leaves).backward(grad))
    with torch.no_grad():
        assert not _is_torchs_own(lambda: run(*inputs))
        door.disable_sdpa()
        assert _is_torchs_own(lambda: attend(*inputs))
        door.enable_sdpa()


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 256])
def test_nested_tensors(enabled, d):
    torch.manual_seed(0)
    lengths, heads = (7, 200, 33), 4

    def nested():
        rows = [
            torch.randn(n, heads, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in lengths
        ]
        return rows, torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)

    (qs, q), (ks, k), (vs, v) = nested(), nested(), nested()
    out = sdpa(q, k, v, is_causal=True).transpose(1, 2)
    total = out.values().float().square().sum()
    grads = torch.autograd.grad(total, [*qs, *ks, *vs])
    again = [[x.detach().double().requires_grad_() for x in xs] for xs in (qs, ks, vs)]
    found = out.unbind()
    sums = 0
    for i in range(len(lengths)):
        right = _right(*(xs[i][None].transpose(1, 2) for xs in again), causal=True)
        right = right[0].transpose(0, 1)
        _close(found[i], right)
        sums = sums + right.square().sum()
    rights = torch.autograd.grad(sums, [x for xs in again for x in xs])
    for got, right in zip(grads, rights, strict=True):
        _close(got, right)
    with torch.no_grad():
        assert not _is_torchs_own(lambda: sdpa(q, k, v, is_causal=True))

    def step():
        sdpa(q, k, v, is_causal=True).transpose(1, 2).values().float().square().sum().backward()

    assert not _is_torchs_own(step)
