#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs `tiercel bench` on a GPU that is rented by the second, at Modal.

    ci/modal_bench.py --rate 4.00 --suite full --op topk_softmax --out results.jsonl

It needs `pip install modal`, an account (`modal setup`), and the wheel for Python 3.12
(`./bazelw run //python:dist -- dist`). The most that it can cost is said before it starts, and the
machine ends at the time limit whatever happens here. --rate is the GPU's price an hour, in dollars,
as Modal's price list has it today: this program knows no prices.
"""

import argparse
import pathlib
import sys

PYTHON = "3.12"
ROOT = pathlib.Path(__file__).resolve().parents[1]
THERE = "/root"


class Problem(Exception):
    """An error that the user can put right."""


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--suite", default="smoke", help="of python/tiercel/ops/*/suite.yaml (smoke)")
    add("--op", help="only this operator")
    add("--out", type=pathlib.Path, default="results.jsonl", help="the records (results.jsonl)")
    add("--wheel", type=pathlib.Path, default=ROOT / "dist", help="a wheel, or their folder (dist)")
    add("--gpu", default="H200", help="as Modal calls it: H200, H100! (H200)")
    add("--minutes", type=int, default=20, help="the time limit (20)")
    add("--rate", type=float, required=True, metavar="DOLLARS", help="the GPU's price an hour")
    add("--peers", default="all", help="as for tiercel bench (all: those that are installed)")
    add("--packages", nargs="*", default=[], help="peers to install there, such as quack-kernels")
    add("--yes", action="store_true", help="start without asking")
    found = parser.parse_args(words)
    if found.minutes < 1 or found.rate <= 0:
        parser.error("--minutes and --rate must be positive")
    return found


def find_wheel(place: pathlib.Path) -> pathlib.Path:
    tag = "cp" + PYTHON.replace(".", "")
    found = sorted(place.glob(f"tiercel-*-{tag}-*.whl")) if place.is_dir() else [place]
    if not found or not found[-1].is_file():
        raise Problem(f"no {tag} wheel in {place}: ./bazelw run //python:dist -- {place}")
    return found[-1]


def announcement(args: argparse.Namespace, wheel: pathlib.Path) -> str:
    most = args.rate * args.minutes / 60
    what = f"--suite {args.suite}" + (f" --op {args.op}" if args.op else "")
    return (
        f"tiercel bench {what} with {wheel.name}\non one {args.gpu} at ${args.rate:.2f} an hour, "
        f"at most {args.minutes} minutes: at most ${most:.2f} for the GPU, and Modal's share for "
        "CPU and memory"
    )


def confirmed(args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise Problem("nobody is there to ask: --yes starts it")
    return input("start? [y/N] ").strip().lower() in ("y", "yes")


def bench(modal, args: argparse.Namespace, wheel: pathlib.Path) -> int:
    """Rents the machine, runs, writes the records as far as they came; the machine always ends."""
    image = (
        modal.Image.debian_slim(python_version=PYTHON)
        .pip_install("torch>=2.9", "pyyaml", *args.packages)
        .add_local_file(str(wheel), f"{THERE}/{wheel.name}", copy=True)
        .run_commands(f"python -m pip install --no-deps {THERE}/{wheel.name}")
    )
    app = modal.App.lookup("tiercel-bench", create_if_missing=True)
    sandbox = modal.Sandbox.create(app=app, image=image, gpu=args.gpu, timeout=args.minutes * 60)
    try:
        words = ["--suite", args.suite, "--peers", args.peers]
        words += ["--out", f"{THERE}/results.jsonl"] + (["--op", args.op] if args.op else [])
        status = follow(sandbox, "python", "-m", "tiercel", "doctor")
        status = follow(sandbox, "python", "-m", "tiercel", "bench", *words)
        got = sandbox.exec("cat", f"{THERE}/results.jsonl")
        records = got.stdout.read()
        got.wait()
    finally:
        sandbox.terminate()
    if records:
        args.out.write_text(records)
        print(f"wrote {args.out}")
    return status


def follow(sandbox, *command: str) -> int:
    process = sandbox.exec(*command)
    for text in process.stdout:
        print(text, end="", flush=True)
    status = process.wait()
    if status:
        print(process.stderr.read(), file=sys.stderr)
    return status


def main(words: list[str] | None = None) -> int:
    args = options(words)
    try:
        wheel = find_wheel(args.wheel)
        print(announcement(args, wheel))
        try:
            import modal
        except ModuleNotFoundError:
            raise Problem(
                "the client is not installed: pip install modal, then modal setup"
            ) from None
        if not confirmed(args):
            print("not started")
            return 1
        return bench(modal, args, wheel)
    except Problem as problem:
        print(f"modal_bench: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("modal_bench: interrupted; the machine is ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
