# SPDX-License-Identifier: Apache-2.0
"""The benchmark of each operator: the lists ``BENCHES`` of the
families' ``cases.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercel import _families
from tiercel.workbench.bench.launch import WrongResult

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Error:
    """Distance from the float64 reference, relative to the reference's RMS and maximum."""

    rms: float
    maximum: float
    differing: int = 0  # rows or elements that an inexact method chose otherwise


def judged(errors: Any, truth: Any, tolerance: Any, rms_tolerance: float) -> Error:
    """The error of a result, from those of its elements, which are overwritten.

    Args:
        errors: The elements' distances from the truth, float64.
        truth: The float64 reference.
        tolerance: The largest error that is allowed, of each element.
        rms_tolerance: Of the errors' RMS, relative to the truth's.

    Raises:
        WrongResult: An error is larger.
    """
    largest = float(errors.max())
    if not largest < float("inf"):
        raise WrongResult("a result is not finite")
    worst = float((errors / tolerance).max())
    if worst > 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    rms = float(errors.square_().mean().sqrt() / truth.square().mean().sqrt())
    if rms > rms_tolerance:
        raise WrongResult(f"RMS error {rms:.1e}, tolerance {rms_tolerance:.1e}")
    return Error(rms=rms, maximum=largest / float(truth.abs().max()))


@dataclass(frozen=True)
class OpBench:
    """An operator's benchmark, as data.

    Args:
        family: The family.
        op: The operator's public name.
        params: Its parameters and their defaults, in the order of a case's name; None: required.
        invalid: Why a choice of parameters makes no case, or None.
        make: (case, device, seed) -> the inputs, random.
        call: (case, inputs) -> the arguments of our public function.
        out: (case, inputs) -> a new ``out=``, or None.
        bytes_moved: (case) -> bytes read and written at least.
        flops: (case) -> floating-point operations, or None where their rate means nothing.
        reference: (case, inputs) -> the answer in float64.
        check: (inputs, expected, outputs, launch) -> the error; raises WrongResult.
        hot: Inputs stay in the L2 cache; otherwise they are rotated past it.
        ours: (case, inputs, backend) -> our Launch, where it is no call of a public function.
        host_baselines: Other calls for host time beside ours: name -> (case, inputs) -> call.
    """

    family: str
    op: str
    params: Mapping[str, Any]
    make: Callable[[Any, str, int], Inputs]
    call: Callable[[Any, Inputs], tuple[tuple[Any, ...], dict[str, Any]]]
    out: Callable[[Any, Inputs], Any]
    bytes_moved: Callable[[Any], int]
    reference: Callable[[Any, Inputs], Any]
    check: Callable[[Inputs, Any, Any, Any], Error]
    flops: Callable[[Any], int] | None = None
    invalid: Callable[[Mapping[str, Any]], str | None] = lambda params: None
    hot: bool = False
    ours: Callable[[Any, Inputs, str], Any] | None = None
    host_baselines: Mapping[str, Callable[[Any, Inputs], Callable[[], Any]]] = field(
        default_factory=dict
    )


def load() -> dict[str, OpBench]:
    """All of them by name. Importing them needs no torch."""
    return {bench.op: bench for module in _families.modules("cases") for bench in module.BENCHES}
