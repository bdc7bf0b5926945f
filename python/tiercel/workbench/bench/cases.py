# SPDX-License-Identifier: Apache-2.0
"""Cases and the suites files that list them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.workbench.bench import BenchError
from tiercel.workbench.bench.ops import OpBench

DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8 e5m2",
    "nvfp4": "nvfp4",
    "int8": "int8",
}
# An entry's keys other than the operator's own parameters.
_OPTIONS = ("dtype", "host", "peers")


@dataclass(frozen=True)
class Case:
    """One problem: an operator, its parameters and a dtype."""

    family: str
    op: str
    dtype: str
    params: Mapping[str, Any]
    host: bool = False  # time the eager call too
    peers: frozenset[str] = field(default_factory=frozenset)  # on-request peers to include

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    @property
    def name(self) -> str:
        """The parameters as one stable string, such as ``T8192 E128 k8 renorm``."""
        words = []
        for name, value in self.params.items():
            if isinstance(value, bool):
                words += [name] if value else []
            else:
                words.append(value if isinstance(value, str) else f"{name}{value}")
        return " ".join(words)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.name, self.dtype


def read(path: Path) -> dict[str, Any]:
    """A suites file, or those of a folder and its folders one after the other, as plain data."""
    if not path.is_dir():
        return _read_file(path)
    suites: dict[str, list[Any]] = {}
    for file in sorted([*path.glob("*.yaml"), *path.glob("*/*.yaml")]):
        for suite, entries in _read_file(file)["suites"].items():
            suites.setdefault(suite, []).extend(entries or ())
    return {"suites": suites}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise BenchError(
            "tiercel bench reads its cases with PyYAML, which is not installed: "
            "pip install 'tiercel[bench]'"
        ) from None
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("suites"), dict):
        raise BenchError(f"{path}: expected `suites:` with a list of entries for each suite")
    return data


def select(
    data: Mapping[str, Any],
    ops: Mapping[str, OpBench],
    *,
    suite: str,
    family: str | None = None,
    op: str | Sequence[str] | None = None,
) -> list[Case]:
    """The cases of a suite, each once, in the file's order; of one operator, several or all."""
    suites = data["suites"]
    if suite not in suites:
        raise BenchError(f"no suite {suite!r}; there are {', '.join(sorted(suites))}")
    families = {o.family for o in ops.values()}
    if family is not None and family not in families:
        raise BenchError(f"no family {family!r}; there are {', '.join(sorted(families))}")
    wanted = (op,) if isinstance(op, str) else tuple(op or ops)
    for name in wanted:
        if name not in ops:
            raise BenchError(f"no operator {name!r}; there are {', '.join(sorted(ops))}")
    cases: dict[tuple[str, str, str], Case] = {}
    for number, entry in enumerate(suites[suite] or ()):
        where = f"suite {suite!r}, entry {number + 1}"
        for case in _expand(entry, ops, where):
            if family in (None, case.family) and case.op in wanted:
                cases.setdefault(case.key, case)
    if not cases:
        raise BenchError(f"suite {suite!r} has no case for this --family and --op")
    return list(cases.values())


def _expand(entry: Any, ops: Mapping[str, OpBench], where: str) -> Iterator[Case]:
    if not isinstance(entry, dict) or entry.get("op") not in ops:
        known = ", ".join(sorted(ops))
        raise BenchError(f"{where}: `op` must be one of {known}, got {entry!r}")
    bench = ops[entry["op"]]
    unknown = sorted(set(entry) - {"op", *_OPTIONS, *bench.params})
    if unknown:
        raise BenchError(
            f"{where}: {bench.op} has no parameter {unknown[0]!r}; it has {', '.join(bench.params)}"
        )
    missing = [n for n, v in bench.params.items() if v is None and n not in entry]
    if missing:
        raise BenchError(f"{where}: {bench.op} needs a value for {missing[0]!r}")
    dtypes = _listed(entry.get("dtype", "bfloat16"))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise BenchError(f"{where}: no dtype {dtype!r}; there are {', '.join(DTYPES)}")
    values = [_listed(entry.get(name, default)) for name, default in bench.params.items()]
    peers = frozenset(_listed(entry.get("peers", ())))
    for dtype, *choice in itertools.product(dtypes, *values):
        params = dict(zip(bench.params, choice, strict=True))
        reason = bench.invalid(params)
        if reason is not None:
            raise BenchError(f"{where}: {reason}, got {params}")
        yield Case(bench.family, bench.op, dtype, params, bool(entry.get("host", False)), peers)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
