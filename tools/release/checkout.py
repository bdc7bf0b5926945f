# SPDX-License-Identifier: Apache-2.0
"""The checkout that is released: its commit, its cleanliness, its tags."""

import importlib.util
import pathlib

from shell import Failed, Shell


def bump_module(root: pathlib.Path):
    """ci/bump.py, which knows version.bzl and the changelog."""
    spec = importlib.util.spec_from_file_location("bump", root / "ci" / "bump.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkout:
    def __init__(self, root: pathlib.Path, shell: Shell) -> None:
        self.root, self.shell = root, shell

    def git(self, *words: str, check: bool = True) -> str:
        return self.shell.output(["git", *words], cwd=self.root, check=check)

    def commit(self) -> str:
        return self.git("rev-parse", "--verify", "HEAD^{commit}")

    def dirty(self) -> str:
        """What differs from the commit, untracked files included; "" where nothing does."""
        return self.git("status", "--porcelain", "--untracked-files=normal")

    def tagged(self, tag: str) -> str:
        """The commit of a local tag, or ""."""
        return self.git(
            "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}", check=False
        )

    def tagged_remotely(self, remote: str, tag: str) -> str:
        listed = self.git(
            "ls-remote", "--tags", remote, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"
        )
        # An annotated tag has two lines; the one that ends in ^{} is the commit.
        lines = sorted((line.split() for line in listed.splitlines()), key=lambda words: words[1])
        return lines[-1][0] if lines else ""

    def require_can_tag(self, remote: str, tag: str, commit: str) -> None:
        """Failed where the tag could not be made or pushed; asked before what cannot be undone."""
        try:
            self.git("var", "GIT_COMMITTER_IDENT")
        except Failed as error:
            raise Failed(
                f"git does not know who makes the tag {tag}: git config user.name and user.email,"
                f" or GIT_COMMITTER_NAME and GIT_COMMITTER_EMAIL\n{error}"
            ) from error
        if remote not in self.git("remote").split():
            return
        there = self.tagged_remotely(remote, tag)
        if there and there != commit:
            raise Failed(f"{remote} has {tag} at another commit, {there[:12]}")
        if not there:
            self.git("push", "--dry-run", "--quiet", remote, f"{commit}:refs/tags/{tag}")

    def require_ready(self, version: str) -> str:
        """The commit to release, or Failed with what is in the way."""
        bump = bump_module(self.root)
        try:
            bump.check(self.root, version)
        except bump.Refused as error:
            raise Failed(str(error)) from error
        if dirty := self.dirty():
            raise Failed(f"the tree is dirty: commit or remove these first\n{dirty}")
        commit = self.commit()
        tag = f"v{version}"
        if (there := self.tagged(tag)) and there != commit:
            raise Failed(
                f"{version} is released already: {tag} is {there[:12]}, this is {commit[:12]};"
                " ci/bump.py makes the next version"
            )
        return commit
