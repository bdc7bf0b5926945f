# SPDX-License-Identifier: Apache-2.0
"""The notes of a nightly: what to install, what changed, what was measured."""

import re

from checkout import Checkout

_COMMIT = re.compile(r"^Built from commit ([0-9a-f]{40})", re.MULTILINE)
MOST_COMMITS = 50
MOST_CHARACTERS = 100_000  # GitHub takes 125,000


def commit_of(text: str) -> str:
    """The commit that earlier notes name, or ""."""
    match = _COMMIT.search(text)
    return match[1] if match else ""


def measured(page: str) -> str:
    """The rendered part of benchmarks/README.md."""
    _, _, tables = page.partition("<!-- results: begin")
    tables, _, _ = tables.partition("<!-- results: end -->")
    _, _, tables = tables.partition("-->")
    return tables.strip()


def nightly(checkout: Checkout, version: str, commit: str, before: str) -> str:
    known = before and checkout.git("cat-file", "-t", before, check=False) == "commit"
    span = [f"{before}..{commit}"] if known else [commit]
    log = ["log", "--no-merges", "--format=- %s (%h)", f"--max-count={MOST_COMMITS + 1}", *span]
    lines = [line for line in checkout.git(*log).splitlines() if line]
    if len(lines) > MOST_COMMITS:
        lines[MOST_COMMITS:] = ["- and more"]
    since = f"Since {before[:12]}" if known else "The last commits"
    text = f"""\
`{version}`, a nightly build. Not a release: its wheels were audited and tried on each
Python.

Download the wheel for your Python from below, then `pip install ./tiercel-{version}-....whl`.

`sha256sum --check tiercel-{version}.SHA256SUMS` checks the files,
`tiercel-{version}.cdx.json` lists what is inside them.

Built from commit {commit}

## {since}

{chr(10).join(lines) or "Nothing."}
"""
    page = checkout.root / "benchmarks" / "README.md"
    tables = measured(page.read_text()) if page.exists() else ""
    if tables:
        head = "\n## Measured\n\n<details><summary>Tables of committed results</summary>\n\n"
        room = MOST_CHARACTERS - len(text) - len(head)
        if len(tables) > room:
            tables = tables[:room].rpartition("\n")[0] + "\n\nMore in benchmarks/README.md."
        text += f"{head}{tables}\n\n</details>\n"
    return text
