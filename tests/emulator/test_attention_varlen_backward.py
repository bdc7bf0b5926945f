# SPDX-License-Identifier: Apache-2.0
"""attention_varlen's gradients on the emulator, against float64 and attention's."""

import pytest
import torch
from support.attention import compare_gradients, limits
from support.emulator import kernels, sm90
from support.emulator import options as running

import tiercel
from tiercel.ops.attention.reference import attention_varlen_backward as reference

pytestmark = pytest.mark.torch

# Queries and keys of each sequence.
LENGTHS = [
    ([5], [5]),
    ([128, 256], [128, 256]),
    ([300, 1, 0, 130, 129], [300, 1, 7, 130, 64]),
    ([64, 200, 3], [200, 64, 0]),
]


def gradients(tensors, deterministic=False, **options):
    """(dq, dk, dv), which were NaN before."""
    found = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
    scale = tensors[1].shape[-1] ** -0.5
    rest = (*limits(options), scale, options.get("softcap", 0.0), deterministic)
    packed = tensors[4].dim() == 1  # cu_seqlens
    name = "attention_varlen_backward" if packed else "attention_backward"
    size = getattr(kernels, f"{name}_plan")(*tensors, *found, None, *rest)["workspace"]
    getattr(kernels, name)(*tensors, *found, torch.full((size,), torch.nan), *rest)
    return found


def starts_of(lengths, before=0):
    return torch.tensor([before, *lengths]).cumsum(0).int()


def draw(queries, keys, heads, d, dtype=torch.bfloat16, spare=(0, 0), with_lse=False, **options):
    """(grad, q, k, v, starts, out, lse, grad_lse) as a launch takes them, and the truth. `spare`
    rows come before the first sequence and after the last one; `d` may be two head dimensions, the
    second one that of v."""
    d, d_v = d if isinstance(d, tuple) else (d, d)
    generator = torch.Generator().manual_seed(7)
    rows_q, rows_k = (sum(lengths) + sum(spare) for lengths in (queries, keys))

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    q, grad = (rand(rows_q, heads[0], columns).to(dtype) for columns in (d, d_v))
    k, v = (rand(rows_k, heads[1], columns).to(dtype) for columns in (d, d_v))
    starts = [starts_of(lengths, spare[0]) for lengths in (queries, keys)]
    grad_lse = rand(heads[0], rows_q) if with_lse else None
    doubles = [x.double() for x in (grad, q, k, v)]
    longest = max(queries), max(keys)
    forward = tiercel.ref.attention_varlen
    out, lse = forward(*doubles[1:], *starts, *longest, return_lse=True, **options)
    truth = reference(*doubles, *starts, out, lse, grad_lse=grad_lse, **options)
    return (grad, q, k, v, *starts, out.to(dtype), lse.float(), grad_lse), truth


def check(*sizes, **options):
    tensors, truth = draw(*sizes, **options)
    for name in ("with_lse", "spare"):
        options.pop(name, None)
    compare_gradients(gradients(tensors, **options), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}])
def test_every_kernel(d, dtype, options):
    check([70, 30], [140, 20], (2, 1), d, dtype, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(options, lengths):
    check(*lengths, (2, 1), 64, **options)


@pytest.mark.parametrize(
    ("d", "dtype", "options"),
    [
        ((192, 128), torch.bfloat16, {"causal": True}),
        (256, torch.bfloat16, {}),
        (256, torch.bfloat16, {"causal": True, "softcap": 2.0}),
        (256, torch.bfloat16, {"window": (100, 5)}),
    ],
)
def test_wide_heads(d, dtype, options):
    check([300, 1, 0, 130], [300, 1, 7, 64], (2, 1), d, dtype, **options)


@pytest.mark.parametrize("d", [8, 96, 136, (40, 128), (256, 64), (64, 256), (192, 136)])
def test_head_dimensions_of_no_kernel_s_own(d):
    check([65, 1, 20], [129, 1, 30], (1, 1), d, causal=True)


def test_gradients_of_the_logarithms():
    check([150, 20], [300, 10], (4, 2), 64, window=(40, 5), with_lse=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize(
    ("spare", "d"),
    [((3, 0), 64), ((0, 200), 64), ((70, 133), 64), ((70, 133), (192, 128)), ((70, 133), 256)],
)
def test_rows_in_no_sequence(options, spare, d):
    """Those of q and k are NaN, and so is all else that a caller may leave there but `lse`."""
    tensors, truth = draw([100, 30], [60, 90], (2, 1), d, spare=spare, **options)
    grad, q, k, v, starts_q, starts_k, out, lse, _ = tensors
    for tensor, starts in ((grad, starts_q), (q, starts_q), (out, starts_q), (k, starts_k)):
        tensor[: starts[0]] = tensor[starts[-1] :] = torch.nan
    v[: starts_k[0]] = v[starts_k[-1] :] = torch.nan
    assert (lse[:, : spare[0]] == -torch.inf).all()
    found = gradients(tensors, **options)
    compare_gradients(found, truth)
    for gradient, starts in zip(found, (starts_q, starts_k, starts_k), strict=True):
        assert (gradient[: starts[0]] == 0).all() and (gradient[starts[-1] :] == 0).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 60)}])
