# SPDX-License-Identifier: Apache-2.0
"""The run behind ``tiercel tune``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiercel._terminal import line
from tiercel.cache.lock import locked_now
from tiercel.core import tuned
from tiercel.workbench.bench import BenchError
from tiercel.workbench.tune import TuneError, hardware, ops, results, shared
from tiercel.workbench.tune.apply import apply as apply_results
from tiercel.workbench.tune.board import Board, Heart, LocalBoard, StoreBoard
from tiercel.workbench.tune.journal import Journal
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Batch, Problem, batches
from tiercel.workbench.tune.progress import Progress
from tiercel.workbench.tune.worker import (
    Bench,
    DeviceLost,
    Final,
    final_key,
    finalists,
    finals,
    sweep,
)


def tune(args: argparse.Namespace) -> int:
    tunable = ops.load()[args.what]
    work, pruned = plan(tunable, args)
    where = shared.place()
    total = sum(len(batch.candidates) for batch in work)
    if where.rank == 0:
        say(f"{tunable.op}: {total} trials, {pruned} pruned: they cannot fit")
    if args.dry_run:
        return _list(work)
    bench = _bench(args, tunable, where)
    facts = bench.facts()
    same = {name: facts[name] for name in ("gpu", "tiercel", "commit")}
    folder = args.output.with_name(args.output.name + ".journal")
    with _alone(folder, where.worker), shared.one_line_without_store(where):
        journal = Journal(folder, where.worker, same)
        try:
            groups, records = _measure(args, tunable, work, total, bench, journal, where)
        finally:
            journal.close()
    if groups is None:
        return 0
    counts: dict[str, int] = {}
    for record in records:
        counts[record["status"]] = counts.get(record["status"], 0) + 1
    now = datetime.datetime.now(datetime.timezone.utc)
    date = f"{now:%Y-%m-%dT%H:%M:%SZ}"
    data = results.collect(tunable, groups, counts, facts, repeat(args), date)
    results.write(args.output, data)
    say(results.table(data))
    for status, count in sorted(counts.items()):
        if status != "ok":
            first = next(r for r in records if r["status"] == status)
            say(f"{count} candidates: {status}, the first: {first['trial']}: {first['reason']}")
    say(f"wrote {args.output}; `tiercel tune apply {args.output}` makes operators use it")
    return 0 if any(row["best_precompiled"] for row in data["results"]) else 1


def plan(tunable: Tunable, args: argparse.Namespace) -> tuple[list[Batch], int]:
    """The trials, in an order that is the same in every worker, and how much was pruned."""
    problems = args.problem or tunable.problems
    tokens = sorted(set(args.num_tokens or tunable.tokens))
    work: list[Batch] = []
    pruned = 0
    for dtype in dict.fromkeys(args.dtype or tunable.dtypes[:1]):
        if dtype not in tunable.dtypes:
            known = ", ".join(tunable.dtypes)
            raise TuneError(f"--dtype must be one of {known}, got {dtype}")
        for sizes in problems:
            named = tuple(zip(tunable.sizes, sizes, strict=True))
            problem = Problem(tunable.op, named, dtype)
            for count in tokens:
                reason = tunable.invalid(problem, count)
                if reason is not None:
                    raise TuneError(f"{problem.name}, {count} tokens: {reason}")
                every = tunable.candidates(problem, count, args.quick, args.compile)
                fitting = [
                    c for c in every if hardware.why_not(tunable.needs(problem, count, c)) is None
                ]
                pruned += len(every) - len(fitting)
                work += batches(problem, count, fitting)
    return work, pruned


def _measure(
    args: argparse.Namespace,
    tunable: Tunable,
    work: list[Batch],
    total: int,
    bench: Bench,
    journal: Journal,
    where: shared.Place,
) -> tuple[list[tuple[Final, Any]] | None, list[Any]]:
    """(the final records, all records), or None for a worker that is not to write them."""
    heart = None
    if where.world > 1:
        heart = Heart(shared.connect(where), where.worker, lease=args.lease)
    try:
        if heart is not None:
            _agree(heart, where, repeat(args), bench.facts())
        board = _board(heart, "sweep", [batch.name for batch in work])
        trials = [batch.trial(c) for batch in work for c in batch.candidates]
        known = sum(trial in journal.records for trial in trials)
        progress = Progress(total, known)
        if known:
            say(f"{known} trials are in the journal already")
        sweep(work, board, bench, journal, progress, args.trial_limit)
        found = {trial: board.find(trial) for trial in trials}
        records = {trial: record for trial, record in found.items() if record is not None}
        groups = finalists(work, records, args.finalists, tunable.precompiled)
        last = _board(heart, "final", [final_key(group) for group in groups])
        finals(groups, last, bench, journal, args.trial_limit)
        if heart is not None and not _writes(heart, where):
            return None, []
        named = [(group, last.find(final_key(group))) for group in groups]
        if heart is not None:
            heart.store.set("written", "1")
            if where.rank == 0:
                _wait_for_others(heart, where)
        return named, list(records.values())
    finally:
        if heart is not None:
            heart.stop()


def _agree(heart: Heart, where: shared.Place, command: str, facts: dict[str, str]) -> None:
    """All workers must measure the same on the same kind of GPU, with the same kernels.

    Rank 0 says what, whoever comes first: if it left, its store would leave with it.
    """
    mine = " | ".join((command, facts["gpu"], facts["tiercel"], facts["commit"]))
    if where.rank == 0:
        heart.store.set("what", mine)
        return
    first = heart.store.get("what").decode()
    if first != mine:
        raise TuneError(f"workers differ: rank 0 runs `{first}`, this one `{mine}`")


def _board(heart: Heart | None, prefix: str, names: Sequence[str]) -> Board:
    return LocalBoard(len(names)) if heart is None else StoreBoard(heart, prefix, names)


def _writes(heart: Heart, where: shared.Place) -> bool:
    """True if this worker writes the results: the lowest rank that lives does."""
    while True:
        lower = [str(rank) for rank in range(where.rank)]
        if not any(heart.alive(worker) for worker in lower):
            return bool(
                heart.store.compare_set("writer", "", where.worker).decode() == where.worker
            )
        if heart.store.check(["written"]):
            heart.store.add("left", 1)
            return False
        time.sleep(0.2)


def _wait_for_others(heart: Heart, where: shared.Place) -> None:
    """The store may be this process's: it stays until the living others have left."""
    while heart.store.add("left", 0) < where.world - 1:
        if not any(heart.alive(str(rank)) for rank in range(1, where.world)):
            return
        time.sleep(0.2)


