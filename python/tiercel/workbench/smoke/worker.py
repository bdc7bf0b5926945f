# SPDX-License-Identifier: Apache-2.0
"""The process of one backend, and the one that it is forked from.

A request is a JSON file: ``source`` (a path, an entry point or neither), and for a check ``op``,
``backend`` and ``device``; without these it only lists what the source registers. A file of reports
gets a line of JSON as each thing is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any


def fork_on_request() -> int:
    """Imports, and says 0. For each line of standard input, the names of a worker's files, it says
    its process id, and at its end the exit code."""
    import tiercel.plugins.contracts
    import tiercel.workbench.smoke.measure  # noqa: F401
    from tiercel.ops import _register  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    print(0, file=answers, flush=True)
    requests = sys.stdin.buffer.raw  # type: ignore[attr-defined]
    for line in iter(requests.readline, b""):
        worker = multiprocessing.get_context("fork").Process(target=_work, args=(json.loads(line),))
        worker.start()
        print(worker.pid, file=answers, flush=True)
        if requests in wait([worker.sentinel, requests]):  # its end: whoever asked is gone
            end(worker.pid)
            return 1
        worker.join()
        print(worker.exitcode, file=answers, flush=True)
    return 0


def end(pid: int) -> None:
    """Kills a worker and all that it started."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _work(files: dict[str, str]) -> None:
    os.setsid()  # what it starts ends with it
    output = os.open(files["output"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Nothing printed is lost where the process is killed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    with open(files["request"], encoding="utf-8") as file:
        request = json.load(file)
    with open(files["reports"], "a", encoding="utf-8") as reports:
        for report in serve(request):
            reports.write(json.dumps(report) + "\n")
            reports.flush()
    ctypes.CDLL(None).fflush(None)  # what C and kernels printed: a forked process drops it


def serve(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from tiercel.workbench.smoke.failures import error_report, line_of, missing_package
    from tiercel.workbench.smoke.measure import examine

    yield {"step": "begin", "case": "loading it"}
    try:
        plugins = _load(request["source"])
    except Exception as error:  # what the file does is its own result
        missing = missing_package(error)
        if missing is not None:
            yield {"step": "skipped", "reason": missing}
        else:
            found = error_report(error, request["source"])
            yield {"step": "failed", "reason": line_of(error), **found}
        return
    if "backend" not in request:
        yield {"step": "list", "plugins": plugins}
        return
    from tiercel.plugins.contracts import contract_of

    contract = contract_of(request["op"])
    yield from examine(contract, request["backend"], request["device"], request["source"])


def _load(source: dict[str, str]) -> list[dict[str, str]]:
    from tiercel.plugins import loading

    if "path" in source:
        return [plugin.as_dict() for plugin in loading.load_file(source["path"])]
    if "entry_point" in source:
        name = source["entry_point"]
        points = [point for point in loading.entry_points() if point.name == name]
        return [p.as_dict() for point in points for p in loading.load_entry_point(point)]
    from tiercel.ops import _register  # noqa: F401

    return []
