# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations at run time: from the files of ``configs/`` to the launchers' tables.

A device's files are read once, when the first operator runs there. A call costs nothing more: the
launcher looks its problem up, and takes the nearest tuned number of tokens. The gradients of norms
also have measured ranges of lengths and sizes, which are read before the first such gradient.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel import _C
from tiercel._terminal import line, plain
from tiercel.core.log import logger

SCHEMA = 1
DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1fn_x2",
)
MOST = 1 << 40  # of sizes and tokens: far from where the launchers' products overflow
MOST_FIELD = 4096  # of tiles, stages, splits and the like
FOLDER = Path(__file__).parent.parent / "configs"


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


_NORM_BACKWARD = {
    "vectors": int,
    "rows": int,
    "cluster": int,
    "threads": int,
    "stages": int,
    "prefetch_rows": int,
    "even": bool,
    "pairs": bool,
}
# The columns of a range in the order that _C.norm_backward_ranges() reads; "measured" is a note.
RANGE_FIELDS = [
    *("min_N", "max_N", "min_MB", "max_MB", "short_rows"),
    *_NORM_BACKWARD,
    *("min_bytes", "measured"),
]

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
        _C.fused_moe_tuned,
        "tiercel tune moe --problem {sizes} --dtype {dtype}",
    ),
    "layer_norm_backward": Tuned(
        ("N",),
        _NORM_BACKWARD,
        _C.layer_norm_backward_tuned,
        "tiercel tune layer-norm-backward --problem {sizes} --dtype {dtype}",
    ),
    "rms_norm_backward": Tuned(
        ("N",),
        _NORM_BACKWARD,
        _C.rms_norm_backward_tuned,
        "tiercel tune rms-norm-backward --problem {sizes} --dtype {dtype}",
    ),
}


class ConfigError(ValueError):
    """A file of configurations that cannot be used, and why."""


def device_label(name: str) -> str:
    """A device's name as files have it: nothing in it leads to another folder or is a pattern."""
    return re.sub(r"[^A-Za-z0-9_.()+-]", "_", name)


def _text(op: str, sizes: Sequence[int], between: str) -> str:
    named = zip(OPS[op].sizes, sizes, strict=True)
    return between.join(f"{name}={size}" for name, size in named)


def file_name(op: str, sizes: Sequence[int], dtype: str, device: str) -> str:
    """No comma: wheel tools split the lines of RECORD at them.

    Raises:
        ConfigError: No operator is tuned for that dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
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
        return check(json.loads(path.read_text(encoding="utf-8")), op)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:  # RecursionError and MemoryError too: nothing in a file may raise
        raise ConfigError(f"{path}: {type(error).__name__}: {line(error)}") from None


def check(data: Any, op: str) -> tuple[str, tuple[int, ...], list[tuple[int, tuple[int, ...]]]]:
    """Checks a file's parsed contents and returns what `read` does.

    Raises:
        ConfigError, KeyError, TypeError, ValueError: No launcher could take it.
    """
    if data["schema"] != SCHEMA:
        raise ConfigError(f"schema {shown(data['schema'])}, this version reads {SCHEMA}")
    if data["op"] != op:
        raise ConfigError(f"is for {line(data['op'])}, and lies with {op}'s")
    problem = data["problem"]
    dtype = problem["dtype"]
    if dtype not in DTYPES:
        raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    sizes = tuple(_whole(f"`{name}`", problem[name]) for name in OPS[op].sizes)
    configs = data["configs"]
    entries = [(_whole("a number of tokens", int(t)), _fields(op, c)) for t, c in configs.items()]
    return dtype, sizes, sorted(entries)


def shown(value: object) -> str:
    """A value in an error text, whatever it holds."""
    return line(repr(value), 80)


def _whole(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST:
        raise ConfigError(f"{what} must be a whole number from 1 to 2**40, got {shown(value)}")
    return value


def _fields(op: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    values = []
    for name, kind in OPS[op].fields.items():
        value = config[name]
        if type(value) is not kind:
            raise ConfigError(f"`{name}` must be a {kind.__name__}, got {shown(value)}")
        if not 0 <= value <= MOST_FIELD:
            raise ConfigError(f"`{name}` must be from 0 to {MOST_FIELD}, got {shown(value)}")
        values.append(int(value))
    return tuple(values)


def load(device: int, name: str) -> None:
    """Hands the launchers what was tuned on devices of this name; a bad file is said and left."""
    ending = f"-device={device_label(name)}.json"
    for op, tuned in OPS.items():
        tuned.set(device, [])  # the device was looked at

        def take(path: Path, op: str = op, tuned: Tuned = tuned) -> None:
            dtype, sizes, configs = read(path, op)
            tuned.set(device, [(dtype, *sizes, configs)])

        _each(op, ending, take)


def load_ranges() -> None:
    """Hands norm_backward what was measured on each kind of device; a bad file is said and left."""
    _each("norm_backward", ".json", _take_ranges)


def _take_ranges(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA or data["fields"] != RANGE_FIELDS:
        raise ConfigError(f"{path}: this version reads schema {SCHEMA} with other fields")
    tables = []
    for name, ranges in data["ranges"].items():
        op, dtype = name.split()
        tables.append((op == "layer_norm", dtype, ranges))
    bounds = (data[k] for k in ("memory_gbps_below", "rows_per_multiprocessor", "megabytes"))
    _C.norm_backward_ranges(*bounds, tables)


def _each(folder: str, ending: str, take: Callable[[Path], None]) -> None:
    """Calls `take` for each file; what is wrong with one keeps no operator from work."""
    for path in _files(folder, ending):
        try:
            take(path)
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else f"{path}: {line(error)}"
            logger.warning("a tuned configuration is left out: %s", plain(text))


def _files(name: str, ending: str) -> list[Path]:
    found: list[Path] = []
    for folder in folders():
        try:
            found += sorted(p for p in (folder / name).iterdir() if p.name.endswith(ending))
        except (FileNotFoundError, NotADirectoryError):
            pass  # a folder need not have all operators
        except (OSError, ValueError) as error:
            logger.warning("tuned configurations are left out: %s: %s", plain(str(folder)), error)
    return found


def hint(op: str, device: int, dtype: str, sizes: Sequence[int]) -> None:
    """A problem without a file was met; the launcher calls this once an operator and process."""
    sizes = sizes[: len(OPS[op].sizes)]
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
