# SPDX-License-Identifier: Apache-2.0
"""Checks one backend against its operator's contract, and times it. Runs in the worker."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import tiercel
from tiercel._explain import resolve_call
from tiercel.core.dispatch import registry
from tiercel.plugins.contract import Case, Contract
from tiercel.workbench.smoke.failures import error_report, line_of, missing_package, some_values

_ROUNDS = 5
_ROUND_MS = 20.0
_SLOW_MS = 500.0  # an interpreter's, say
_SEED = 1

Report = dict[str, Any]


def examine(
    contract: Contract, backend: str, device: str, source: dict[str, str] | None = None
) -> Iterator[Report]:
    """One report at the beginning of each step, and one with its result."""
    timed = contract.timing[torch.device(device).type]
    reason = why_not(contract, backend, timed, device)
    if reason is not None:
        yield {"step": "skipped", "reason": reason}
        return
    for case in (*contract.cases, timed):
        yield {"step": "begin", "case": str(case)}
        result = try_case(contract, backend, case, device, source)
        if result["status"] == "skipped":
            yield {"step": "skipped", "reason": result["reason"]}
            return
        yield {"step": "case", "case": str(case), **result}
    if result["status"] == "right":
        yield {"step": "begin", "case": f"timing {timed}"}
        ms, ref_ms = race(contract, backend, timed, device)
        yield {"step": "time", "case": str(timed), "ms": ms, "ref_ms": ref_ms}


def why_not(contract: Contract, backend: str, case: Case, device: str) -> str | None:
    """Why a backend does not take a case, if it does not."""
    arguments = contract.make(case, device, _SEED)
    variant, values, _ = resolve_call(registry[contract.op], **arguments, backend=backend)
    found = variant.backends[backend].why_not(*values)
    return None if found is None else found.text


def try_case(
    contract: Contract,
    backend: str,
    case: Case,
    device: str,
    source: dict[str, str] | None = None,
) -> Report:
    """The part of one case that is right: `share`, from 0 to 1."""
    arguments = contract.make(case, device, _SEED)
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    given = {n: v.clone() for n, v in tensors.items()}
    try:
        outputs = _call(contract, arguments, backend)
        _synchronize(device)
    except NotImplementedError as error:
        return {"status": "unsupported", "share": 0.0, "reason": line_of(error)}
    except Exception as error:
        missing = missing_package(error)
        if missing is not None:
            return {"status": "skipped", "share": 0.0, "reason": missing}
        found = error_report(error, source or {})
        return {"status": "error", "share": 0.0, "reason": line_of(error), **found}
    for name, before in given.items():
        if name in contract.mutates or name in contract.written:
            continue
        bits = _BITS.get(before.dtype, before.dtype)
        if not torch.equal(arguments[name].view(bits), before.view(bits)):
            return {"status": "wrong", "share": 0.0, "reason": f"it changed `{name}`"}
    expected = _expected(contract, arguments | given)  # a call may have written to its arguments
    share, reason, values = compare(contract, arguments, expected, outputs)
    if reason is None:
        return {"status": "right", "share": share, "reason": None}
    return {"status": "wrong", "share": share, "reason": reason, "values": values}


# NaN is no reason to differ.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}


def _is_wide(value: Any) -> bool:
    """A tensor of floats that PyTorch calculates with."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1


def _call(contract: Contract, arguments: dict[str, Any], backend: str) -> tuple[Tensor, ...]:
    public = registry[contract.op].public
    assert public is not None
    result = public(**arguments, backend=backend)
    return result if isinstance(result, tuple) else (result,)


