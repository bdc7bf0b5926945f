# SPDX-License-Identifier: Apache-2.0
"""Child processes that die with us, so that a killed set-up leaves nobody writing to the cache."""

import ctypes
import os
import signal
import subprocess
import threading

import progress

_PR_SET_PDEATHSIG = 1
_SLOW_SECONDS = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(**extra: str) -> dict:
    """The user's environment with messages in English: some of them are read by us."""
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **extra}


def popen(command, **options) -> subprocess.Popen:
    options.setdefault("env", environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(command, preexec_fn=_die_with_parent, text=True, **options)


def run(command, *, timeout=None, slow="", **options) -> subprocess.CompletedProcess:
    """Runs to the end and returns output and status; a missing program reads as status 127.

    `slow` names what is waited for, and is said when it takes long.
    """
    options.setdefault("env", environment())
    notice = threading.Timer(_SLOW_SECONDS, progress.say, [f"still waiting for {slow}"])
    try:
        if slow:
            notice.start()
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            preexec_fn=_die_with_parent,
            **options,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
    finally:
        notice.cancel()
