# SPDX-License-Identifier: Apache-2.0
"""The run behind ``tiercel bench model``."""

from __future__ import annotations

import argparse
import os
import shlex
import time

from tiercel.workbench.bench import BenchError, environment
from tiercel.workbench.bench.command import say, sink
from tiercel.workbench.bench.records import dump
from tiercel.workbench.bench.table import as_text
from tiercel.workbench.models import PHASES, WAYS, page, run


def model(args: argparse.Namespace) -> int:
    """0 when all of ours was measured."""
    if args.device == "cuda":
        environment.check_gpu()
    names = args.names or ("Llama-3.2-1B", "Qwen3-8B")
    chosen = [run.read_sizes(name).changed(args.set) for name in names]
    cases = [_case(phase, text) for phase in PHASES for text in getattr(args, phase)]
    ways = _ways(args.ways, args.engine)
    common = environment.describe() | {"transformers": run.import_transformers().__version__}
    common["command"] = repeat(args)
    say(f"{common['gpu']}, torch {common['torch']}, transformers {common['transformers']}")
    if args.cache is not None:
        run.keep_compiled(args.cache)
    until = None if args.seconds is None else time.monotonic() + args.seconds
    failed = 0
    with sink(args.out) as file:
        for sizes in chosen:
            layers = min(args.layers or sizes.layers, sizes.layers)
            found: dict[str, list[page.Record]] = {}
            given = (cases, ways, args.steps, args.device, args.engine, until)
            said: set[str] = set()
            for record in run.measure(sizes, layers, *given):
                if record["status"] == "left out":
                    say(f"{record['way']}, {record['phase']} {record['case']}: no time left")
                    continue
                replaced = record.pop("replaced", None)
                if replaced is not None and replaced not in said:
                    said.add(replaced)
                    say(f"{sizes.name}, {record['phase']}, replaced:\n{replaced}")
                record = common | record
                found.setdefault(f"{record['phase']} {record['case']}", []).append(record)
                if file is not None:
                    file.write(dump(record) + "\n")
                    file.flush()
                if record["status"] != "ok":
                    failed += record["way"].startswith("tiercel")
                    say(f"{record['way']}, {record['phase']} {record['case']}: {record['reason']}")
            for case, records in found.items():
                table = as_text(page.HEAD, page.rows(records))
                say(f"\n{sizes.name}, {layers} layers, {case}\n{table}")
    if args.out:
        say(f"wrote {args.out}")
    return int(failed > 0)


def _ways(text: str, engine: str | None) -> list[str]:
    if text == "all":
        wanted = list(WAYS)
    else:
        wanted = [way for way in WAYS if way in text.split(",")]
        for name in text.split(","):
            if name not in WAYS:
                raise BenchError(f"no way {name!r}; there are {', '.join(WAYS)}")
    for way in [way for way in wanted if run.version(way) is None]:
        say(f"{way} left out: it is not installed")
        wanted.remove(way)
    if "engine" in wanted and engine is None:
        say("engine left out: --engine FOLDER says where it is, examples/engine of a checkout")
        wanted.remove("engine")
    return wanted


def _case(phase: str, text: str) -> run.Case:
    batch, x, tokens = text.partition("x")
    if not (x and batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise BenchError(f"--{phase}: {text!r} is not BATCHxTOKENS, such as 1x4096")
    return run.Case(phase, int(batch), int(tokens))


# Liger's: "0" leaves its experts' kernels one configuration each. With a choice it compiles and
# times 240 of them at the first call, for minutes.
_LIGER_TUNES = "LIGER_FUSED_MOE_AUTOTUNE"


def repeat(args: argparse.Namespace) -> str:
    """The command that repeats the run, without the places of files."""
    tunes = os.environ.get(_LIGER_TUNES)
    words = [] if tunes is None else [f"{_LIGER_TUNES}={shlex.quote(tunes)}"]
    words += ["tiercel", "bench", "model", *args.names]
    if args.layers:
        words += ["--layers", str(args.layers)]
    for change in args.set:
        words += ["--set", shlex.quote(change)]
    for phase in PHASES:
        words += [f"--{phase}", *getattr(args, phase)]
    if args.engine:
        words += ["--engine", "examples/engine"]
    return " ".join([*words, "--ways", args.ways, "--steps", str(args.steps)])
