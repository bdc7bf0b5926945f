#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times two wheels beside each other on this machine's GPU: did a change make anything slower?

    ci/compare_wheels.py OLD.whl NEW.whl [--family NAME ...] [--suite full] [--rounds 3]

Each round runs `tiercel bench --peers none` with one wheel and then with the other, in the other
order the next time, so that a drift of the clocks meets both. A case's ratio is the median over
rounds of new / old. Exits with 1 where a case is slower by more than --threshold (0.01).
"""

import argparse
import collections
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile

SIDES = ("old", "new")
OPS = pathlib.Path(__file__).resolve().parents[1] / "python" / "tiercel" / "ops"


def environment(folder: pathlib.Path, wheel: pathlib.Path) -> str:
    """A Python with this wheel and the packages of the running one."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", folder],
        check=True,
    )
    python = str(folder / "bin" / "python")
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    outer = sysconfig.get_path("purelib")
    pathlib.Path(site, "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    install = "pip --disable-pip-version-check install --quiet --no-index --no-deps"
    command = [python, "-m", *install.split(), "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True)
    return python


def measure(python: str, args: argparse.Namespace, family: str | None, out: pathlib.Path) -> None:
    command = [python, "-P" if sys.version_info >= (3, 11) else "-I", "-m", "tiercel", "bench"]
    command += ["--peers", "none", "--suite", args.suite, "--suites", str(args.suites)]
    command += ["--no-limits", "--rounds", "3", "--out", str(out)]
    if family is not None:
        command += ["--family", family]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.stderr)


def milliseconds(file: pathlib.Path) -> dict[tuple[str, ...], float]:
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if record.get("impl") == "tiercel" and record.get("ms_median"):
            key = tuple(str(record[name]) for name in ("op", "case", "dtype", "timing"))
            found[key] = record["ms_median"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--family", action="append", help="only these families")
    parser.add_argument("--suite", default="full")
    parser.add_argument("--suites", type=pathlib.Path, help="default: those of this checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threshold", type=float, default=0.01)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    times: dict[tuple[str, ...], dict[str, list[float]]] = collections.defaultdict(
        lambda: {side: [] for side in SIDES}
    )
    with tempfile.TemporaryDirectory() as scratch:
        if args.suites is None:  # in one folder, where older wheels look for them
            args.suites = pathlib.Path(scratch, "suites")
            args.suites.mkdir()
            for file in OPS.glob("*/suite.yaml"):
                shutil.copy(file, args.suites / f"{file.parent.name}.yaml")
        pythons = {
            side: environment(pathlib.Path(scratch, side), getattr(args, side)) for side in SIDES
        }
        for family in args.family or [None]:
            for number in range(args.rounds):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    out = args.out / f"compare-{family or 'all'}-{number}-{side}.jsonl"
                    measure(pythons[side], args, family, out)
                    for key, ms in milliseconds(out).items():
                        times[key][side].append(ms)
                print(
                    f"{family or 'all families'}: round {number + 1} of {args.rounds}", flush=True
                )
    return report(times, args)


def report(times: dict[tuple[str, ...], dict[str, list[float]]], args: argparse.Namespace) -> int:
    ratios = {}
    for key, sides in times.items():
        if sides["old"] and sides["new"]:
            pairs = zip(sides["old"], sides["new"], strict=False)
            ratios[key] = statistics.median(new / old for old, new in pairs)
        else:
            print(f"measured with one wheel only: {' '.join(key)}")
    if not ratios:
        print("compare_wheels: error: nothing was measured with both", file=sys.stderr)
        return 2
    by_op = collections.defaultdict(list)
    for key, ratio in ratios.items():
        by_op[key[0], key[3]].append(ratio)
    for (op, timing), values in by_op.items():
        mean = statistics.geometric_mean(values)
        print(f"{op:28} {timing:6} {len(values):4} cases  {mean:.4f}  worst {max(values):.4f}")
    slower = {key: r for key, r in ratios.items() if r > 1 + args.threshold}
    for key, ratio in sorted(slower.items(), key=lambda item: -item[1]):
        sides = times[key]
        us = " -> ".join(f"{statistics.median(sides[side]) * 1e3:.2f}" for side in SIDES)
        print(f"slower {ratio:.4f}  {us} us  {' '.join(key)}")
    print(f"{len(ratios)} cases, {len(slower)} slower by more than {args.threshold:.0%}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
