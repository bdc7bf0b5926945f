# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations at run time: from the files of ``configs/`` to the launchers' tables.

A device's files are read once, when the first operator runs there. A call costs nothing more: the
launcher looks its problem up, and takes the nearest tuned number of tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel import _C
from tiercel._log import logger
from tiercel._tuned_table import Table

SCHEMA = 1
FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Tuned:
    """An operator with tuned configurations: their fields, in the launcher's order.

    Args:
        sizes: What a problem's sizes are called.
        fields: Names, and whether each is a number or a flag.
        set: Hands a device's problems to the launcher.
        command: How to tune a problem.
    """

    sizes: tuple[str, ...]
    fields: Mapping[str, type]
    set: Callable[[int, Any], None]
    command: str


FUSED_MOE = Table()

OPS = {
    "linear_act": Tuned(
        ("N", "K"),
        {
            "tile_m": int,
            "tile_n": int,
            "pingpong": bool,
            "split_k": bool,
            "splits": int,
            "group": int,
        },
        _C.linear_act_tuned,
        "tiercel tune linear --problem {sizes} --dtype {dtype}",
    ),
    "nvfp4_linear": Tuned(
        ("N", "K"),
        {"cluster": int, "tiles": int, "parts": int, "stages": int},
        _C.nvfp4_linear_tuned,
        "tiercel tune nvfp4-linear --problem {sizes}",
    ),
    "fused_moe": Tuned(
        ("E", "k", "H", "I"),
        {
            "block_size": int,
            "up_tile": int,
            "up_cluster": int,
            "down_tile": int,
            "down_cluster": int,
        },
        FUSED_MOE.set,
        "tiercel tune moe --problem {sizes} --dtype {dtype}",
    ),
}


class ConfigError(ValueError):
    """A file of configurations that cannot be used, and why."""


def device_label(name: str) -> str:
    """A device's name as files have it."""
    return name.replace(" ", "_").replace("/", "_").replace(",", "_")


def _text(op: str, sizes: Sequence[int], between: str) -> str:
    named = zip(OPS[op].sizes, sizes, strict=True)
    return between.join(f"{name}={size}" for name, size in named)


def file_name(op: str, sizes: Sequence[int], dtype: str, device: str) -> str:
    """No comma: wheel tools split the lines of RECORD at them."""
    return f"{_text(op, sizes, '-')}-dtype={dtype}-device={device_label(device)}.json"


def folders() -> list[Path]:
    """The package's, and the one that TIERCEL_CONFIGS names, whose files come later and win."""
    more = os.environ.get("TIERCEL_CONFIGS", "")
    return [FOLDER, *([Path(more)] if more else [])]


def read(path: Path, op: str) -> tuple[str, tuple[int, ...], list[tuple[int, tuple[int, ...]]]]:
    """(dtype, sizes, [(tokens, fields)]) of a file.

    Raises:
        ConfigError: It is not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {data['schema']}, this version reads {SCHEMA}")
        if data["op"] != op:
            raise ConfigError(f"{path}: is for {data['op']}, and lies with {op}'s")
        problem = data["problem"]
        entries = [(int(t), _fields(op, config)) for t, config in data["configs"].items()]
        if any(tokens < 1 for tokens, _ in entries):
            raise ConfigError(f"{path}: a number of tokens must be positive")
        sizes = tuple(int(problem[name]) for name in OPS[op].sizes)
        return str(problem["dtype"]), sizes, sorted(entries)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from None


def _fields(op: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    values = []
    for name, kind in OPS[op].fields.items():
        value = config[name]
        if type(value) is not kind or value < 0:
            raise ConfigError(f"`{name}` must be a {kind.__name__}, got {value!r}")
        values.append(int(value))
    return tuple(values)


def load(device: int, name: str) -> None:
    """Hands the launchers what was tuned on devices of this name; a bad file is said and left."""
    for op, tuned in OPS.items():
        problems = []
        for folder in folders():
            for path in sorted((folder / op).glob(f"*-device={device_label(name)}.json")):
                try:
                    dtype, sizes, configs = read(path, op)
                    problems.append((dtype, *sizes, configs))
                except ConfigError as error:
                    logger.warning("a tuned configuration is left out: %s", error)
        tuned.set(device, problems)


def hint(op: str, device: int, dtype: str, *sizes: int) -> None:
    """A problem without a file was met; the launcher calls this once an operator and process."""
    command = OPS[op].command.format(sizes=_text(op, sizes, ","), dtype=dtype)
    logger.info(
        "%s: nothing is tuned for %s, %s on GPU %d; a heuristic chooses. "
        "`%s` may find better, `tiercel tune apply` keeps it. (Said once.)",
        op,
        _text(op, sizes, ", "),
        dtype,
        device,
        command,
    )