def _bench(args: argparse.Namespace, tunable: Tunable, where: shared.Place) -> Bench:
    if args.bench is not None:  # a stand-in, as tests have it
        module, _, name = args.bench.partition(":")
        bench: Bench = getattr(importlib.import_module(module), name)(tunable)
        return bench
    from tiercel.workbench.bench.environment import check_gpu

    check_gpu()
    import torch

    torch.cuda.set_device(where.local_rank % torch.cuda.device_count())
    if args.compile:
        os.environ["TIERCEL_JIT"] = "1"
        from tiercel.jit.cute_kernel import why_not

        problem = why_not()
        if problem is not None:
            raise TuneError(problem)
    from tiercel.workbench.tune.gpu_bench import GpuBench

    return GpuBench(tunable)


@contextlib.contextmanager
def _alone(folder: Path, worker: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(f"cannot keep a journal in {folder}: {error.strerror}") from None
    with locked_now(folder / f"{worker}.lock") as mine:
        if not mine:
            raise TuneError(f"another process is tuning into {folder}")
        yield


def _list(work: Sequence[Batch]) -> int:
    for batch in work:
        for candidate in batch.candidates:
            print(batch.trial(candidate))
    return 0


def apply(args: argparse.Namespace) -> int:
    data = results.read(args.results)
    tunables = {tunable.op: tunable for tunable in ops.load().values()}
    op = line(data["op"])
    if op not in tunables:
        raise TuneError(f"{args.results} is for {op}, which is no operator that is tuned")
    written = apply_results(data, tunables[op], args.to or tuned.FOLDER)
    for path, count in written:
        say(f"wrote {path}: {count} numbers of tokens")
    if not written:
        raise TuneError(f"{args.results} has no winner")
    return 0


def repeat(args: argparse.Namespace) -> str:
    """The command that repeats the sweep, without the places of files."""
    words = ["tiercel tune", args.what]
    sizes = ops.load()[args.what].sizes
    for problem in args.problem or ():
        text = ",".join(f"{name}={size}" for name, size in zip(sizes, problem, strict=True))
        words.append(f"--problem {text}")
    if args.num_tokens:
        words.append("--num-tokens " + " ".join(map(str, args.num_tokens)))
    if args.dtype:
        words.append("--dtype " + " ".join(args.dtype))
    words += [f"--{name}" for name in ("quick", "compile") if getattr(args, name)]
    return " ".join(words)


def say(text: str) -> None:
    print(text, flush=True)


def main(run: Any, args: argparse.Namespace) -> int:
    """Runs a subcommand; what the user can put right ends in one line."""
    try:
        return int(run(args))
    except (TuneError, BenchError) as error:
        print(f"tiercel tune: {error}", file=sys.stderr)
        return 2
    except DeviceLost as error:
        print(
            f"tiercel tune: the GPU's context is lost after {error}; "
            "run the command again to go on without it",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("tiercel tune: interrupted; run the command again to go on", file=sys.stderr)
        return 130
