# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with the inputs, shapes and tolerances of other libraries' tests, on an H100
or H200, against the float64 recurrence."""

import pytest
import torch
from support import delta_inputs
from support.delta_inputs import FLA_TOLERANCES, FLASHQLA_TOLERANCES

import tiercel
from tiercel.ops.delta import reference as ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

F16, BF16 = torch.float16, torch.bfloat16


def check(inputs, tolerances):
    inputs = inputs.to("cuda")
    leaves = [t.detach().requires_grad_() for t in (*inputs.tensors, inputs.initial)]
    out, state = tiercel.gated_delta_rule(
        *leaves[:5],
        scale=inputs.scale,
        initial_state=leaves[5],
        output_final_state=True,
        cu_seqlens=inputs.starts,
        qk_l2norm=inputs.l2norm,
    )
    torch.autograd.backward([out, state], [inputs.grad, inputs.grad_final])
    got = (out.detach(), state.detach(), *(leaf.grad for leaf in leaves))
    wide = [t.double() for t in inputs.tensors]
    options = (inputs.starts, inputs.scale, inputs.l2norm)
    due = ref.gated_delta_rule(*wide, inputs.initial.double(), *options, output_final_state=True)
    grads = ref.gated_delta_rule_backward(
        *(inputs.grad.double(), *wide, inputs.grad_final.double(), inputs.initial.double()),
        *options,
    )
    delta_inputs.check(got, (*due, *grads), tolerances)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "size", "scale", "divisor", "masked", "l2norm"),
    [
        (4, 1024, (4, 4), 128, 0.1, 1.0, 1.0, False),
        (2, 75, (4, 4), 64, 1.0, 0.01, 0.0, False),
        (2, 1000, (3, 3), 64, 0.1, 1.0, 0.5, False),
        (4, 1024, (4, 4), 128, 0.1, 1.0, 0.0, True),
        (2, 1500, (4, 4), 128, 0.1, 10.0, 0.0, False),
        (4, 2048, (8, 8), 64, 0.1, 1.0, 0.0, False),
        (2, 256, (2, 4), 64, 1.0, 1.0, 0.0, False),
        (2, 512, (2, 8), 64, 1.0, 0.1, 0.0, True),
        (2, 1024, (4, 8), 128, 0.1, 1.0, 0.0, False),
    ],
)
def test_uniform(batch, tokens, heads, size, scale, divisor, masked, l2norm):
    given = (batch, tokens, heads, size, scale, divisor, masked, l2norm, F16)
    check(delta_inputs.fla_uniform(*given), FLA_TOLERANCES)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "size", "scale", "divisor", "masked", "l2norm", "dtype"),
    [
        (1, 63, (1, 1), 64, 1.0, 1.0, 0.0, False, F16),
        (2, 1000, (3, 3), 64, 0.1, 1.0, 0.5, False, F16),
        (4, 1024, (4, 4), 128, 0.1, 1.0, 0.0, True, F16),
        (2, 1024, (2, 4), 64, 0.1, 1.0, 0.0, False, F16),
        (2, 1024, (4, 8), 128, 0.1, 1.0, 0.0, True, F16),
        (2, 1500, (4, 4), 128, 0.1, 10.0, 0.0, False, F16),
        (2, 1024, (2, 8), 128, 0.1, 1.0, 0.0, True, BF16),
    ],
)
def test_uniform_with_a_gate_per_channel(
    batch, tokens, heads, size, scale, divisor, masked, l2norm, dtype
):
    given = (batch, tokens, heads, size, scale, divisor, masked, l2norm, dtype, True)
    # bfloat16 has 8 bits where float16 has 11, for which the tolerances were chosen
    check(
        delta_inputs.fla_uniform(*given),
        [each * (1 if dtype == F16 else 4) for each in FLA_TOLERANCES],
    )


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1500, (4, 4), 128), (2048, (8, 8), 64)])
def test_bounded_gates(tokens, heads, size):
    check(delta_inputs.kda_bounded(2, tokens, heads, size, 0.1, F16), FLA_TOLERANCES)


@pytest.mark.parametrize(
    ("heads", "size", "masked", "ends", "channels"),
    [
        ((2, 4), 64, 0.0, [0, 256, 500, 1000], False),
        ((4, 4), 64, 0.5, [0, 256, 500, 1000], False),
        ((2, 8), 64, 0.0, [0, 256, 500, 1000], False),
        ((4, 4), 128, 0.0, [0, 15, 100, 300, 1200, 2000], False),
        ((16, 16), 128, 0.0, [0, 101, 303, 1205, 3007, 4096], False),
        ((4, 4), 64, 0.9, [0, 256, 500, 1000], True),
        ((4, 4), 128, 0.5, [0, 256, 500, 1000], True),
    ],
)
def test_packed(heads, size, masked, ends, channels):
    check(delta_inputs.fla_packed(heads, size, masked, ends, F16, channels), FLA_TOLERANCES)


@pytest.mark.parametrize(
    ("tokens", "heads", "ends"),
    [
        (4096, (4, 4), None),
        (4096, (2, 8), None),
        (4096, (4, 16), None),
        (4096, (16, 32), [0, 410, 841, 1135, 2126, 2512, 4096]),
        (1000, (16, 64), [0, 211, 985]),
        (4096, (4, 4), [0, 517, 883, 1010, 3767, 4096]),
        (256, (4, 4), [0, 73, 115, 209]),
        (128, (4, 4), [0, 47, 128]),
    ],
)
def test_rates_of_heads(tokens, heads, ends):
    for with_states in (False, True) if tokens < 4096 else (True,):
        inputs = delta_inputs.flashqla(1, tokens, heads, ends, with_states)
        check(inputs, FLASHQLA_TOLERANCES)


@pytest.mark.parametrize(("count", "most"), [(11, 33), (3, 4096), (10, 1024), (20, 512)])
def test_random_packed_sequences(count, most):
    ends = delta_inputs.random_ends(count, most)
    check(delta_inputs.flashqla(1, ends[-1], (4, 4), ends), FLASHQLA_TOLERANCES)


def test_16384_tokens():
    ends = [0, 4096, 6893, 7665, 8192, 12288, 16384]
    check(delta_inputs.flashqla(1, 16384, (4, 4), ends), FLASHQLA_TOLERANCES)
