# SPDX-License-Identifier: Apache-2.0
"""The run behind ``tiercel bench``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tiercel import backends
from tiercel.workbench.bench import (
    BenchError,
    compare,
    environment,
    limits,
    ops,
    ours,
    peers,
    plot,
    table,
)
from tiercel.workbench.bench import cases as cases_
from tiercel.workbench.bench.records import Record, dump, from_result, read
from tiercel.workbench.bench.report import update
from tiercel.workbench.bench.runner import Settings, run_case
from tiercel.workbench.bench.timing import Clock, CudaClock


def report(args: argparse.Namespace) -> int:
    root = args.root or environment.checkout()
    if root is None:
        raise BenchError("not in a checkout: name one with --root FOLDER")
    folder = root / "benchmarks"
    current = update(folder, check=args.check)
    if args.check and not current:
        print(f"{folder / 'README.md'} is out of date: run `tiercel bench report`")
        return 1
    print(f"{folder / 'README.md'} {'is up to date' if current else 'written'}")
    return 0


def bench(args: argparse.Namespace, clock: Clock | None = None) -> int:
    """0 when all of ours was measured; 1 for a wrong or failed one, or a regression."""
    benches = ops.load()
    data = cases_.read(environment.suites_path(args.suites))
    chosen = cases_.select(data, benches, suite=args.suite, family=args.family, op=args.op)
    if args.list:
        say("\n".join(f"{case.op}  {case.name}  {case.dtype}" for case in chosen))
        return 0
    wanted = peers.choose(peers.load(), args.peers)
    old = read(args.compare) if args.compare else None
    for path in args.path:
        _load(path)
    if clock is None:
        environment.check_gpu()
        clock = CudaClock()
    common = environment.describe() | {"command": repeat(args)}
    versions, missing = peers.find(wanted)
    say(f"{common['gpu']}, driver {common['driver']}, torch {common['torch']}")
    for name, version in versions.items():
        say(f"peer {name} {version}")
    for name, reason in missing.items():
        say(f"peer {name} left out: {reason}")

    with sink(args.out) as file:
        rows: list[Record] = []

        def keep(record: Record) -> None:
            rows.append(record)
            if file is not None:
                file.write(dump(record) + "\n")
                file.flush()

        if args.limits:
            for record in limits.measure(clock):
                keep(common | record)
        measured = limits.summary(rows)
        say(f"limits: {limits.as_text(measured)}")
        settings = Settings(args.warmup, args.iterations, args.rounds)
        started = time.monotonic()
        for number, case in enumerate(chosen, 1):
            op = benches[case.op]
            names = args.peers not in ("all", "none")
            impls = ours.impls(op, args.backend) + peers.impls(wanted, versions, case, names)
            elapsed = time.monotonic() - started
            say(f"[{number}/{len(chosen)}, {elapsed:.0f} s] {case.op} {case.name} {case.dtype}")
            for result in run_case(op, case, impls, clock, settings, args.device):
                # A peer that does not offer an op is left out; an op that we lack is a failure.
                if result.status == "unsupported" and not result.impl.ours:
                    continue
                record = from_result(common, op, case, result, settings, measured)
                keep(record)
                say(table.result_line(record))
    return _conclude(args, rows, old)


def _load(path: Path) -> None:
    """The backends of a file of the user's: whatever is wrong with it is one line."""
    try:
        backends.load_path(path)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
        place = f", line {lines[-1]}" if lines else ""
        raise BenchError(f"cannot load {path}{place}: {type(error).__name__}: {said}") from None


def _conclude(args: argparse.Namespace, rows: list[Record], old: list[Record] | None) -> int:
    say("\n" + table.as_text(table.SUMMARY_HEAD, table.summary_rows(rows)))
    code = 0
    failed = [r for r in rows if r["impl"].startswith("tiercel") and r["status"] != "ok"]
    if failed:
        say(f"\nFAILED: {len(failed)} of our own measurements, the first:")
        say(f"{failed[0]['op']} {failed[0]['case']} {failed[0]['dtype']}: {failed[0]['reason']}")
        code = 1
    if old is not None:
        comparison = compare.compare(old, rows, args.threshold)
        say("\n" + compare.as_text(comparison, args.threshold))
        if comparison.regressions or comparison.lost:
            code = 1
    if args.plot:
        plot.draw(rows, args.plot)
        say(f"wrote {args.plot}")
    if args.out:
        say(f"wrote {args.out}")
    return code


def repeat(args: argparse.Namespace) -> str:
    """The command that repeats the run, without the places of files."""
    words = ["tiercel", "bench", "--suite", args.suite]
    if args.family:
        words += ["--family", args.family]
    for name in args.op or ():
        words += ["--op", name]
    if args.backend != ["sm90"]:
        words += ["--backend", *args.backend]
    words += ["--peers", args.peers]
    for name in ("warmup", "iterations", "rounds"):
        words += [f"--{name}", str(getattr(args, name))]
    return " ".join(words)


@contextlib.contextmanager
def sink(path: Path | None) -> Iterator[TextIO | None]:
    """Records are written as they come: an interrupted run leaves what it had."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None
    with file:
        yield file


def say(text: Any) -> None:
    print(text, flush=True)


def main(run: Any, args: argparse.Namespace) -> int:
    """Runs a subcommand; what the user can put right ends in one line."""
    try:
        return int(run(args))
    except BenchError as error:
        print(f"tiercel bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tiercel bench: interrupted", file=sys.stderr)
        return 130
