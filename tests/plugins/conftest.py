# SPDX-License-Identifier: Apache-2.0
import contextlib
import io
import os
import subprocess
import sys

import pytest

from tiercel.cli import main


@pytest.fixture(autouse=True)
def _unregistered():
    """No test leaves a backend behind."""
    yield
    registration = sys.modules.get("tiercel.plugins.registration")
    if registration is not None:
        for op, name in list(registration.registered):
            registration.unregister(op, name)
        sys.modules["tiercel.plugins.loading"]._loaded.clear()


def _command(*words, cwd):
    out, err = io.StringIO(), io.StringIO()
    before = os.getcwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(map(str, words)))
    except SystemExit as error:  # argparse
        status = error.code
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def command():
    """Runs ``tiercel`` in this process: (words, cwd) -> completed process. PyTorch is imported once
    here, and once where smoke's workers are forked from, and not for each command."""
    return _command
