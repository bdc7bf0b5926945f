# SPDX-License-Identifier: Apache-2.0
"""The registry on the loopback, by which ci/registry_mode.py tries the real rule sets."""

import base64
import hashlib
import io
import json
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).absolute().parent))
import fakes

sys.path.insert(0, str(fakes.SOURCE / "tools" / "airgap"))
import registry

SOURCE = {
    "url": "https://elsewhere/releases/rules-1.0.tar.gz",
    "integrity": "sha256-pinned",
    "strip_prefix": "rules-1.0",
    "patches": {"version.patch": "sha256-patch"},
}


@pytest.fixture
def server(tmp_path):
    module = tmp_path / "metadata/modules/rules/1.0"
    module.mkdir(parents=True)
    (module / "source.json").write_text(json.dumps(SOURCE))
    (module / "MODULE.bazel").write_text('module(name = "rules", version = "1.0")\n')
    (tmp_path / "sources").mkdir()
    with registry.Registry(tmp_path / "metadata", tmp_path / "sources") as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def get(server, path):
    address = path if path.startswith("http:") else f"{server.address}/{path}"
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.read()


def source(server):
    return json.loads(get(server, "modules/rules/1.0/source.json"))


def add_folder(server, name):
    (server.sources / name).mkdir()
    (server.sources / name / "rules.bzl").write_text("VALUE = 1\n")


def test_metadata_comes_as_it_is(server):
    assert b'"rules"' in get(server, "modules/rules/1.0/MODULE.bazel")


@pytest.mark.parametrize("path", ["modules/rules/2.0/source.json", "../sources/x", "x"])
def test_unknown_files_are_not_found(server, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, path)


def test_an_archive_keeps_its_hash(server):
    (server.sources / "rules-1.0.tar.gz").write_bytes(b"archive")
    found = source(server)
    assert found == SOURCE | {"url": found["url"]}
    assert get(server, found["url"]) == b"archive"


@pytest.mark.parametrize(("folder", "patched"), [("rules-1.0", True), ("rules", False)])
def test_a_folder_is_served_with_its_own_hash(server, folder, patched):
    add_folder(server, folder)
    found = source(server)
    data = get(server, found["url"])
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    assert found["integrity"] == f"sha256-{digest}"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.extractfile("./rules.bzl").read() == b"VALUE = 1\n"
    # Patches are of one version's files.
    assert ("patches" in found) is patched and "strip_prefix" not in found


def test_a_missing_module_is_named(server, capfd):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, source(server)["url"])
    assert "lacks rules-1.0.tar.gz" in capfd.readouterr().err
