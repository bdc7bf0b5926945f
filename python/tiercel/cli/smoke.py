# SPDX-License-Identifier: Apache-2.0
"""``tiercel smoke``: backends beside each other, correctness first."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tiercel.cli.values import number

HELP = "Checks and times backends, each in a process of its own: ours, installed ones, your files."
_EPILOG = (
    "Without BACKEND and --path: everything that is registered, by Tiercel and by installed "
    "packages. With --path alone: what the files register, beside sm90 and ref of these operators. "
    "The time is that of an eager call, the speed-up is against the reference. The exit "
    "code is 0 if all that ran were right, 1 if not, 2 if there was nothing to run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("backends", nargs="*", metavar="BACKEND", help="only those of these names")
    add("--op", help="only this operator")
    text = "a file that registers backends, or a folder of such files; may be repeated"
    add("--path", action="append", default=[], type=Path, metavar="FILE", help=text)
    text = "write JSON Lines, to tiercel-smoke.jsonl or to FILE"
    add("--save", nargs="?", const="tiercel-smoke.jsonl", type=Path, metavar="FILE", help=text)
    add(
        "--timeout",
        type=number(),
        default=120.0,
        metavar="S",
        help="for each backend (120 s)",
    )
    add("--list", action="store_true", help="only list the cases that would be tried")
    text = "show whole tracebacks, all of a compiler's errors, and what each process printed"
    add("--verbose", action="store_true", help=text)
    add("--device", choices=("cuda", "cpu"), help="by default cuda where there is one")


def run(args: argparse.Namespace) -> int:
    try:
        return _smoke(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"tiercel smoke: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tiercel smoke: interrupted", file=sys.stderr)
        return 130


def _smoke(args: argparse.Namespace) -> int:
    from tiercel import _needs_torch  # noqa: F401
    from tiercel.workbench.smoke import run as run_
    from tiercel.workbench.smoke import table

    targets = _targets(args)
    if args.list:
        print(_cases(targets))
        return 0
    device = args.device or _device()
    if device != _device() == "cpu":
        raise ValueError("--device cuda: PyTorch sees no GPU here; tiercel doctor says why")
    results = run_.run(targets, device, args.timeout, _tell)
    print(table.as_text(results))
    details = table.details(results, args.verbose)
    if details:
        print("\n" + details)
    if args.save is not None:
        lines = [json.dumps(record) + "\n" for record in table.records(results, device)]
        args.save.write_text("".join(lines), encoding="utf-8")
    # One that was named has to run.
    fine = (run_.RIGHT,) if args.backends else (run_.RIGHT, run_.SKIPPED)
    return 0 if all(result.status in fine for result in results) else 1


def _targets(args: argparse.Namespace) -> list[Any]:
    from tiercel.plugins import loading
    from tiercel.plugins.contracts import contract_of
    from tiercel.workbench.smoke import run as run_

    if args.op is not None:
        contract_of(args.op)
    found: list[Any] = []
    if args.backends or not args.path:
        found += run_.builtin(args.op)
        for point in loading.entry_points():
            found += run_.discover({"entry_point": point.name}, args.op, args.timeout)
    for path in args.path:
        files = loading.files_of(path) if path.is_dir() else [path]
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        for file in files:
            found += run_.discover({"path": str(file.resolve())}, args.op, args.timeout)
    if args.path and not args.backends:
        ops = dict.fromkeys(t.op for t in found if isinstance(t, run_.Target))
        found = [target for op in ops for target in run_.builtin(op)] + found
    known = {target.name for target in found if isinstance(target, run_.Target)}
    if args.backends:
        unknown = [name for name in args.backends if name not in known]
        if unknown:
            failed = "".join(
                f"\n  {r.target.origin}: {r.reason}" for r in found if isinstance(r, run_.Result)
            )
            names = ", ".join(sorted(known))
            raise ValueError(f"no backend {', '.join(unknown)}; there is {names}{failed}")
        found = [t for t in found if isinstance(t, run_.Target) and t.name in args.backends]
    if not found:
        raise ValueError("there is nothing to run")
    return found


def _cases(targets: list[Any]) -> str:
    """The contract, the cases and what is timed, of each operator among the targets."""
    from tiercel.plugins.contracts import CONTRACTS

    lines = []
    for op in dict.fromkeys(getattr(target, "op", "-") for target in targets):
        if op in CONTRACTS:
            contract = CONTRACTS[op]
            lines += [str(contract), *(f"  {case}" for case in contract.cases)]
            lines += [f"  timed on {device}: {case}" for device, case in contract.timing.items()]
    if not lines:
        raise ValueError("; ".join(f"{r.target.origin}: {r.reason}" for r in targets))
    return "\n".join(lines)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
