# SPDX-License-Identifier: Apache-2.0
"""Random 4-bit weights for tests of w4_linear, with the values that they stand for."""

from dataclasses import dataclass

import torch

FORMATS = ("nvfp4", "mxfp4", "int4")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Weights:
    format: str
    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    values: torch.Tensor  # float64


def nibbles(packed):
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def draw(layout, features, k, dtype, device):
    """Weights of a layout like "nvfp4" or "int4-128-zero"; numbers come from torch's seed."""
    kind, *rest = layout.split("-")
    group = int(rest[0]) if rest else {"nvfp4": 16, "mxfp4": 32}[kind]
    packed = torch.randint(0, 256, (features, k // 2), dtype=torch.uint8, device=device)
    shape = features, k // group
    zero_point = None
    if kind == "int4":
        scale = (torch.rand(shape, device=device) * 0.1 + 0.01).to(dtype)
        if rest[1:]:
            zero_point = torch.randint(0, 16, shape, device=device).to(dtype)
        offsets = torch.tensor(8.0) if zero_point is None else zero_point.double()
        offsets = offsets.to(device).expand(shape).repeat_interleave(group, -1)
        codes = nibbles(packed).double() - offsets
        wide = scale.double()
    else:
        signs = torch.cat((torch.tensor(E2M1), -torch.tensor(E2M1))).double().to(device)
        codes = signs[nibbles(packed).long()]
        if kind == "nvfp4":
            scale = (torch.rand(shape, device=device) + 0.05).to(torch.float8_e4m3fn)
            wide = scale.double()
        else:
            scale = torch.randint(115, 131, shape, dtype=torch.uint8, device=device)
            wide = (scale.double() - 127).exp2()
    values = codes * wide.repeat_interleave(group, -1)
    return Weights(kind, packed, scale, zero_point, values)


def activated(activation, x):
    """By its index in tiercel's list of activations."""
    functional = torch.nn.functional
    return (
        lambda: x,
        lambda: functional.relu(x),
        lambda: functional.silu(x),
        lambda: functional.gelu(x),
        lambda: functional.gelu(x, approximate="tanh"),
        lambda: functional.relu(x).square(),
    )[activation]()


class Experts:
    """Weights [E, N, K / 2] with a bias and a global scale each."""

    def __init__(self, layout, experts, features, k, dtype, device, rounded=True):
        """`rounded`: int4's values are, to the dtype, as the kernels do."""
        drawn = draw(layout, experts * features, k, dtype, device)

        def of_experts(tensor):
            return None if tensor is None else tensor.view(experts, features, -1)

        self.format = drawn.format
        self.packed, self.scale = of_experts(drawn.packed), of_experts(drawn.scale)
        self.zero_point, self.values = of_experts(drawn.zero_point), of_experts(drawn.values)
        if drawn.format == "int4" and rounded:
            self.values = self.values.to(dtype).double()
        self.bias = torch.randn(experts, features, device=device).to(dtype)
        # Sums of about 1, with which gates differ.
        self.factor = (0.5 + torch.rand(experts, device=device)) / self.values.std().item()
        self.factor = (self.factor * k**-0.5).float()

    @property
    def native(self):
        """In the order of the native functions."""
        return self.packed, self.scale, self.zero_point, self.factor, self.bias

    def product(self, rows, expert):
        """The due sums, and the magnitudes of their terms, in float64."""
        factor, bias = self.factor[expert].double(), self.bias[expert].double()
        values = self.values[expert]
        sums = rows.double() @ values.T * factor + bias
        return sums, rows.double().abs() @ values.abs().T * factor + bias.abs()


def halves(sums, interleaved):
    """The gates, and what they are for."""
    return (sums[..., 0::2], sums[..., 1::2]) if interleaved else sums.chunk(2, dim=-1)


def gated(sums, terms, activation, interleaved, alpha, limit):
    """The activations of w4_moe, and by how much they multiply an error of `sums` that is a part of
    `terms`: slopes are below 1.2."""
    due = gate(sums, activation, interleaved, alpha, limit)
    if activation == "relu_squared":
        return due, 2 * sums.abs() * terms
    (a, b), (of_a, of_b) = halves(sums, interleaved), halves(terms, interleaved)
    return due, 1.2 * (b.abs() + 1) * of_a + a.abs() * of_b


def gate(sums, activation, interleaved, alpha, limit):
    """The activations of w4_moe in float64."""
    functional = torch.nn.functional
    if activation == "relu_squared":
        return functional.relu(sums).square()
    a, b = halves(sums, interleaved)
    if limit > 0:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    if activation == "silu":
        return a * torch.sigmoid(alpha * a) * b
    if activation == "silu_residual":
        return a * torch.sigmoid(alpha * a) * (b + 1)
    return getattr(functional, activation)(a) * b
