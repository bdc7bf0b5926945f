# SPDX-License-Identifier: Apache-2.0
"""The emulator's number formats against PyTorch's, and against rounding by definition."""

import math

import pytest
import torch
from support.tensor_probe import FORMATS, call

BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}
TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
ROUNDS = ("rn", "rz", "rm", "rp", "rna")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def encode(values, name, rounding="rn", satfinite=False):
    values = values.double().contiguous()
    out = torch.zeros(values.shape, dtype=torch.int32)
    arguments = (FORMATS.index(name), ROUNDS.index(rounding), int(satfinite))
    call("probe_encode", values, out, values.numel(), *arguments)
    return out


def decode(bits, name):
    bits = bits.int().contiguous()
    out = torch.zeros(bits.shape)
    call("probe_decode", bits, out, bits.numel(), FORMATS.index(name))
    return out


def short(which, bits):
    out = torch.zeros(bits.shape, dtype=torch.int32)
    call("probe_short", which, bits.int().contiguous(), out, bits.numel())
    return out


def every(name):
    if name == "e2m1":
        return torch.tensor(E2M1 + [-x for x in E2M1])
    kind = torch.int16 if BITS[name] == 16 else torch.int8
    return torch.arange(2 ** BITS[name]).to(kind).view(TORCH[name]).float()


def same(a, b):
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


@pytest.mark.parametrize("name", BITS)
def test_every_number_and_back(name):
    bits = torch.arange(2 ** BITS[name])
    numbers = decode(bits, name)
    assert same(numbers, every(name))
    known = ~numbers.isnan()
    for rounding in ROUNDS[:4]:
        assert torch.equal(encode(numbers[known], name, rounding), bits[known].int())
    if BITS[name] == 16:
        which = 0 if name == "f16" else 1
        assert same(short(which, bits).view(torch.float32), every(name))


@pytest.mark.parametrize("name", TORCH)
def test_to_nearest_as_pytorch(name):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).int()
    numbers = every(name)
    numbers = numbers[numbers.isfinite()].sort().values.double()
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    values = torch.cat([bits.view(torch.float32), ties, torch.randn(50_000, generator=generator)])
    values = values[values.isfinite()]
    # PyTorch has the 8-bit formats' overflow as it pleases; what PTX says is tested below.
    largest = every(name)[every(name).isfinite()].max()
    values = values[values.abs() <= largest]
    kind = torch.int16 if BITS[name] == 16 else torch.int8
    want = values.to(TORCH[name]).view(kind).int() & (2 ** BITS[name] - 1)
    assert torch.equal(encode(values, name), want)
    if BITS[name] == 16:
        assert torch.equal(short(2 if name == "f16" else 3, values.view(torch.int32)), want)


@pytest.mark.parametrize("name", BITS)
def test_directed_roundings(name):
    numbers = every(name)
    numbers = numbers[numbers.isfinite()].unique().double()  # sorted; one zero
    values = (numbers[:-1] + numbers[1:]) / 2
    values = torch.cat([values, numbers[:-1] * 0.9 + numbers[1:] * 0.1])
    position = torch.searchsorted(numbers, values)
    below, above = numbers[position - 1], numbers[position]
    inner = torch.where(values > 0, below, above)
    for rounding, want in (("rm", below), ("rp", above), ("rz", inner)):
        assert torch.equal(decode(encode(values, name, rounding), name).double(), want)


def test_overflow_and_nan():
    largest = {"f16": 0x7BFF, "bf16": 0x7F7F, "e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x7}
    beyond = {"f16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7F, "e5m2": 0x7C, "e2m1": 0x7}
    nan = {"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}
    values = torch.tensor([1e60, -1e60, math.inf, -math.inf], dtype=torch.float64)
    for name, bits in BITS.items():
        sign = 1 << (bits - 1)

        def signed(x, y, sign=sign):
            return [x, sign | x, y, sign | y]

        assert encode(values, name).tolist() == signed(beyond[name], beyond[name])
        assert encode(values, name, "rz").tolist() == signed(largest[name], beyond[name])
        saturated = encode(values, name, satfinite=True).tolist()
        assert saturated == signed(largest[name], largest[name])
        assert encode(values, name, "rm").tolist()[:2] == [largest[name], sign | beyond[name]]
        assert encode(torch.tensor([math.nan]), name).item() == nan[name]
    # Half way between the largest and what would be next: to even is up, but for e4m3 and e2m1.
    ties = {"f16": 65520, "e4m3": 464, "e5m2": 61440}
    got = {name: encode(torch.tensor([float(x)]), name).item() for name, x in ties.items()}
    assert got == {"f16": 0x7C00, "e4m3": 0x7E, "e5m2": 0x7C}


def test_tf32_rounds_ties_away():
    values = torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 2**-12, 1 + 3 * 2**-11, 2**-140])
    got = short(4, values.view(torch.int32)).view(torch.float32)
    assert got.tolist() == [1 + 2**-10, -1 - 2**-10, 1, 1 + 2 * 2**-10, 0]


def test_powers_of_two():
    bits = torch.arange(255)
    numbers = short(5, bits).view(torch.float32)
    assert same(numbers.double(), 2.0 ** (bits.double() - 127))
    for which in (6, 7):
        assert torch.equal(short(which, numbers.view(torch.int32)), bits.int())
    between = torch.tensor([1.5, 3.0, 1e30]).view(torch.int32)
    assert (short(7, between) - short(6, between)).tolist() == [1, 1, 1]
