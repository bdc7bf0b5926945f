# SPDX-License-Identifier: Apache-2.0
"""What runs in the process of one backend: ``main(REQUEST, REPORTS)``.

REQUEST is a JSON file: ``source`` (a path, an entry point or neither), and for a check ``op``,
``backend`` and ``device``; without these it only lists what the source registers. REPORTS gets a
line of JSON as each thing is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def main(request_file: str, reports_file: str) -> int:
    with open(request_file, encoding="utf-8") as file:
        request = json.load(file)
    with open(reports_file, "a", encoding="utf-8") as reports:
        for report in serve(request):
            reports.write(json.dumps(report) + "\n")
            reports.flush()
    return 0


def serve(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from tiercel.plugins.smoke.measure import _line, examine

    yield {"step": "begin", "case": "loading it"}
    try:
        plugins = _load(request["source"])
    except Exception as error:  # what the file does is its own result
        yield {"step": "failed", "reason": _line(error)}
        return
    if "backend" not in request:
        yield {"step": "list", "plugins": plugins}
        return
    from tiercel.plugins.contracts import contract_of

    yield from examine(contract_of(request["op"]), request["backend"], request["device"])


def _load(source: dict[str, str]) -> list[dict[str, str]]:
    from tiercel.plugins import loading

    if "path" in source:
        return [plugin.as_dict() for plugin in loading.load_file(source["path"])]
    if "entry_point" in source:
        name = source["entry_point"]
        points = [point for point in loading.entry_points() if point.name == name]
        return [p.as_dict() for point in points for p in loading.load_entry_point(point)]
    import tiercel.ops  # noqa: F401

    return []