@pytest.mark.parametrize("d", [64, 128, (192, 128), 256])
def test_bits_are_those_of_each_sequence(d, options):
    """In a fixed order of dq: what a sequence gets does not depend on the others beside it."""
    queries, keys = [200, 0, 1, 140], [300, 9, 130, 140]
    tensors, _ = draw(queries, keys, (2, 1), d, **options)
    found = gradients(tensors, deterministic=True, **options)
    of_q, of_k = tensors[4:6]
    for i, (n, m) in enumerate(zip(queries, keys, strict=True)):
        rows = [slice(int(x[i]), int(x[i + 1])) for x in (of_q, of_k)]
        of_rows = (*rows[:1] * 2, *rows[1:] * 2)
        one = [x[None, part].contiguous() for x, part in zip(tensors[:4], of_rows, strict=True)]
        if n == 0 or m == 0:
            assert (found[1][rows[1]] == 0).all() and (found[2][rows[1]] == 0).all()
            continue
        out, lse = tensors[6][None, rows[0]], tensors[7][None, :, rows[0]].contiguous()
        due = gradients((*one, out, lse, None), deterministic=True, **options)
        for gradient, part, other in zip(found, (rows[0], *rows[1:] * 2), due, strict=True):
            assert torch.equal(gradient[part], other[0])


def test_beside_nans():
    """The sequence between two others is NaN."""
    tensors, truth = draw([100, 50, 77], [100, 50, 77], (2, 2), 64)
    for tensor in tensors[:4]:
        tensor[100:150] = torch.nan
    for one, other in zip(gradients(tensors), truth, strict=True):
        for rows in (slice(100), slice(150, None)):
            compare_gradients([one[rows]], [other[rows]])
        assert one[100:150].isnan().any()


def test_more_sequences_than_threads_list_at_a_time():
    lengths = [i % 3 for i in range(1100)]
    check(lengths, lengths[::-1], (1, 1), 8)


@pytest.mark.parametrize("seed", [3, 11])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [128, (192, 128), 256])
def test_warps_in_other_orders(d, seed, deterministic):
    tensors, truth = draw([200, 60, 1], [140, 200, 5], (2, 1), d, causal=True)
    with running(seed=seed):
        compare_gradients(gradients(tensors, deterministic=deterministic, causal=True), truth)


def test_strides():
    tensors, truth = draw([100, 40], [100, 40], (2, 2), 64)
    packed = torch.stack(tensors[1:4], dim=1).unbind(1)
    heads_first = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    apart = [torch.stack([x, x * 0 - 7], dim=1)[:, 0] for x in tensors[4:6]]
    compare_gradients(gradients((heads_first, *packed, *apart, *tensors[6:])), truth)


@pytest.mark.parametrize("sequences", [0, 2])
def test_no_rows_or_no_sequence(sequences):
    tensors, _ = draw([5] * 2, [7] * 2, (2, 1), 64)
    starts = torch.full((sequences + 1,), 3, dtype=torch.int32)
    options = (False, None, None, None, False, None)
    run = sm90("attention_varlen_backward")
    for found in run(*tensors[:4], starts, starts, *tensors[6:], *options):
        assert (found == 0).all()
    grad, q, k, v, _, _, out, lse, _ = tensors
    given = (grad[:0], q[:0], k, v, starts, starts, out[:0], lse[:, :0], None)
    assert [len(x) for x in run(*given, *options)] == [0, 14, 14]
    given = (grad, q, k[:0], v[:0], starts, starts, out, lse, None)
    dq, dk, _ = run(*given, *options)
    assert (dq == 0).all() and dk.shape == (0, 1, 64)
