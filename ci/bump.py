#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes the one version (version.bzl) and dates the changelog's section for it.

    ci/bump.py 0.2.0            the section [Unreleased] becomes [0.2.0] with today's date
    ci/bump.py --check 0.2.0    says whether that was done, and changes nothing

Both files are written or none. README.md's wheel names follow.
"""

import argparse
import datetime
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^VERSION = "(?P<version>[^"]+)"$', re.MULTILINE)
# A final release or a pre-release of PEP 440, in its normal form, with three numbers.
RELEASE = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:(a|b|rc)(0|[1-9]\d*))?")
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)
UNRELEASED = "Unreleased"


class Refused(Exception):
    pass


def current(root: pathlib.Path = ROOT) -> str:
    match = VERSION.search((root / "version.bzl").read_text())
    if not match:
        raise Refused('version.bzl has no line VERSION = "..."')
    return match["version"]


def order(version: str) -> tuple:
    """Sorts versions as PEP 440 does: 0.2.0rc1 comes before 0.2.0."""
    match = RELEASE.fullmatch(version)
    if not match:
        raise Refused(f"{version!r} is no version: expected X.Y.Z, X.Y.ZaN, X.Y.ZbN or X.Y.ZrcN")
    *numbers, stage, number = match.groups()
    return (*map(int, numbers), stage or "z", int(number or 0))


def section(changelog: str, version: str) -> tuple[str, str]:
    """(date, text) of a version's section; both empty where there is none."""
    headings = list(HEADING.finditer(changelog))
    for n, heading in enumerate(headings):
        if heading["version"] == version:
            end = headings[n + 1].start() if n + 1 < len(headings) else len(changelog)
            return heading["date"] or "", changelog[heading.end() : end].strip()
    return "", ""


def dated(changelog: str, version: str, date: str) -> str:
    """The changelog with the unreleased section given to `version`."""
    if section(changelog, version) != ("", ""):
        raise Refused(f"CHANGELOG.md has a section [{version}] already")
    _, text = section(changelog, UNRELEASED)
    text = re.sub(r"^To become .*$\n*", "", text, count=1, flags=re.MULTILINE)
    if not re.search(r"^- ", text, re.MULTILINE):
        raise Refused(f"CHANGELOG.md: nothing is listed under [{UNRELEASED}]")
    (heading,) = [h for h in HEADING.finditer(changelog) if h["version"] == UNRELEASED]
    after = re.search(r"^## \[", changelog[heading.end() :], re.MULTILINE)
    rest = changelog[heading.end() :][after.start() :] if after else ""
    head = changelog[: heading.start()]
    return f"{head}## [{UNRELEASED}]\n\n## [{version}] - {date}\n\n{text}\n" + (
        rest and "\n" + rest
    )


def check(root: pathlib.Path, version: str) -> None:
    order(version)
    if current(root) != version:
        raise Refused(f"version.bzl says {current(root)}, not {version}: run ci/bump.py {version}")
    date, text = section((root / "CHANGELOG.md").read_text(), version)
    if not date or not text:
        raise Refused(f"CHANGELOG.md has no dated section [{version}]: run ci/bump.py {version}")


def bump(root: pathlib.Path, version: str, date: str) -> None:
    old = current(root)
    new_order, old_order = order(version), order(old)
    unreleased = section((root / "CHANGELOG.md").read_text(), old) == ("", "")
    if new_order < old_order or (new_order == old_order and not unreleased):
        raise Refused(f"{version} does not come after {old}")
    changelog = dated((root / "CHANGELOG.md").read_text(), version, date)
    source = (root / "version.bzl").read_text()
    readme = (root / "README.md").read_text()
    replace(
        {
            root / "CHANGELOG.md": changelog,
            root / "README.md": readme.replace(f"tiercel-{old}-cp", f"tiercel-{version}-cp"),
            root / "version.bzl": VERSION.sub(f'VERSION = "{version}"', source),
        }
    )


def replace(files: dict[pathlib.Path, str]) -> None:
    """Writes each file beside its old self first, so that a full disk changes nothing."""
    written = []
    try:
        for path, text in files.items():
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                written.append((file.name, path))
                file.write(text)
            os.chmod(file.name, path.stat().st_mode)
        for name, path in written:
            os.replace(name, path)
    finally:
        for name, _ in written:
            pathlib.Path(name).unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help=argparse.SUPPRESS)
    parser.add_argument("version", help="X.Y.Z, X.Y.ZaN, X.Y.ZbN or X.Y.ZrcN")
    args = parser.parse_args()
    try:
        if args.check:
            check(ROOT, args.version)
        else:
            bump(ROOT, args.version, args.date)
            print(f"{args.version}: look at `git diff`, commit, then ci/release.sh {args.version}")
    except Refused as error:
        print(f"bump: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
