# SPDX-License-Identifier: Apache-2.0
"""``tiercel deploy``: try the wheel and your backends on another machine, over ssh."""

import argparse
import sys
import time
from pathlib import Path

HELP = "Runs doctor and smoke, bench or tune on another machine over ssh; leaves nothing there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "ssh is the system's own: its configuration, agent and known_hosts hold. The other end "
        "needs a Python with PyTorch. Ctrl-C stops what runs there and cleans up."
    )
    add = parser.add_argument
    add("--ssh", required=True, metavar="[USER@]HOST[:PORT]", help="the machine")
    text = "the wheel, or a folder of wheels, of which the fitting one is taken (dist)"
    add("--wheel", type=Path, nargs="+", default=[Path("dist")], metavar="PATH", help=text)
    text = "files that register backends, or folders of them, for smoke"
    add("--backends", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    text = "run tiercel bench there, with these options of its own (one text)"
    add("--bench", nargs="?", const="", metavar="OPTIONS", help=text)
    add("--suites", type=Path, metavar="PATH", help="the suites for --bench")
    text = "run tiercel tune there, such as --tune 'linear --quick'; --save brings its results.json"
    add("--tune", metavar="OPTIONS", help=text)
    text = "bring doctor's report and the results back into a folder (tiercel-deploy-DATE)"
    add("--save", nargs="?", const="", metavar="FOLDER", help=text)
    add("--python", default="python3", metavar="PROGRAM", help="there (python3)")
    text = "keep the environment there, in a new folder or one that --keep made before"
    add("--keep", metavar="FOLDER", help=text)


def run(args: argparse.Namespace) -> int:
    from tiercel.workbench.deploy import DeployError

    try:
        return _deploy(args)
    except DeployError as error:
        print(f"tiercel deploy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tiercel deploy: interrupted; the other end is cleaned up", file=sys.stderr)
        return 130


def _deploy(args: argparse.Namespace) -> int:
    from tiercel.workbench.deploy import job, session

    work = job.Work(args.backends, args.suites, args.bench, args.tune)

    def payload(there: dict[str, str]) -> bytes:
        wheel = job.choose_wheel(args.wheel, there)
        print(
            f"{there['host']}: Python {there['python']}, {there['libc']}; {wheel.name}", flush=True
        )
        return job.payload(wheel, work, args.keep)

    target = session.Target.parse(args.ssh)
    words = session.command(target, args.python)
    outcome = session.run(words, payload, session.Screen())
    if args.save is not None and outcome.results is not None:
        folder = Path(args.save or time.strftime("tiercel-deploy-%Y%m%d-%H%M%S"))
        for path in session.save(outcome.results, folder):
            print(f"wrote {path}")
    if args.keep:
        print(f"kept at the other end: PYTHONPATH={args.keep}/site {args.python} -m tiercel")
    return 1 if outcome.status else 0
