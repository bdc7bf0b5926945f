# SPDX-License-Identifier: Apache-2.0
"""Cache keys: the hash of everything that a compiled file depends on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Part of every key: a higher number makes all earlier entries unknown.
SCHEMA = 1


def key_of(fields: Mapping[str, Any]) -> str:
    """The key of a description: 64 hexadecimal digits, the same on every machine and Python.

    Raises:
        TypeError: A value is not made of str, int, float, bool, None, lists and dicts.
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"cache key: fields must be a dict, got {type(fields).__name__}")
    if not fields:
        raise ValueError("cache key: there are no fields")
    text = json.dumps(
        {"schema": SCHEMA, "fields": _plain(fields, "fields")},
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, where: str) -> Any:
    # Exact types: what json would turn into something else (a str enum, say) is no clear key.
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"cache key: {where} is {value}")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str:
                raise TypeError(f"cache key: {where} has the key {name!r}, which is no str")
        return {name: _plain(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise TypeError(
        f"cache key: {where} is a {type(value).__name__}; use str, int, float, bool, None, lists "
        "and dicts (for files and bytes, tiercel.cache.digest)"
    )


def digest(content: bytes | Path) -> str:
    """The hash of bytes or of a file's contents, to put in a key."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    result = hashlib.sha256()
    with content.open("rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()
