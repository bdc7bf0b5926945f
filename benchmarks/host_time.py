#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the host time of one eager call goes, on this machine's GPU, for an installed Tiercel.

python benchmarks/host_time.py [--out FILE]
python benchmarks/host_time.py --ops [NAME ...]

Each row is a median over samples of 400 calls, in rounds through all rows; the GPU's queue never
fills. "no launch" is the same call with a driver whose cuLaunchKernelEx does nothing: what is left
is ours.

--ops: one allocating call of each public op, or of those named, for each kind of case that its
contract has, slowest first. A GPU that has more to do than the host shows in such a row.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5

# The real driver, but for its launch.
_DRIVER = "int cuLaunchKernelEx(void) { return 0; }"


def build_driver(folder):
    """The library; its other functions are found in what it is linked to, libcuda.so.1."""
    stub, library = folder / "stub.so", folder / "driver.so"
    (folder / "empty.c").write_text("")
    (folder / "driver.c").write_text(_DRIVER)
    compile_ = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*compile_, soname, folder / "empty.c", "-o", stub], check=True)
    subprocess.run([*compile_, folder / "driver.c", stub, "-o", library], check=True)
    return library


def rows(op):
    """(what, a call) of an operator."""
    import torch

    import tiercel
    from tiercel import _C

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    registered = torch.ops.tiercel
    if op == "topk_softmax":
        scores = normal(64, 128)
        weights, indices = out = tiercel.topk_softmax(scores, 8)
        return [
            ("C only", lambda: _C.topk_softmax(scores, weights, indices, True, False)),
            ("out=", lambda: tiercel.topk_softmax(scores, 8, out=out)),
            ("allocating", lambda: tiercel.topk_softmax(scores, 8)),
            ("registered", lambda: registered.topk_softmax(scores, 8)),
            (
                "registered, out",
                functools.partial(
                    registered.topk_softmax.out, scores, 8, weights=weights, indices=indices
                ),
            ),
            ("torch.topk", lambda: torch.topk(scores, 8)),
        ]
    if op == "linear_act":
        x, w, b = normal(64, 128), normal(128, 128), normal(128)
        out = tiercel.linear_act(x, w, b)
        return [
            ("C only", lambda: _C.linear_act(x, w, b, None, out, None, 3)),
            ("out=", lambda: tiercel.linear_act(x, w, b, out=out)),
            ("allocating", lambda: tiercel.linear_act(x, w, b)),
            ("registered", lambda: registered.linear_act(x, w, b)),
            ("torch linear", lambda: torch.nn.functional.linear(x, w, b)),
        ]
    x, weight = normal(64, 128), normal(128)
    out = torch.empty_like(x)
    if op == "training":
        x.requires_grad_(), weight.requires_grad_()

        def step(function, *args):
            """Forward and backward."""
            return lambda: torch.autograd.grad(function(*args), args, x.detach())

        return [
            ("rms_norm", step(tiercel.rms_norm, x, weight)),
            ("silu_and_mul", step(tiercel.silu_and_mul, x, x)),
            ("softmax_online", step(tiercel.softmax_online, x)),
            ("torch rms_norm", step(lambda x, w: torch.rms_norm(x, (128,), w), x, weight)),
        ]
    return [
        ("silu_and_mul(x, up, out=)", lambda: tiercel.silu_and_mul(x, x, out=out)),
        ("rms_norm(x, weight, out=)", lambda: tiercel.rms_norm(x, weight, out=out)),
        ("layer_norm(x, weight, out=)", lambda: tiercel.layer_norm(x, weight, out=out)),
        ("softmax_online(x, out=)", lambda: tiercel.softmax_online(x, out=out)),
        ("reduce(x, 0)", lambda: tiercel.reduce(x, 0)),
        ("fp8_quantize(x)", lambda: tiercel.fp8_quantize(x)),
    ]


def parts():
    """(what, a call): pieces that calls are made of."""
    import torch

    from tiercel import _C

    scores = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(64, 8, device="cuda")
    return [
        ("nothing", functools.partial(bool, 0)),
        ("route of three", functools.partial(_C.route, scores, weights, weights)),
        ("versions of two", functools.partial(torch._C._increment_version, (weights, scores))),
        (
            "torch.empty",
            functools.partial(torch.empty, (64, 8), dtype=torch.float32, device="cuda:0"),
        ),
        ("_C.empty", functools.partial(_C.empty, scores, (64, 8), torch.float32)),
        ("current stream", functools.partial(torch._C._cuda_getCurrentRawStream, 0)),
    ]


def measure(fake_driver):
    from tiercel.workbench.bench.timing import CudaClock

    clock, found = CudaClock(), {}
    groups = {op: rows(op) for op in ("topk_softmax", "linear_act", "others", "training")}
    if not fake_driver:
        groups["parts"] = parts()
    calls = {
        f"{group}: {what}": call
        for group, named in groups.items()
        for what, call in named
        if not (fake_driver and what.startswith("torch"))
    }
    for number in range(ROUNDS + 1):  # the first one wakes the GPU up
        for what, call in calls.items():
            taken = clock.host(call, 5)
            if number > 0:
                found.setdefault(what, []).extend(taken)
    return {what: statistics.median(taken) * 1e3 for what, taken in found.items()}


def measure_ops(names):
    """Microseconds of (op, options) for the contracts' cases that run on sm90."""
    import tiercel
    from tiercel.plugins.contracts import CONTRACTS
    from tiercel.workbench.bench.timing import CudaClock

    clock, found = CudaClock(), {}
    for op in names or sorted(set(tiercel.ops.__all__) & CONTRACTS.keys()):
        function = getattr(tiercel, op)
        for case in CONTRACTS[op].cases:
            kind = (op, case.dtype, case.values, *(f"{n}={v}" for n, v in case.options.items()))
            if kind in found or 0 in case.sizes.values():
                continue
            made = CONTRACTS[op].make(case, "cuda", 0)
            if tiercel.explain(op, **made).backend == "sm90":
                call = functools.partial(function, **made)
                clock.host(call, 1)
                found[kind] = statistics.median(clock.host(call, 5)) * 1e3
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--ops", nargs="*", metavar="NAME", help="one call of each op")
    parser.add_argument("--measure", choices=("real", "fake"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure == "fake")))
        return 0
    if args.ops is not None:
        for kind, value in sorted(measure_ops(args.ops).items(), key=lambda item: -item[1]):
            print(f"{value:8.2f}  {' '.join(filter(None, map(str, kind)))}")
        return 0
    command = [sys.executable, __file__, "--measure"]
    with tempfile.TemporaryDirectory() as folder:
        library = build_driver(Path(folder))
        env = os.environ | {"TIERCEL_LIBCUDA": str(library)}
        results = []
        for kind, environment in (("real", os.environ), ("fake", env)):
            text = subprocess.check_output([*command, kind], env=environment, text=True)
            results.append(json.loads(text))
    real, fake = results
    print(f"{'microseconds a call':34}{'':>8}{'no launch':>11}")
    for what, value in real.items():
        ours = f"{fake[what]:11.2f}" if what in fake else ""
        print(f"{what:34}{value:8.2f}{ours}")
    if args.out:
        args.out.write_text(json.dumps({"real": real, "no launch": fake}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
