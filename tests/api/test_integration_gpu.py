# SPDX-License-Identifier: Apache-2.0
"""torch's modes, odd tensors and graphs with every op's kernels on the GPU."""

import pytest
import torch
from support import contract_calls as calls
from torch._dynamo.testing import CompileCounterWithBackend

import tiercel

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]


def close(got, expected):
    """Sums of some kernels are in no fixed order."""
    for a, b in zip(calls.tensors_of(got), calls.tensors_of(expected), strict=True):
        if a.is_floating_point() and a.element_size() > 1:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
        else:
            calls.same(a, b)


@pytest.mark.parametrize("op", calls.OPS)
def test_inference_mode(op):
    values = calls.arguments(op, device="cuda")
    expected = calls.function(op)(**calls.copied(values))
    with torch.inference_mode():
        close(calls.function(op)(**calls.copied(values)), expected)
        inside = calls.copied(values)
        close(calls.function(op)(**inside), expected)
    if op not in calls.WRITING:  # torch lets nobody write to such tensors outside of the mode
        close(calls.function(op)(**inside), expected)


def test_writing_to_tensors_of_inference_mode(no_fallback):
    with torch.inference_mode():
        x, out = (torch.randn(4, 64, device="cuda") for _ in range(2))
        tiercel.rms_norm(x, out=out)
        close(out, tiercel.rms_norm(x))


@pytest.mark.parametrize("op", calls.OPS)
def test_the_minimal_call_of_torch_ops(op):
    values = calls.without_defaults(op, calls.arguments(op, device="cuda"))
    ours, theirs = calls.copied(values), calls.copied(values)
    expected = calls.function(op)(*ours.values(), **calls.AS_OPERATOR.get(op, {}))
    got = getattr(torch.ops.tiercel, op)(*theirs.values())
    if op in calls.WRITING:
        got, expected = (
            [v for v in by_name.values() if isinstance(v, torch.Tensor)]
            for by_name in (theirs, ours)
        )
    close(got, expected)


@pytest.mark.parametrize("backend", [None, "ref", "sm90"])
@pytest.mark.parametrize("op", calls.OPS)
def test_sparse_tensors_are_refused(op, backend):
    values = calls.arguments(op, device="cuda")
    calls.function(op)(**calls.copied(values))  # the device is ready now
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            places = torch.zeros(value.dim(), 0, dtype=torch.int64, device=value.device)
            none = torch.empty(0, dtype=value.dtype, device=value.device)
            odd = torch.sparse_coo_tensor(places, none, value.shape, check_invariants=False)
            with pytest.raises(TypeError, match="must be a dense tensor, got layout torch.sparse"):
                calls.function(op)(**{**values, name: odd}, backend=backend)


FORKED = """
import os, torch, tiercel
scores = torch.randn(5, 64, device="cuda")
{before}
reader, writer = os.pipe()
if os.fork() == 0:
    try:
        {call}
        text = "no error"
    except Exception as error:
        text = f"{{type(error).__name__}}: {{error}}"
    os.write(writer, text.encode())
    os._exit(0)
print(os.read(reader, 10000).decode())
os.wait()
"""


@pytest.mark.parametrize("before", ["pass", "tiercel.topk_softmax(scores, 8)"])
@pytest.mark.parametrize(
    "call",
    [
        "tiercel.topk_softmax(scores, 8)",
        "tiercel.topk_softmax(scores, 8, backend='ref')",
        "tiercel.topk_softmax(scores.requires_grad_(), 8)",
        "torch.ops.tiercel.topk_softmax(scores, 8)",
        "tiercel.rms_norm(scores)",
        "tiercel.softmax_online(scores)",
    ],
)
def test_a_forked_child(run_python, before, call):
    told = run_python(FORKED.format(before=before, call=call)).stdout
    assert told.startswith("RuntimeError: ")
    assert "CUDA cannot be used in a forked child process; use the 'spawn' start method" in told


LENGTHS = (129, *range(128, 640, 32))


def test_lengths_of_packed_sequences(no_fallback):
    def run(tensors, starts, length):
        out = tiercel.attention_varlen(*tensors, starts, starts, length, length, causal=True)
        return out.float().square().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for length in LENGTHS:
        made = [torch.randn(2 * length, 4, 64, device="cuda").bfloat16() for _ in range(3)]
        leaves = [t.requires_grad_() for t in made]
        starts = torch.tensor([0, length, 2 * length], dtype=torch.int32, device="cuda")
        due = torch.autograd.grad(run(leaves, starts, length), leaves)
        got = torch.autograd.grad(compiled(leaves, starts, length), leaves)
        for a, b in zip(got, due, strict=True):
            assert (a.float() - b.float()).abs().max() <= 1e-2 * b.float().abs().max()
    assert counter.frame_count <= 2


def test_longest_of_a_cache(no_fallback):
    def run(values, longest):
        return tiercel.decode_attention(**values, max_seqused_k=longest)

    values = calls.arguments("decode_attention", 3, device="cuda")
    names = ("q", "k_cache", "v_cache", "page_table", "seqused_k")
    values = {name: values[name] for name in names}
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for longest in range(520, 540):
        torch.testing.assert_close(compiled(values, longest), run(values, longest))
    assert counter.frame_count <= 2
