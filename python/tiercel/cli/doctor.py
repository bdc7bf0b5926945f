# SPDX-License-Identifier: Apache-2.0
"""``tiercel doctor``: what is installed here, whether the kernels run, and what mends the rest."""

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path

HELP = "Checks Python, PyTorch, driver, GPUs and build tools; says what to mend, changes nothing."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = parser.add_mutually_exclusive_group()
    text = "print the exports that make PyTorch's extension builds fast, to be sourced"
    what.add_argument("--shell", action="store_true", help=text)
    text = "explain the log of a build or a run that failed or was slow (- reads stdin)"
    what.add_argument("--log", metavar="FILE", help=text)
    text = "exit with 0 if all is green, 1 if something is yellow, 2 if something is red"
    parser.add_argument("--check", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    if args.log is not None:
        return _log(args.log, args.json, args.check)
    from tiercel.workbench.doctor import checks, facts, shell, show, status, tools

    found, made = facts.examine(), tools.examine()
    if args.shell:
        print(shell.exports(found, made), end="")
        return 0
    needed, wanted = checks.runtime(found), checks.development(found, made)
    code = status(check.level for check in (*needed, *wanted)) if args.check else 0
    if args.json:
        listed = [dataclasses.asdict(check) for check in (*needed, *wanted)]
        print(json.dumps(found | {"tools": made, "checks": listed}, indent=2))
        return code
    colours = show.coloured()
    print(f"tiercel {found['tiercel']} on {found['platform']}\n")
    print("To run the precompiled kernels:")
    print(show.as_text(needed, colours))
    print("\nTo compile kernels of your own:")
    print(show.as_text(wanted, colours))
    print(f"\n{show.conclusion((*needed, *wanted))}")
    return code


def _log(name: str, as_json: bool, check: bool) -> int:
    from tiercel.workbench.doctor import logs, status

    try:
        if name == "-":
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            found = logs.diagnose(logs.lines_of(sys.stdin))
        else:
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                found = logs.diagnose(logs.lines_of(file))
    except OSError as error:
        print(f"tiercel doctor: cannot read {name}: {error.strerror}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        print(logs.as_text(found, name))
    return status(finding.level for finding in found) if check else 0
