# SPDX-License-Identifier: Apache-2.0
"""README.md as an index shows it: with absolute links, since the files they name are not there.

description.py README VERSION_BZL OUT
"""

import pathlib
import re
import sys

# A link or an image of Markdown, whose text may wrap, and its target without a scheme. Headings of
# the page itself, too: an index need not give them the anchors that the code host gives.
_TEXT = r"\[(?:[^\]\n]|\n(?!\s*\n))*\]"
_RELATIVE = re.compile(rf"(?P<before>(?P<image>!?){_TEXT}\()(?!\w+:|//)(?P<path>[^)\s]+)")


def constant(text: str, name: str) -> str:
    """A string of version.bzl."""
    return re.search(rf'^{name} = "([^"]+)"$', text, re.MULTILINE)[1]


def revision(version: str) -> str:
    """The git reference of a version's files: its tag; a nightly has none."""
    return "main" if ".dev" in version else f"v{version}"


def absolute(readme: str, repository: str, version: str) -> str:
    def link(match: re.Match) -> str:
        kind = "raw" if match["image"] else "blob"
        path = match["path"].removeprefix("./")
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{match['before']}{repository}/{kind}/{revision(version)}/{path}"

    return _RELATIVE.sub(link, readme)


def project_urls(repository: str) -> dict[str, str]:
    """The URLs of pyproject.toml; a test compares them with the wheel."""
    return {
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Documentation": f"{repository}/blob/main/docs/README.md",
        "Issues": f"{repository}/issues",
        "Source": repository,
    }


def main(readme: str, version_bzl: str, out: str) -> None:
    known = pathlib.Path(version_bzl).read_text()
    repository, version = constant(known, "REPOSITORY"), constant(known, "VERSION")
    pathlib.Path(out).write_text(absolute(pathlib.Path(readme).read_text(), repository, version))


if __name__ == "__main__":
    main(*sys.argv[1:])
