# SPDX-License-Identifier: Apache-2.0
"""How far rows of latent attention may be from float64."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.launch import WrongResult
from tiercel.workbench.bench.ops import Error


def judged(result: Any, truth: Any) -> Error:
    """Over many keys, results are small beside values of about 1 whose weights are rounded."""
    import torch

    unit = torch.finfo(result.dtype).eps / 2
    errors = (result.double() - truth).abs()
    largest, rms_truth = float(errors.max()), truth.square().mean().sqrt()
    if not largest < float("inf"):
        raise WrongResult("a result is not finite")
    worst = float((errors / (truth.abs() + rms_truth)).max())
    if worst > 8 * unit:
        raise WrongResult(f"a result is off by {worst / unit:.1f} units, 8 are allowed")
    rms = float(errors.square().mean().sqrt() / rms_truth)
    if rms > 2.5 * unit:
        raise WrongResult(f"RMS error {rms:.1e}, tolerance {2.5 * unit:.1e}")
    return Error(rms=rms, maximum=largest / float(truth.abs().max()))
