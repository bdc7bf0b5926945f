# SPDX-License-Identifier: Apache-2.0
"""Operands of attention, and bounds of its errors against float64."""

import torch

UNLIMITED = -1


def limits(options):
    """The window's two ends, as the host code takes them."""
    left, right = options.get("window", (UNLIMITED, UNLIMITED))
    return left, 0 if options.get("causal") else right


def draw(dtype, *shapes):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def compare(result, lse, truth, sums):
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs()
    assert error.max() <= 8 * unit, error.max().item() / unit
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=2e-5)


def compare_gradients(found, truth):
    """Compares norms, with the bounds of the GPU tests. Scores of queries that see one key have no
    gradient: the difference of two equal terms is their rounding error, at values of about 1."""
    for one, other in zip(found, truth, strict=True):
        unit = torch.finfo(one.dtype).eps / 2
        assert one.isfinite().all()
        error, terms = (one.double() - other).norm(), found[0].numel() ** 0.5
        size = other.norm() if other.norm() > 0.02 * terms else terms
        assert error <= 4 * unit * size, (error / size / unit).item()
