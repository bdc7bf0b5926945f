# SPDX-License-Identifier: Apache-2.0
"""A package index: what it has of a version (its simple API), and uploads to it (twine).

An index is named as twine names it: a section of ~/.pypirc, `pypi`, `testpypi`, or the address that
uploads go to.
"""

import dataclasses
import html.parser
import json
import os
import pathlib
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from shell import Failed, Shell

PACKAGE = "tiercel"
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, text/html;q=0.5"


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list) -> None:
        address = urllib.parse.urlsplit(dict(attrs).get("href") or "")
        if tag == "a" and address.path:
            name = urllib.parse.unquote(address.path.rsplit("/", 1)[1])
            fragment = urllib.parse.parse_qs(address.fragment)
            self.found[name] = fragment.get("sha256", [""])[0]


@dataclasses.dataclass
class Index:
    title: str  # in messages: "test index"
    repository: str
    secrets: dict[str, str]  # twine's environment variables

    @classmethod
    def production(cls) -> "Index":
        keys = ("TWINE_USERNAME", "TWINE_PASSWORD")
        secrets = {key: os.environ[key] for key in keys if os.environ.get(key)}
        return cls("index", os.environ.get("TIERCEL_REPOSITORY") or "pypi", secrets)

    @classmethod
    def test(cls) -> "Index":
        keys = {"TWINE_USERNAME": "TWINE_TEST_USERNAME", "TWINE_PASSWORD": "TWINE_TEST_PASSWORD"}
        secrets = {k: os.environ[name] for k, name in keys.items() if os.environ.get(name)}
        return cls("test index", os.environ.get("TIERCEL_TEST_REPOSITORY") or "testpypi", secrets)

    @property
    def upload_address(self) -> str:
        if "://" in self.repository:
            if "@" in urllib.parse.urlsplit(self.repository).netloc:
                # It would be an argument of twine, which everybody on the machine can see.
                raise Failed(
                    f"the address of the {self.title} holds credentials: see docs/releasing.md"
                )
            return self.repository
        try:
            from twine.exceptions import TwineException
            from twine.utils import get_repository_from_config
        except ImportError as error:  # --only tag, which runs without Bazel's packages
            raise Failed(f"the {self.title} {self.repository!r}: name it by address") from error

        try:
            return get_repository_from_config("~/.pypirc", self.repository)["repository"]
        except TwineException as error:
            raise Failed(f"the {self.title} {self.repository!r}: {error}") from error

    @property
    def simple_address(self) -> str:
        """Where pip looks. Public indexes take uploads at /legacy/, one at a host of its own."""
        parts = urllib.parse.urlsplit(self.upload_address)
        host = parts.netloc.rpartition("@")[2].removeprefix("upload.")
        path = parts.path.removesuffix("legacy/").rstrip("/") + "/simple/"
        return urllib.parse.urlunsplit((parts.scheme, host, path, "", ""))

    def files(self, version: str, timeout: float = 30) -> dict[str, str]:
        """File names of a version and their sha256."""
        address = urllib.parse.urljoin(self.simple_address, f"{PACKAGE}/")
        request = urllib.request.Request(address, headers={"Accept": _ACCEPT})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                kind, body = response.headers.get_content_type(), response.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}
            raise Failed(f"the {self.title} answers {error.code} to {address}") from error
        except OSError as error:
            raise Failed(f"the {self.title} does not answer at {address}: {error}") from error
        if kind == _JSON:
            entries = json.loads(body)["files"]
            found = {file["filename"]: file["hashes"].get("sha256", "") for file in entries}
        else:
            links = _Links()
            links.feed(body.decode())
            found = links.found
        prefix = f"{PACKAGE}-{version}"
        return {
            name: h for name, h in found.items() if name.startswith((f"{prefix}-", f"{prefix}.tar"))
        }

    def missing(self, ours: dict[str, str], version: str) -> list[str]:
        """Which of our files it lacks. Failed where it has the version with other contents."""
        there = self.files(version)
        other = sorted(name for name, digest in there.items() if ours.get(name) != digest)
        if other:
            raise Failed(
                f"{version} is released already: the {self.title} ({self.repository}) has"
                f" {', '.join(other)} with other contents; an index never takes a file name twice,"
                " so ci/bump.py makes the next version"
            )
        return sorted(ours.keys() - there.keys())

    def upload(self, folder: pathlib.Path, names: list[str], shell: Shell) -> None:
        """Uploads with twine, which reads the secrets from its environment or ~/.pypirc."""
        command = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
        command.append("--disable-progress-bar")
        kind = "--repository-url" if "://" in self.repository else "--repository"
        command += [kind, self.repository, *(folder / name for name in names)]
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        identity = "ACTIONS_ID_TOKEN_REQUEST_TOKEN"
        if not self.secrets and os.environ.get(identity):
            path[identity] = os.environ[identity]  # trusted publishing
        env = shell.environment(self.secrets | path | {"NO_COLOR": "1", "TERM": "dumb"})
        fails = f"the upload to the {self.title} failed; run the same command again to go on"
        shell.run(command, env=env, fails=fails, timeout=3600)

    def wait_for(self, ours: dict[str, str], version: str, seconds: float = 300) -> None:
        """Until the index shows what was uploaded: its cache may take a while."""
        limit = time.monotonic() + seconds
        while missing := self.missing(ours, version):
            if time.monotonic() > limit:
                raise Failed(f"the {self.title} does not show {', '.join(missing)} yet")
            time.sleep(2)
