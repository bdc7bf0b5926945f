# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with the inputs of other libraries' tests, on the emulator.

Sizes are smaller than theirs, which tests/delta/test_delta_peers_gpu.py has."""

import pytest
import torch
from support import delta_inputs
from support.delta_inputs import FLA_TOLERANCES, FLASHQLA_TOLERANCES
from support.emulator import sm90
from support.near import BF16, F16

from tiercel.ops.delta import reference as ref


def check(inputs, tolerances):
    more = (inputs.initial, inputs.starts, inputs.scale, inputs.l2norm)
    out, state = sm90("gated_delta_rule_with_state")(*inputs.tensors, *more, None)
    grads = sm90("gated_delta_rule_backward")(
        *(inputs.grad, *inputs.tensors, inputs.grad_final), *more, None
    )
    wide = [t.double() for t in inputs.tensors]
    initial = inputs.initial.double()
    options = (inputs.starts, inputs.scale, inputs.l2norm)
    due = ref.gated_delta_rule(*wide, initial, *options, output_final_state=True)
    due_grads = ref.gated_delta_rule_backward(
        inputs.grad.double(), *wide, inputs.grad_final.double(), initial, *options
    )
    delta_inputs.check((out, state, *grads), (*due, *due_grads), tolerances)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "scale", "divisor", "masked", "l2norm"),
    [
        (150, (1, 1), 128, 0.1, 1.0, 1.0, False),  # no gate at all
        (75, (2, 2), 64, 1.0, 0.01, 0.0, False),  # gates that leave nothing
        (130, (1, 1), 64, 0.1, 1.0, 0.5, False),
        (130, (1, 1), 128, 0.1, 1.0, 0.0, True),
        (200, (1, 1), 128, 0.1, 10.0, 0.0, False),
        (100, (1, 4), 64, 1.0, 0.1, 0.0, True),
        (130, (1, 2), 128, 0.1, 1.0, 0.0, False),
    ],
)
def test_uniform(tokens, heads, size, scale, divisor, masked, l2norm, dtype):
    inputs = delta_inputs.fla_uniform(1, tokens, heads, size, scale, divisor, masked, l2norm, dtype)
    # bfloat16 has 8 bits where float16 has 11, for which the tolerances were chosen
    check(inputs, [each * (1 if dtype == F16 else 4) for each in FLA_TOLERANCES])


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "divisor", "masked", "l2norm"),
    [
        (63, (1, 1), 64, 1.0, 0.0, False),
        (130, (1, 1), 64, 1.0, 0.5, False),
        (130, (1, 1), 128, 1.0, 0.0, True),
        (150, (1, 1), 128, 10.0, 0.0, False),
        (130, (1, 2), 128, 0.1, 0.0, True),
    ],
)
def test_uniform_with_a_gate_per_channel(tokens, heads, size, divisor, masked, l2norm):
    given = (1, tokens, heads, size, 0.1, divisor, masked, l2norm, F16, True)
    check(delta_inputs.fla_uniform(*given), FLA_TOLERANCES)


@pytest.mark.parametrize("size", [64, 128])
def test_bounded_gates(size):
    check(delta_inputs.kda_bounded(1, 100, (1, 2), size, 0.1, F16), FLA_TOLERANCES)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("size", "masked", "ends"), [(64, 0.5, [0, 15, 100, 130]), (128, 0.9, [0, 25, 50, 140])]
)
def test_packed(size, masked, ends, channels):
    check(delta_inputs.fla_packed((1, 2), size, masked, ends, F16, channels), FLA_TOLERANCES)


@pytest.mark.parametrize(
    ("heads", "tokens", "ends"),
    [((1, 4), 150, None), ((2, 2), 128, [0, 47, 128]), ((1, 2), 256, [0, 73, 115, 209])],
)
def test_rates_of_heads(heads, tokens, ends):
    for with_states in (False, True):
        inputs = delta_inputs.flashqla(1, tokens, heads, ends, with_states)
        check(inputs, FLASHQLA_TOLERANCES)


def test_short_packed_sequences():
    ends = delta_inputs.random_ends(11, 33)
    check(delta_inputs.flashqla(1, ends[-1], (1, 2), ends), FLASHQLA_TOLERANCES)
    assert torch.tensor(ends).diff().min() < 64  # each is a part of a chunk
