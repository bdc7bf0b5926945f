# SPDX-License-Identifier: Apache-2.0
"""The limits of this GPU, measured in the run whose results are held against it."""

from __future__ import annotations

import statistics
from typing import Any

from tiercel.workbench.bench.launch import Launch
from tiercel.workbench.bench.records import NUMBERS, Record, rounded
from tiercel.workbench.bench.timing import Clock

_COPY_BYTES = (1 << 30, 2 << 30, 4 << 30, 8 << 30)  # read and written together
_SMALL_COPY_BYTES = (64 << 20, 128 << 20, 256 << 20)
_SAMPLES = 7
_GEMM = 8192


def measure(clock: Clock) -> list[Record]:
    """Copy bandwidth, a launch with nothing to do, matrix products in bf16 and fp8."""
    import torch

    found = []
    for moved in _SMALL_COPY_BYTES + _COPY_BYTES:
        # Small ones in turn over more than the L2 holds.
        sets = max(1, _COPY_BYTES[0] // moved)
        if torch.cuda.mem_get_info()[0] < moved * sets + (1 << 30):
            continue
        sources = [torch.rand(moved // 8, device="cuda") for _ in range(sets)]
        targets = [torch.empty_like(source) for source in sources]
        # A kernel, not copy_(): in a graph that is a node for the copy engine, which is slower.
        ms = _ms(
            clock,
            *(
                lambda s=s, t=t: (torch.neg(s, out=t),)
                for s, t in zip(sources, targets, strict=True)
            ),
        )
        size = f"{moved >> 30} GB" if moved >> 30 else f"{moved >> 20} MB"
        found.append(_record("copy", size, "float32", ms, gbps=moved / ms / 1e6))
        del sources, targets
    ms = _ms(clock, lambda: _empty_kernel(torch))
    found.append(_record("launch", "one thread, nothing to do", "none", ms))
    a, b = (torch.randn(_GEMM, _GEMM, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    ms = _ms(clock, lambda: (torch.mm(a, b, out=c),))
    found.append(_gemm("bfloat16", ms))
    ms = _ms(clock, _fp8_product(torch, a, b))
    found.append(_gemm("float8_e4m3fn", ms))
    torch.cuda.empty_cache()
    return found


def _gemm(dtype: str, ms: float) -> Record:
    rate = 2 * _GEMM**3 / ms / 1e9
    return _record("gemm", f"M{_GEMM} N{_GEMM} K{_GEMM}", dtype, ms, tflops=rate)


def _fp8_product(torch: Any, a: Any, b: Any) -> Any:
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    return lambda: (torch._scaled_mm(a, b.t(), use_fast_accum=True, **options),)


def _empty_kernel(torch: Any) -> tuple[()]:
    torch.cuda._sleep(0)
    return ()


def _ms(clock: Clock, *runs: Any) -> float:
    for run in runs:
        run()
    return statistics.median(clock.prepare([Launch(run) for run in runs]).sample(_SAMPLES))


def _record(op: str, case: str, dtype: str, ms: float, **rates: float) -> Record:
    import torch

    record: Record = {"family": "limits", "op": op, "case": case, "dtype": dtype}
    record |= {"impl": "torch", "version": str(torch.__version__)}
    record |= {"timing": "graph", "status": "ok"} | dict.fromkeys(NUMBERS)
    record |= {"ms_median": ms} | rates
    return {name: rounded(value) for name, value in record.items()}


def summary(records: list[Record]) -> dict[str, float]:
    """The figures that results are held against; empty where none were measured."""
    found: dict[str, float] = {}
    for record in records:
        if record["op"] == "copy":
            found["copy_gbps"] = max(found.get("copy_gbps", 0.0), record["gbps"])
            if record["case"].endswith("MB"):
                found[f"copy of {record['case']}"] = record["gbps"]
        elif record["op"] == "launch":
            found["launch_us"] = record["ms_median"] * 1e3
        elif record["op"] == "gemm":
            found[f"{record['dtype']}_tflops"] = record["tflops"]
    if "bfloat16_tflops" in found:
        found["float16_tflops"] = found["bfloat16_tflops"]  # one rate in the tensor cores
    if "float8_e4m3fn_tflops" in found:
        found["float8_e5m2_tflops"] = found["float8_e4m3fn_tflops"]
    return found


def as_text(found: dict[str, float]) -> str:
    if not found:
        return "not measured"
    small = "; ".join(f"{k[8:]} {v:.0f}" for k, v in found.items() if k.startswith("copy of "))
    parts = []
    if "copy_gbps" in found:
        parts.append(f"copy {found['copy_gbps']:.0f} GB/s{small and f' ({small})'}")
    if "launch_us" in found:
        parts.append(f"launch {found['launch_us']:.2f} µs")
    if "bfloat16_tflops" in found:
        parts.append(f"bf16 matrix product {found['bfloat16_tflops']:.0f} TFLOP/s")
    if "float8_e4m3fn_tflops" in found:
        parts.append(f"fp8 {found['float8_e4m3fn_tflops']:.0f}")
    return ", ".join(parts) or "not measured"
