# SPDX-License-Identifier: Apache-2.0
"""Records of models as text and as a page, from committed results alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tiercel._terminal import plain
from tiercel.workbench.bench import BenchError
from tiercel.workbench.bench.table import markdown
from tiercel.workbench.models import PHASES, WAYS, label, plot

Record = dict[str, Any]

_TEXT = ("run", "date", "commit", "gpu", "driver", "torch", "transformers", "command")
_OWN = ("model", "phase", "case", "way", "status")
_NUMBERS = ("ms_median", "host_ms", "tokens_per_s", "peak_mib", "launches", "first_call_s")
HEAD = (
    "way",
    "ms",
    "speed",
    "floor",
    "tokens/s",
    "host ms",
    "launches",
    "MiB",
    "first call s",
    "error",
)
_NOTE = """\
Rendered by `tiercel bench report` from the records beside this page; do not edit. The weights are
random, in bfloat16.

- A step is a prompt, one token over a full static cache, or forward, loss and backward without an
  optimizer. Compiled decoding replays CUDA graphs.
- **ms**: the median of single steps between two events. **speed**: to the uncompiled model, which
  uses SDPA where transformers does. **floor**: the share of a decoding step in which the memory, at
  the rate of its clock, reads each weight, key and value once, of as many experts as random choices
  name. **host ms**: how long the CPU is busy. **MiB**: peak memory. **first call**: with
  compilation.
- gpt-oss has values of MXFP4, as its checkpoint. Ours infer with the 4-bit experts and train with
  16 bits, as transformers does throughout.
- **engine** is `examples/engine`, on the host's clock: a prompt until its first token is read, and
  the time between two tokens of all sequences, cache and sampling included.
- **error**: the distance of the logits, or of the loss, from the uncompiled model's.
- **‡**: the newest run of the case lacked this way; its figures are those of the newest run that
  has it.
"""


def read(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    found = []
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except ValueError:
            raise BenchError(f"{path}:{number}: no JSON") from None
        if fault := problem(record):
            raise BenchError(f"{path}:{number}: {fault}")
        found.append(record)
    return found


def problem(record: Any) -> str | None:
    """The first fault of a record, or None."""
    if not isinstance(record, dict):
        return "is no JSON object"
    for name in (*_TEXT, *_OWN):
        text = record.get(name)
        if not isinstance(text, str) or plain(text) != text:
            return f"`{name}` is no plain text"
    if record["phase"] not in PHASES or record["way"] not in WAYS:
        return "has an unknown `phase` or `way`"
    if not isinstance(record.get("layers"), int):
        return "`layers` is no whole number"
    if record["status"] != "ok":
        return None if isinstance(record.get("reason"), str) else "`reason` is no text"
    for name in (*_NUMBERS, "rel_err", "floor_ms"):
        value: Any = record.get(name)
        perhaps = ("peak_mib", "launches", "floor_ms", "rel_err")
        optional = value is None and (name in perhaps or record["way"] == "engine")
        if not optional and not (type(value) in (int, float) and 0 <= value < 1e15):
            return f"`{name}` is no number"
    return None if record["ms_median"] > 0 else "`ms_median` is not positive"


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The lines of one case's table, in the order of the ways."""
    by_way = {record["way"]: record for record in records}
    base = by_way.get("transformers", {}).get("ms_median")
    return [_row(by_way[way], base) for way in WAYS if way in by_way]


def _row(record: Record, base: float | None) -> tuple[str, ...]:
    way = label(record)
    if record["status"] != "ok":
        return (way, "failed", *["-"] * (len(HEAD) - 2))
    ms = record["ms_median"]

    def shown(name: str, form: str) -> str:
        return "-" if record[name] is None else f"{record[name]:{form}}"

    return (
        way,
        f"{ms:.3g}" if ms < 100 else f"{ms:.0f}",
        "-" if base is None else f"{base / ms:.2f}",
        "-" if (floor := record.get("floor_ms")) is None else f"{floor / ms:.0%}",
        shown("tokens_per_s", ".0f"),
        shown("host_ms", ".2f"),
        shown("launches", "d"),
        shown("peak_mib", ".0f"),
        shown("first_call_s", ".1f"),
        shown("rel_err", ".1e"),
    )


def latest(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """The newest record of each way, by (model, layers, phase, case); `older` is set in those that
    the newest run of the case lacked. A run without the uncompiled model knows no error."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    records = sorted(records, key=_age)
    known = {(r["run"], r["case"]) for r in records if r["way"] == "transformers"}
    for record in records:
        if (record["run"], record["case"]) not in known:
            record = record | {"rel_err": None}
        key = tuple(record[name] for name in ("model", "layers", "phase", "case"))
        cases.setdefault(key, {})[record["way"]] = record
    found = {}
    for key, by_way in cases.items():
        newest = max(map(_age, by_way.values()))
        found[key] = [r | {"older": _age(r) < newest} for r in by_way.values()]
    return found


def _age(record: Record) -> tuple[str, str]:
    return record["date"], record["run"]


def render(gpu: str, records: Sequence[Record]) -> str:
    """The page of one GPU."""
    shown = latest(records)
    parts = [f"# Models, {gpu}\n", _NOTE, f"![speeds]({gpu.replace(' ', '_')}.svg)\n"]
    order = _order(shown)
    title = None
    for key in order:
        model, layers, phase, case = key
        if title != (model, layers):
            title = (model, layers)
            parts.append(f"## {model}, {layers} layers\n")
        parts += [f"{phase} {case}:\n", markdown(HEAD, rows(shown[key]), numbers_from=1)]
    failed = [r for found in shown.values() for r in found if r["status"] != "ok"]
    if failed:
        parts.append("## Failed\n")
        for r in failed:
            case = f"{r['model']}, {r['phase']} {r['case']}, {r['way']}"
            parts.append(f"- {case}: {r['reason']}")
        parts.append("")
    runs = {record["run"]: record for found in shown.values() for record in found}
    facts = ("date", "commit", "driver", "torch", "transformers", "command")
    lines = [[runs[run][name] for name in facts] for run in sorted(runs)]
    parts += ["## Runs\n", markdown(facts, lines, numbers_from=len(facts))]
    return "\n".join(parts)


def _order(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(cases, key=lambda key: (key[0], key[1], PHASES.index(key[2]), _size(key[3])))


def _picture(records: Sequence[Record]) -> str:
    shown = latest(records)
    named = ((f"{key[0]}, {key[1]} layers, {key[2]} {key[3]}", key) for key in _order(shown))
    return plot.draw((title, shown[key]) for title, key in named)


def _size(case: str) -> tuple[int, ...]:
    return tuple(map(int, case.split("x")))


def pages(folder: Path) -> dict[Path, str]:
    """The pages and pictures beside the records of a folder."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        records = read(path)
        if records:
            found[path.with_suffix(".md")] = render(records[0]["gpu"], records)
            found[path.with_suffix(".svg")] = _picture(records)
    return found
