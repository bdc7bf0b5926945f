# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not plain, and modes of torch that change what a call means, for every op."""

import os
import types

import pytest
import torch
from support import contract_calls as calls
from torch._subclasses.fake_tensor import FakeTensorMode

import tiercel
from tiercel.core import dispatch as _op
from tiercel.core import platform

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning"),
]
# What these are made of says which argument is wrong.
OF_OTHERS = {"reduce_sum": "reduce", "fused_mlp": "(gated_linear|linear_act)"}


def sparse_coo(like):
    return torch.sparse_coo_tensor(
        torch.zeros(like.dim(), 0, dtype=torch.int64),
        torch.empty(0, dtype=like.dtype),
        like.shape,
        check_invariants=False,
    )


def sparse_csr(like):
    rows = torch.zeros(like.shape[0] + 1, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    return torch.sparse_csr_tensor(rows, none, torch.empty(0, dtype=like.dtype), like.shape)


def nested(like):
    return torch.nested.nested_tensor(list(like))


def jagged(like):
    return torch.nested.nested_tensor(list(like), layout=torch.jagged)


def fake_of_gpu(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def on_cpu(op, name):
    return op == "nvfp4_gemv" and name in ("scale_a", "scale_b")


def _made(layout, like):
    """A tensor of this layout, or None where torch has none of that dtype or rank."""
    try:
        return layout(like)
    except (RuntimeError, NotImplementedError):
        return None


@pytest.mark.parametrize("layout", [sparse_coo, sparse_csr, nested, jagged])
@pytest.mark.parametrize("op", calls.OPS)
def test_a_layout_that_is_not_strided_is_refused(op, layout):
    values = calls.arguments(op)
    tried = 0
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dim() < (2 if layout is sparse_csr else 1):
            continue
        odd = _made(layout, value)
        if odd is None:
            continue
        for backend in (None, "ref"):
            with pytest.raises(TypeError) as info:
                calls.function(op)(**{**values, name: odd}, backend=backend)
            said = "a nested tensor" if odd.is_nested else f"layout {odd.layout}"
            info.match(rf"^{OF_OTHERS.get(op, op)}: `\w+` must be a dense tensor, got {said}$")
            if op not in OF_OTHERS:
                info.match(f"`{name}`")
        tried += 1
    assert tried or layout is not sparse_coo


@pytest.mark.parametrize("op", calls.OPS)
def test_meta_tensors(op):
    values = calls.arguments(op)
    expected = calls.function(op)(**calls.copied(values))
    there = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    pairs = zip(
        calls.tensors_of(calls.function(op)(**there)), calls.tensors_of(expected), strict=True
    )
    for got, due in pairs:
        assert (got.device.type, got.dtype, got.shape) == ("meta", due.dtype, due.shape)


@pytest.mark.parametrize("op", calls.OPS)
def test_fake_tensors(op):
    """Fake CUDA tensors, which torch.compile makes on a machine without a GPU, too."""
    values = calls.arguments(op)
    expected = calls.tensors_of(calls.function(op)(**calls.copied(values)))
    with FakeTensorMode() as mode:
        there = {
            name: mode.from_tensor(value) if on_cpu(op, name) else fake_of_gpu(value)
            for name, value in values.items()
        }
        found = calls.tensors_of(calls.function(op)(**there))
    for got, due in zip(found, expected, strict=True):
        assert (got.device.type, got.dtype, got.shape) == ("cuda", due.dtype, due.shape)


@pytest.mark.parametrize("op", calls.OPS)
def test_subclasses_and_negated_views(op):
    class Mine(torch.Tensor):
        pass

    values = calls.arguments(op)
    first = next(name for name, value in values.items() if isinstance(value, torch.Tensor))
    expected = calls.function(op)(**calls.copied(values))
    mine = calls.copied(values)
    mine[first] = mine[first].as_subclass(Mine)
    got = calls.tensors_of(calls.function(op)(**mine))
    calls.same([t.as_subclass(torch.Tensor) for t in got], expected)
    x = values[first]
    if x.dtype in (torch.float32, torch.float16):
        negated = torch.complex(torch.zeros_like(x), -x).conj().imag
        if negated.is_neg() and negated.dtype == x.dtype:
            calls.same(calls.function(op)(**{**calls.copied(values), first: negated}), expected)


@pytest.mark.parametrize("op", calls.OPS)
def test_quantised_tensors_are_refused(op):
    values = calls.arguments(op)
    name = next(name for name, value in values.items() if isinstance(value, torch.Tensor))
    odd = torch.quantize_per_tensor(torch.zeros(values[name].shape), 0.1, 0, torch.qint8)
    if op == "copy_transpose":
        pytest.skip("moves the bytes of any dtype")
    with pytest.raises(TypeError, match=r"must have dtype .*, got qint8"):
        calls.function(op)(**{**values, name: odd})


# Their work is divided by values of a tensor, which torch.vmap cannot see.
BY_VALUES = {
    "attention_varlen",
    "causal_conv1d_update",
    "fused_moe",
    "gated_delta_rule_decode",
    "grouped_gemm",
    "kv_cache_write",
    "mla_cache_write",
    "moe_align_block_size",
    "moe_down",
    "moe_up",
    "paged_attention",
    "qk_norm_rope_cache",
    "topk_softmax_align",
    "w4_moe",
}


@pytest.mark.parametrize("op", calls.OPS)
def test_vmap(op):
    values = calls.arguments(op)
    batched = {n: torch.stack([v, v]) for n, v in values.items() if isinstance(v, torch.Tensor)}
    rest = {name: value for name, value in values.items() if name not in batched}
    run = torch.vmap(lambda tensors: calls.function(op)(**tensors, **rest))
    if op in BY_VALUES:
        with pytest.raises(NotImplementedError, match=f"^{op}: torch.vmap is not supported for"):
            run(batched)
        return
    pairs = zip(
        calls.tensors_of(run(batched)),
        calls.tensors_of(calls.function(op)(**calls.copied(values))),
        strict=True,
    )
    for got, due in pairs:
        if got.dtype == torch.float4_e2m1fn_x2:
            got, due = got.view(torch.uint8), due.view(torch.uint8)
        for one in got:
            # A batched product may add up in another order.
            torch.testing.assert_close(one.double(), due.double(), rtol=0.2, atol=0.2)


@pytest.mark.parametrize("op", calls.OPS)
def test_inference_mode(op):
    values = calls.arguments(op)
    expected = calls.function(op)(**calls.copied(values))
    with torch.inference_mode():
        calls.same(calls.function(op)(**calls.copied(values)), expected)
        inference = calls.copied(values)
        calls.same(calls.function(op)(**calls.copied(inference)), expected)
    if op in calls.WRITING:
        return  # torch lets nobody write to such tensors outside of the mode
    calls.same(calls.function(op)(**inference), expected)
    # Parameters made outside of the mode, as a model has them.
    names = calls.float_arguments(op, values)
    wanted = {n: values[n].clone().requires_grad_() for n in names}
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            result = calls.function(op)(**{**values, **wanted})
        calls.same(result, expected)
        assert not any(t.requires_grad for t in calls.tensors_of(result))


def test_writing_to_tensors_of_inference_mode():
    with torch.inference_mode():
        x, out = torch.randn(4, 8), torch.empty(4, 8)
        tiercel.rms_norm(x, out=out)
        calls.same(out, tiercel.rms_norm(x))


def test_a_cuda_tensor_in_a_forked_child(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    op = _op.registry["topk_softmax"]
    text = (
        "^topk_softmax: CUDA cannot be used in a forked child process; use the 'spawn' start method"
    )
    for backend in (None, "ref", "sm90"):
        with pytest.raises(RuntimeError, match=text):
            op._run_resolved(backend, (types.SimpleNamespace(is_cuda=True), 2))
    tiercel.topk_softmax(torch.randn(2, 4), 2)  # others work there


def test_a_forked_child_leaves_the_fast_path():
    """There, PyTorch's own error would come first."""
    platform.ready.add(99)
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(platform.ready))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert 99 in platform.ready
    finally:
        platform.ready.discard(99)
