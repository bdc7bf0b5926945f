# SPDX-License-Identifier: Apache-2.0
"""The ``tiercel`` command in the test's own process. PyTorch is imported once here, and once where
smoke's workers are forked from, and not for each command."""

import contextlib
import io
import os
import subprocess

from tiercel.cli import main


def tiercel(*words, cwd):
    """Runs a command in a folder: a completed process, with the text that it printed."""
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
