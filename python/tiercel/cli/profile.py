# SPDX-License-Identifier: Apache-2.0
"""``tiercel profile``: a command under ncu, nsys or compute-sanitizer, and what a report says."""

import argparse
import json
import sys
from pathlib import Path

HELP = "Runs a command under Nsight Compute, Nsight Systems or compute-sanitizer; reads reports."
_USAGE = """\
tiercel profile ncu|nsys|sanitizer [--extract] [--out FOLDER] [TOOL OPTIONS] -- COMMAND
       tiercel profile extract FILE... [--json] [--kernel NAME] [--floor SIZE]

The tool's own options pass through, for example
  tiercel profile ncu --extract --kernel-name regex:topk -- python script.py
  tiercel profile ncu --set full --launch-count 1 -- python script.py
  tiercel profile sanitizer --tool racecheck -- python script.py
"""


_TOOLS = ("ncu", "nsys", "sanitizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    # All words, `--` among them: a positional before them would swallow it.
    words = parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    words.completes = (*_TOOLS, "extract")  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    from tiercel.workbench.profiling import ProfileError

    tool, words = (args.words or [""])[0], args.words[1:]
    try:
        if tool == "extract":
            return _extract(words)
        if tool in _TOOLS:
            return _profile(tool, words)
        raise ProfileError(f"choose one of {', '.join(_TOOLS)} and extract, got {tool!r}")
    except ProfileError as error:
        print(f"tiercel profile: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tiercel profile: interrupted", file=sys.stderr)
        return 130


def _profile(tool: str, words: list[str]) -> int:
    from tiercel.workbench.profiling import ProfileError, launch, reports

    parser = argparse.ArgumentParser(
        prog=f"tiercel profile {tool}", usage=_USAGE, allow_abbrev=False
    )
    parser.add_argument("--extract", action="store_true", help="print what the report says")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for the report")
    before, command = words, []
    if "--" in words:
        place = words.index("--")
        before, command = words[:place], words[place + 1 :]
    args, options = parser.parse_known_args(before)
    if not command:
        raise ProfileError("say what to run: tiercel profile " + tool + " [OPTIONS] -- COMMAND")
    status, report = launch.run(tool, options, command, args.out)
    print(f"report: {report}")
    if tool == "sanitizer":
        found = reports.from_sanitizer(_text(report))
        for line in found["first"]:
            print(f"  {line}")
        print(f"{found['errors']} errors" if found["finished"] else "it did not finish")
        return 1 if found["errors"] or not found["finished"] else status
    if args.extract:
        _print(reports.read(report), as_json=False)
    return status


def _text(path: Path) -> str:
    from tiercel.workbench.profiling import ProfileError

    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from None


def _extract(words: list[str]) -> int:
    from tiercel.cache.folder import parse_size
    from tiercel.workbench.profiling import ProfileError, reports

    parser = argparse.ArgumentParser(prog="tiercel profile extract", usage=_USAGE)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--kernel", metavar="NAME", help="only kernels with this in their name")
    parser.add_argument("--floor", metavar="SIZE", help="bytes that a launch has to move (64MB)")
    args = parser.parse_args(words)
    floor = None
    if args.floor:
        try:
            floor = parse_size(args.floor)
        except ValueError as error:
            raise ProfileError(str(error)) from None
        if floor == 0:
            raise ProfileError("--floor must be more than 0 bytes")

    def read(file: Path) -> object:
        if file.name.endswith(".sanitizer.txt"):
            return reports.from_sanitizer(_text(file))
        found = reports.read(file, args.kernel)
        return found if floor is None else reports.floors(found, floor)

    all_found = {str(file): read(file) for file in args.files}
    several = len(all_found) > 1
    if args.json and several:  # by file
        print(json.dumps(all_found, indent=2))
        return 0
    for name, found in all_found.items():
        if several:
            print(f"{name}:")
        if isinstance(found, list):
            _print(found, args.json)
        else:
            print(json.dumps(found, indent=2))
    return 0


def _print(found: "list[dict[str, object]]", as_json: bool) -> None:
    from tiercel.workbench.profiling import show

    print(json.dumps(found, indent=2) if as_json else "\n".join(map(show.as_text, found)))
