# SPDX-License-Identifier: Apache-2.0
"""Audits wheels: `ci/audit.sh [--version V] FOLDER_OR_WHEEL ...`.

A folder holds one wheel for each Python and nothing else of Tiercel; single wheels are audited each
by itself. When a folder passes, SHA256SUMS is written there and the bill of materials laid beside.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sys

from checks import CHECKS, SET_CHECKS
from module_checks import MODULE_CHECKS
from policy import Policy
from wheel_file import NotAWheel, Wheel

SUMS = "SHA256SUMS"


def audit(wheels: list[Wheel], policy: Policy, complete: bool) -> dict[str, list[str]]:
    """What is wrong, by check; a check that could not be made is wrong too."""
    found: dict[str, list[str]] = {}
    for check in [*CHECKS, *MODULE_CHECKS]:
        problems = found.setdefault(check.__name__, [])
        for wheel in wheels:
            try:
                problems += [f"{wheel.path.name}: {text}" for text in check(wheel, policy)]
            except Exception as error:
                problems.append(f"{wheel.path.name}: {type(error).__name__}: {error}")
    for check in SET_CHECKS if complete else SET_CHECKS[1:]:
        found[check.__name__] = list(check(wheels, policy))
    return found


def sums(folder: pathlib.Path) -> str:
    """The text of SHA256SUMS, as sha256sum --check reads it."""
    lines = []
    for path in sorted(folder.glob("tiercel-*")):
        if path.suffix in (".whl", ".gz", ".json"):
            lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    return "".join(lines)


def lay_beside(folder: pathlib.Path, wheel: Wheel) -> None:
    bill = wheel.members[f"{wheel.info}/sboms/tiercel.cdx.json"]
    (folder / f"tiercel-{wheel.tags['version']}.cdx.json").write_bytes(bill)
    (folder / SUMS).write_text(sums(folder))


def absolute(path: str) -> pathlib.Path:
    """Where the command was called: ./bazelw goes to the checkout from elsewhere, and says so."""
    called = os.environ.get("BAZELW_INVOKED_FROM") or os.environ.get("BUILD_WORKING_DIRECTORY", ".")
    return pathlib.Path(called, path).absolute()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/audit.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="", help="the version that the wheels must have")
    parser.add_argument(
        "--write-sizes", action="store_true", help="keep the sizes as the new table"
    )
    parser.add_argument("paths", nargs="*", default=["dist"], metavar="FOLDER_OR_WHEEL")
    args = parser.parse_args(arguments)
    policy = Policy.read(os.environ)
    policy.version = args.version

    failed = False
    for path in map(absolute, args.paths):
        files = sorted(path.glob("tiercel-*.whl")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            print(f"audit: error: no wheel of tiercel in {path}", file=sys.stderr)
            return 2
        try:
            wheels = [Wheel(file) for file in files]
        except NotAWheel as error:
            print(f"audit: error: {error}", file=sys.stderr)
            return 1
        for name, problems in audit(wheels, policy, complete=path.is_dir()).items():
            print(f"audit: {'FAILED' if problems else 'ok':6} {name}")
            for problem in problems:
                print(f"audit:        {problem}")
            failed |= bool(problems)
        grown = wheels[0].growth(policy.sizes)
        print(
            f"audit: {len(wheels)} wheel(s), {max(f.stat().st_size for f in files):,} bytes", end=""
        )
        print(f"; since the table of sizes: {', '.join(grown)}" if grown else "")
        if args.write_sizes:
            table = json.dumps(wheels[0].sizes(), indent=1, sort_keys=True) + "\n"
            workspace = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
            (workspace / "tools/audit/sizes.json").write_text(table)
        if path.is_dir() and not failed:
            lay_beside(path, wheels[0])
            print(f"audit: wrote {path / SUMS}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
