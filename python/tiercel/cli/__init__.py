# SPDX-License-Identifier: Apache-2.0
"""The command line: ``tiercel COMMAND``, or ``python -m tiercel COMMAND``."""

import argparse
import os
import sys
from collections.abc import Sequence

from tiercel._version import __version__
from tiercel.cli import (
    bench,
    cache,
    completion,
    demo,
    deploy,
    doctor,
    kernels,
    new_kernel,
    profile,
    smoke,
    tune,
)

COMMANDS = (
    bench,
    cache,
    completion,
    demo,
    deploy,
    doctor,
    kernels,
    new_kernel,
    profile,
    smoke,
    tune,
)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="tiercel", description="Hopper kernels for PyTorch.")
    parser.add_argument("--version", action="version", version=f"tiercel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        sub = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: "Sequence[str] | None" = None) -> int:
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has what they wanted, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 0
    return status
