# SPDX-License-Identifier: Apache-2.0
"""Pages are found from docs/README.md, commands have one, and README lists what may be set."""

import os
import re
from pathlib import Path

import pytest

import tiercel

README = Path(os.environ.get("README", Path(__file__).parents[2] / "README.md")).absolute()
DOCS = README.parent / "docs"
READS = re.compile(r"""(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\()\s*["'](TIERCEL_[A-Z_]+)""")


def variables():
    """What the package reads of the environment, but for the benchmark and what tests set."""
    package = Path(tiercel.__file__).parent
    found = set()
    for folder, _, names in os.walk(package, followlinks=True):  # an overlay is of links
        if "bench" not in Path(folder).relative_to(package).parts:
            texts = [Path(folder, name).read_text() for name in names if name.endswith(".py")]
            found |= {name for text in texts for name in READS.findall(text)}
    return found


def test_readme_lists_the_environment_variables():
    listed = set(re.findall(r"^\| `(TIERCEL_[A-Z_]+)", README.read_text(), re.MULTILINE))
    found = variables()
    assert "TIERCEL_JIT" in found
    assert found - listed == set()


def test_every_page_is_linked():
    linked = set(re.findall(r"\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} - linked == {"README.md"}


@pytest.mark.parametrize(
    ("page", "command"), [("profiling.md", "profile"), ("deploy.md", "deploy")]
)
def test_a_page_names_the_options_that_there_are(page, command, capsys):
    from tiercel.cli import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped = capsys.readouterr().out
    text = (DOCS / page).read_text()
    for option in re.findall(r"\[?(--[a-z]+)", helped):
        if option != "--help":
            assert option in text, option