def _expected(contract: Contract, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """By the reference, in float64."""
    wide = {n: v.double() if _is_wide(v) else v for n, v in arguments.items()}
    result = getattr(tiercel.ref, contract.op)(**wide)
    return result if isinstance(result, tuple) else (result,)


def compare(
    contract: Contract,
    arguments: dict[str, Any],
    expected: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
) -> tuple[float, str | None, list[str]]:
    """The share of rows in which all outputs are right, what is wrong with the others, and a few
    of their values."""
    rows = outputs[0].shape[0] if outputs[0].dim() else 1
    right = torch.ones(rows, dtype=torch.bool, device=outputs[0].device)
    reasons, values = [], []
    specs = contract.outputs[: len(expected)]  # what comes only with an argument comes last
    for spec, due, got in zip(specs, expected, outputs, strict=True):
        exact = spec.rtol == 0 and spec.atol == 0
        shown = due, got
        if got.is_floating_point() and not _is_wide(got) and exact:
            got, due = got.view(torch.uint8), due.view(torch.uint8)  # not all have an ==
        if exact:
            close = due == got
        else:
            atol: Any = spec.atol
            if spec.of_sums:
                assert contract.sums is not None
                atol = atol + spec.of_sums * contract.sums(arguments).double()
            close = _is_close(got.double(), due.double(), spec.rtol, atol)
        if not bool(close.all()):
            values += some_values(spec.name, *shown, close)
        close = close.reshape(close.shape[0], math.prod(close.shape[1:])).all(dim=1)
        if not bool(close.all()):
            text = f"{int((~close).sum())} of {len(close)} rows of `{spec.name}` are wrong"
            off = (got.double() - due).abs()
            if bool((got.isnan() != due.isnan()).any()):
                text += ", NaN in other places than due"
            elif not exact:
                text += f", by up to {float(off.nan_to_num(0.0).max()):.1e}"
            reasons.append(text)
        right &= close if len(close) == rows else close.all()  # outputs may differ in length
    share = float(right.double().mean()) if rows else 1.0
    return share, "; ".join(reasons) or None, values


def _is_close(got: Tensor, due: Tensor, rtol: float, atol: Any) -> Tensor:
    """torch.isclose with an `atol` that may be a tensor; NaN equals NaN."""
    near = due.isfinite() & ((got - due).abs() <= atol + rtol * due.abs())
    return near | (got == due) | (got.isnan() & due.isnan())


def race(
    contract: Contract,
    backend: str,
    case: Case,
    device: str,
    *,
    rounds: int = _ROUNDS,
    round_ms: float = _ROUND_MS,
) -> tuple[float, float]:
    """Milliseconds of an eager call by the backend and by ref, in turn; medians."""
    arguments = contract.make(case, device, _SEED)
    calls = [lambda b=b: _call(contract, arguments, b) for b in (backend, "ref")]
    return _race(calls, device, rounds, round_ms)


def race_plain(
    contract: Contract, case: Case, device: str, *, rounds: int, round_ms: float
) -> tuple[float, float]:
    """`race` between an eager call on ref and the same plain PyTorch without Tiercel."""
    arguments = contract.make(case, device, _SEED)
    plain = getattr(tiercel.ref, contract.op)
    calls = [lambda: _call(contract, arguments, "ref"), lambda: plain(**arguments)]
    return _race(calls, device, rounds, round_ms)


def _race(
    calls: Sequence[Callable[[], Any]], device: str, rounds: int, round_ms: float
) -> tuple[float, float]:
    timer = _cuda_ms if torch.device(device).type == "cuda" else _cpu_ms
    once = [_once(timer, call) for call in calls]
    counts = [min(max(math.ceil(round_ms / ms), 1), 1000) for ms in once]
    samples: list[list[float]] = [[], []]
    for _ in range(rounds if sum(once) < _SLOW_MS else 1):
        for call, count, kept in zip(calls, counts, samples, strict=True):
            kept.append(timer(call, count) / count)
    return statistics.median(samples[0]), statistics.median(samples[1])


_Timer = Callable[[Callable[[], Any], int], float]


def _once(timer: _Timer, call: Callable[[], Any]) -> float:
    """Milliseconds of one call, warm; of a slow one, the first will do."""
    first = timer(call, 1)
    return first if first > _SLOW_MS else max(timer(call, 3) / 3, 1e-3)


def _cpu_ms(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3


def _cuda_ms(call: Callable[[], Any], count: int) -> float:
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
