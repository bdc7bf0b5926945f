# SPDX-License-Identifier: Apache-2.0
"""The machine of fakes that bazelw and the compiler's packages are tried on."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).absolute().parent))
import fakes


@pytest.fixture(scope="session")
def folder():
    # Not pytest's own: bazelw refuses a cache below /tmp.
    base = os.environ.get("TEST_TMPDIR") or "/var/tmp"
    if os.path.realpath(base).startswith("/tmp"):
        base = os.getcwd()
    path = Path(tempfile.mkdtemp(prefix="bazelw-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def kept(folder):
    (folder / "kept").mkdir()
    return fakes.make_kept(folder / "kept")


@pytest.fixture
def machine(folder, kept):
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield fakes.Machine(Path(own), kept)
