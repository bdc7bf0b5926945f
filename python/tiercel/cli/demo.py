# SPDX-License-Identifier: Apache-2.0
"""``tiercel demo``: a minute's tour on whatever machine it runs."""

import argparse
import sys
from pathlib import Path

HELP = "Shows what is accelerated here: each operator checked, and timed beside PyTorch."

_SECONDS = 60.0  # a bound: the quick tour takes a few, more where cores are few or busy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small problems, a few seconds")
    text = "the picture to draw (tiercel-demo.png)"
    parser.add_argument("--plot", type=Path, default=Path("tiercel-demo.png"), help=text)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where it is")


def run(args: argparse.Namespace) -> int:
    try:
        from tiercel import _needs_torch  # noqa: F401
    except ImportError as error:
        print(f"tiercel demo: {error}", file=sys.stderr)
        return 2
    try:
        return _demo(args)
    except KeyboardInterrupt:
        print("tiercel demo: interrupted", file=sys.stderr)
        return 130


def _demo(args: argparse.Namespace) -> int:
    import torch

    from tiercel.workbench.demo import plot, tour

    problem = plot.problem(args.plot)
    if args.device == "cuda" and not torch.cuda.is_available():
        problem = "--device cuda: PyTorch sees no GPU here; tiercel doctor says why"
    if problem is not None:
        print(f"tiercel demo: {problem}", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}\n")
    stops, left = [], []
    for stop in tour.tour(device, _SECONDS, quick=args.quick):
        if isinstance(stop, str):
            left.append(stop)
        else:
            stops.append(stop)
            print(tour.as_line(stop), flush=True)
    ours = [stop for stop in stops if stop.backend == "sm90"]
    print(f"\n{len(ours)} of {len(stops)} run on the sm90 kernels here")
    for why in sorted({stop.why for stop in stops if stop.why}):
        print(f"  on PyTorch: {why}")
    if left:
        print(f"  the {_SECONDS:.0f} seconds were up before: {', '.join(left)}")
    costs = sorted(stop.cost for stop in stops if stop.cost is not None)
    if costs:
        middle = costs[len(costs) // 2]
        print(f"  where PyTorch does the work, a call takes {middle:.2f} of its time (median): the")
        print("  rest is Tiercel's checks and choice of a backend; an H100 or H200 is accelerated")
    try:
        if plot.draw(stops, args.plot, f"tiercel on {name}"):
            print(f"wrote {args.plot}")
        else:
            print("no picture: pip install 'tiercel[bench]' brings matplotlib")
    except (OSError, ValueError) as error:
        print(f"tiercel demo: no picture: {error}", file=sys.stderr)
    print("\nnext: tiercel doctor, tiercel bench, tiercel smoke")
    return 0 if all(stop.right for stop in stops) else 1
