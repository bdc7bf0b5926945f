# SPDX-License-Identifier: Apache-2.0
"""Under ``torchrun``: who this worker is, and the store that all of them share."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiercel.workbench.tune import TuneError

_TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Place:
    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def worker(self) -> str:
        return f"{self.rank}"


def place() -> Place:
    """From torchrun's environment; alone without it."""
    if "WORLD_SIZE" not in os.environ:
        return Place()
    try:
        numbers = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    except (KeyError, ValueError) as error:
        raise TuneError(f"WORLD_SIZE is set as torchrun does, but not all else: {error}") from None
    return Place(*numbers)


def connect(where: Place) -> Any:
    """The run's store. torchrun's agent keeps it, so that it outlives any worker."""
    import torch.distributed as dist

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise TuneError(f"torchrun's address of the store is missing: {error}") from None
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=where.rank == 0 and not agents,
            timeout=_TIMEOUT,
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        raise TuneError(f"no store at {host}:{port}: {error}") from None
    # After a restart nothing is left of the leases of before: the journal has what was measured.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"tiercel_tune/{run}/{restart}", store)


@contextlib.contextmanager
def one_line_without_store(where: Place) -> Iterator[None]:
    """The user hears of a store that goes while workers need it, not of the call that met it."""
    if where.world == 1:
        yield
        return
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise TuneError(
            f"the workers' store is gone, rank 0 with it? ({reason}); "
            "run the command again to go on"
        ) from error
