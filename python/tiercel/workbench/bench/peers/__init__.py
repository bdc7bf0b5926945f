# SPDX-License-Identifier: Apache-2.0
"""Other implementations, one file each with a ``PEER``; none is required."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.workbench.bench import BenchError, adapters
from tiercel.workbench.bench.launch import Impl


class Missing(Exception):
    """The peer is not installed here; the text says what was looked for."""


@dataclass(frozen=True)
class Peer:
    """Another project.

    Args:
        name: What the records and tables call it.
        find: Its version; raises Missing.
        on_request: Slow to set up: only for cases that list it, or by ``--peers NAME``.
    """

    name: str
    find: Callable[[], str]
    on_request: bool = False


def package(distribution: str, module: str, **environment: str) -> Callable[[], str]:
    """A `find` for what pip installs as `distribution`: it imports `module`.

    `environment` is set first where it is not set yet: what the package wants to know by then.
    """

    def find() -> str:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise Missing(f"the package {distribution} is not installed")
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        importlib.import_module(module)
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    return find


def load() -> dict[str, Peer]:
    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        peer = importlib.import_module(f"{__name__}.{module}").PEER
        found[peer.name] = peer
    return found


def choose(peers: Mapping[str, Peer], wanted: str) -> list[Peer]:
    """The peers that ``--peers`` means: ``all``, ``none`` or names."""
    if wanted == "none":
        return []
    if wanted == "all":
        return list(peers.values())
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in peers]
    if unknown:
        raise BenchError(f"no peer {unknown[0]!r}; there are {', '.join(sorted(peers))}")
    return [peers[name] for name in names]


def find(peers: Sequence[Peer]) -> tuple[dict[str, str], dict[str, str]]:
    """Which are installed, with their versions, and which are not, with the reason."""
    versions, missing = {}, {}
    for peer in peers:
        try:
            versions[peer.name] = peer.find()
        except Missing as reason:
            missing[peer.name] = str(reason)
        except Exception as error:  # it is there, but does not import
            text = str(error).strip().splitlines() or [""]
            missing[peer.name] = f"{type(error).__name__}: {text[0]}"
    return versions, missing


def impls(
    peers: Sequence[Peer], versions: Mapping[str, str], case: Any, by_name: bool
) -> list[Impl]:
    """The installed ones that have the case's operator."""
    known = adapters.load()
    return [
        Impl(peer.name, versions[peer.name], known[peer.name][case.op])
        for peer in peers
        if peer.name in versions
        and case.op in known.get(peer.name, ())
        and (by_name or not peer.on_request or peer.name in case.peers)
    ]
