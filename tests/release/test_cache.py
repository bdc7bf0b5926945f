# SPDX-License-Identifier: Apache-2.0
"""One variable gives Bazel a remote cache, and nginx with our configuration is one."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path("tests/release").absolute()))

from nginx import Nginx, NotHere


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Nginx]:
    try:
        found = Nginx(tmp_path)
    except NotHere as error:
        pytest.skip(str(error))
    yield found
    found.close()


def ask(address: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(address, data=body, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_nginx_is_a_remote_cache(server: Nginx) -> None:
    """What Bazel asks of a cache: PUT and GET by hash, 404 for what is not there."""
    body = bytes(range(256)) * 10_000
    address = f"{server.address}tiercel/cas/{hashlib.sha256(body).hexdigest()}"
    assert ask(address)[0] == 404
    assert ask(address, "PUT", body)[0] == 201
    assert ask(address) == (200, body)
    assert ask(address, "PUT", body)[0] == 204
    assert ask(address, "DELETE")[0] == 405
    assert ask(address) == (200, body)


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "ci").mkdir()
    shutil.copy(os.environ["CACHE_SH"], tmp_path / "ci" / "cache.sh")
    return tmp_path


def written(root: pathlib.Path, **env: str) -> list[str]:
    """What it says while a script runs, of which nothing stays."""
    code = """
source ci/cache.sh
test "$(stat -c %a .bazelrc.ci)" = 600
bash -euc 'source ci/cache.sh'  # a script that this one calls takes nothing away
ls -A | grep -v '^ci$' >&2
cat .bazelrc.ci
"""
    command = ["bash", "-euo", "pipefail", "-c", code]
    env = {"PATH": os.environ["PATH"]} | env
    done = subprocess.run(command, check=True, cwd=root, env=env, capture_output=True, text=True)
    assert done.stderr.split() == [".bazelrc.ci"]
    assert [path for path in root.iterdir() if path.is_file()] == []
    return done.stdout.splitlines()


def test_nothing_stays_after_a_failure(root: pathlib.Path) -> None:
    command = ["bash", "-euc", "source ci/cache.sh; test -s .bazelrc.ci; false"]
    env = {"PATH": os.environ["PATH"], "TIERCEL_REMOTE_CACHE": "http://user:password@cache"}
    assert subprocess.run(command, cwd=root, env=env).returncode == 1
    assert [path for path in root.iterdir() if path.is_file()] == []


def test_one_variable(root: pathlib.Path) -> None:
    assert written(root) == []
    lines = written(root, TIERCEL_REMOTE_CACHE="http://cache:8080/tiercel")
    assert lines[0] == "build --remote_cache=http://cache:8080/tiercel"
    assert "--noremote_upload_local_results" not in " ".join(lines)
    lines = written(root, TIERCEL_REMOTE_CACHE="grpc://cache", TIERCEL_CACHE_READONLY="1")
    assert "build --noremote_upload_local_results" in lines
    assert written(root, TIERCEL_DISK_CACHE="/a folder") == ["build --disk_cache='/a folder'"]
    assert written(root) == [], "what was set before does not stay"
