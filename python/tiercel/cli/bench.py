# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench``: measures operators beside their peers; ``tiercel bench report`` renders."""

import argparse
from pathlib import Path

from tiercel.cli.values import number, whole

HELP = "Times operators beside their peers on this GPU, correctness first."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", default="smoke", help="smoke (default), full, or another of the suites")
    add("--suites", type=Path, metavar="PATH", help="a suites file, or a folder of them")
    add("--family", help="only this family's operators")
    add("--op", action="append", help="only this operator; may be repeated")
    add("--list", action="store_true", help="only list the cases; needs no GPU")
    text = "ours to measure (sm90); `invariant` is sm90 in the batch-invariant mode"
    add("--backend", nargs="+", default=["sm90"], metavar="B", help=text)
    text = "a file that registers backends, for --backend; may be repeated"
    add("--path", action="append", default=[], type=Path, metavar="FILE", help=text)
    add("--peers", default="all", metavar="all|none|A,B", help="others to measure (all)")
    add("--warmup", type=whole(0), default=3, help="replays before each round (3)")
    add("--iterations", type=whole(1), default=20, help="samples in each round (20)")
    add("--rounds", type=whole(1), default=5, help="interleaved rounds (5)")
    limits = argparse.BooleanOptionalAction
    add("--limits", action=limits, default=True, help="measure the GPU's limits first")
    add("--out", type=Path, metavar="FILE", help="write the records here (JSON Lines)")
    add("--compare", type=Path, metavar="FILE", help="set beside earlier records; fail if slower")
    text = "slower by this is a regression (0.05)"
    add("--threshold", type=number(least=0), default=0.05, help=text)
    add("--plot", type=Path, metavar="FILE", help="draw a roofline (PNG)")
    add("--device", default="cuda", help=argparse.SUPPRESS)
    parser.set_defaults(action="bench")
    commands = parser.add_subparsers(metavar="")
    text = "Renders benchmarks/README.md from the committed results."
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("--check", action="store_true", help="only say whether it is up to date")
    report.add_argument("--root", type=Path, metavar="FOLDER", help="the checkout")
    report.set_defaults(action="report")
    _add_model(commands)


def _add_model(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Times whole Hugging Face models with random weights, with and without Tiercel."
    model = commands.add_parser("model", help=text, description=text)
    add = model.add_argument
    text = "such as Qwen3-8B, or a file like those of tiercel/workbench/models/configs"
    add("names", nargs="*", metavar="NAME", help=text + " (Llama-3.2-1B Qwen3-8B)")
    add("--layers", type=whole(1), metavar="N", help="only the first N layers (all)")
    text = "another value in the configuration, in JSON; can be given several times"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    shapes = {
        "prefill": (["1x128", "1x4096", "8x1024"], "prompts, batch x tokens"),
        "decode": (["1x2048", "32x2048"], "decoding steps, batch x context"),
        "train": (["1x4096"], "training steps, batch x tokens"),
    }
    for phase, (default, text) in shapes.items():
        text += f" ({' '.join(default)})"
        add(f"--{phase}", nargs="*", default=default, metavar="BxN", help=text)
    text = "transformers, transformers.compiled, tiercel, tiercel.compiled, engine, liger (all)"
    add("--ways", default="all", metavar="all|A,B", help=text)
    add("--engine", metavar="FOLDER", help="examples/engine of a checkout, for the way engine")
    add("--steps", type=whole(1), default=20, help="steps to time (20), short ones repeatedly")
    text = "where compiled graphs are kept for the next run (a folder of torch's own)"
    add("--cache", type=Path, metavar="FOLDER", help=text)
    text = "begin no case or way after that many seconds; those left out are named"
    add("--seconds", type=number(least=0), metavar="S", help=text)
    add("--out", type=Path, metavar="FILE", help="write the records here (JSON Lines)")
    add("--device", default="cuda", help=argparse.SUPPRESS)
    model.set_defaults(action="model")


def run(args: argparse.Namespace) -> int:
    # Only now: they are of no use to the other commands.
    from tiercel.workbench.bench import command

    if args.action != "model":
        return command.main(getattr(command, args.action), args)
    return command.main(_model, args)


def _model(args: argparse.Namespace) -> int:
    from tiercel.workbench.bench import environment

    environment.check_torch()
    from tiercel.workbench.models.command import model

    return model(args)
