# SPDX-License-Identifier: Apache-2.0
"""``tiercel tune``: finds the fastest configurations here; ``tiercel tune apply`` keeps them."""

import argparse
import functools
import re
from pathlib import Path

from tiercel.cli.values import number, whole

HELP = "Finds the fastest configuration of an operator for a problem, on this GPU."

_OPS = {
    "linear": ("Tunes linear_act: tiles, splits of K, clusters, stages, swizzle.", "N K"),
    "moe": ("Tunes fused_moe: blocks of the routing, tiles, clusters.", "E k H I"),
    "nvfp4-linear": ("Tunes nvfp4_linear: how rows and K are cut up, stages in flight.", "N K"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what")
    for name, (text, sizes) in _OPS.items():
        _add_sweep(commands.add_parser(name, help=text, description=text), sizes.split())
    text = "Writes a sweep's winners where operators look for them."
    apply = commands.add_parser("apply", help=text, description=text)
    apply.add_argument("results", type=Path, metavar="RESULTS", help="what a sweep wrote")
    where = "another folder than the package's own; operators read it if TIERCEL_CONFIGS names it"
    apply.add_argument("--to", type=Path, metavar="FOLDER", help=where)
    apply.set_defaults(action="apply")


def _add_sweep(parser: argparse.ArgumentParser, sizes: "list[str]") -> None:
    add = parser.add_argument
    add("--num-tokens", nargs="+", type=whole(1), metavar="T", help="rows of x to tune for")
    text = "sizes of weights; may be repeated (default: those of common models)"
    form = ",".join(f"{name}=.." for name in sizes)
    problem = functools.partial(_problem, sizes)
    add("--problem", action="append", type=problem, metavar=form, help=text)
    add("--dtype", nargs="+", metavar="D", help="the weight's")
    add("--quick", action="store_true", help="try fewer candidates")
    text = "try kernels that have to be compiled here too (pip install 'tiercel[jit]')"
    add("--compile", action="store_true", help=text)
    text = "where to write the winners (results.json); the journal lies beside it"
    add("--output", type=Path, default=Path("results.json"), metavar="FILE", help=text)
    choices = range(1, 17)
    text = "how many are timed again at last, 1 to 16 (5)"
    add("--finalists", type=int, choices=choices, default=5, metavar="N", help=text)
    text = "end the process when a trial takes longer: a hung kernel (300)"
    add("--trial-limit", type=number(), default=300.0, metavar="SECONDS", help=text)
    text = "under torchrun, take over from a worker without a sign of life for so long (20)"
    add("--lease", type=number(), default=20.0, metavar="SECONDS", help=text)
    add("--dry-run", action="store_true", help="only list the trials; needs no GPU")
    add("--bench", metavar="MODULE:NAME", help=argparse.SUPPRESS)
    parser.set_defaults(action="tune")


def _problem(sizes: "list[str]", text: str) -> "tuple[int, ...]":
    match = re.fullmatch(",".join(rf"{name}=(\d{{1,12}})" for name in sizes), text)
    if match is None or not all(map(int, match.groups())):
        form = ",".join(f"{name}=4096" for name in sizes)
        raise argparse.ArgumentTypeError(f"must look like {form}, got {text!r}")
    return tuple(map(int, match.groups()))


def run(args: argparse.Namespace) -> int:
    from tiercel.workbench.tune import command  # only now: it is of no use to the other commands

    return command.main(getattr(command, args.action), args)
