# SPDX-License-Identifier: Apache-2.0
"""Child processes that die with us, so that a killed set-up leaves nobody writing to the cache."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading

import progress

_PR_SET_PDEATHSIG = 1
_SLOW_SECONDS = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


@contextlib.contextmanager
def _signals_later():
    """While Python forks, it drops what a signal's handler raises."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment(**extra: str) -> dict:
    """The user's environment with messages in English: some of them are read by us."""
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **extra}


def popen(command, **options) -> subprocess.Popen:
    options.setdefault("env", environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    with _signals_later():
        return subprocess.Popen(command, preexec_fn=_die_with_parent, text=True, **options)


def run(command, *, timeout=None, slow="", **options) -> subprocess.CompletedProcess:
    """Runs to the end and returns output and status; a missing program reads as status 127.

    `slow` names what is waited for, and is said when it takes long.
    """
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    try:
        child = popen(command, errors="replace", **pipes, **options)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
    # Not before: a second thread would be sent the signals that the first one blocks.
    notice = threading.Timer(_SLOW_SECONDS, progress.say, [f"still waiting for {slow}"])
    with child:
        try:
            if slow:
                notice.start()
            out, err = child.communicate(timeout=timeout)
            return subprocess.CompletedProcess(command, child.returncode, out, err)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout} s")
        finally:
            notice.cancel()
            if child.returncode is None:
                child.kill()
