# SPDX-License-Identifier: Apache-2.0
"""The board of items and records that workers share: in memory, or in a store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Record = dict[str, Any]


class Board(Protocol):
    """Each item is done by one worker, and a dead one's is done by another."""

    def claim(self) -> int | None:
        """An item's place that is now this worker's; None once all are done."""

    def holds(self, item: int) -> bool:
        """True if it still is: a worker that was taken for dead has lost it."""

    def finish(self, item: int) -> None: ...
    def find(self, key: str) -> Record | None: ...
    def publish(self, key: str, record: Record) -> bool:
        """False where another one's is there already."""

    def count(self) -> int:
        """Records so far, of all workers."""


class LocalBoard:
    def __init__(self, items: int) -> None:
        self._left = list(reversed(range(items)))
        self._records: dict[str, Record] = {}

    def claim(self) -> int | None:
        return self._left.pop() if self._left else None

    def holds(self, item: int) -> bool:
        return True

    def finish(self, item: int) -> None:
        pass

    def find(self, key: str) -> Record | None:
        return self._records.get(key)

    def publish(self, key: str, record: Record) -> bool:
        self._records.setdefault(key, record)
        return self._records[key] is record

    def count(self) -> int:
        return len(self._records)


class Heart:
    """A worker's sign of life in the store, and its view of the others'.

    Hosts' clocks are never compared: a worker is dead when its counter has not moved for `lease`
    seconds of the observer's own clock.
    """

    def __init__(self, store: Any, worker: str, *, beat: float = 1.0, lease: float = 20.0) -> None:
        self.store = store
        self.worker = worker
        self._beat, self._lease = beat, lease
        self._seen: dict[str, tuple[int, float]] = {}
        self._stop = threading.Event()
        store.add(f"beat/{worker}", 1)
        self._thread = threading.Thread(target=self._run, name="tiercel-tune-beat", daemon=True)
        self._thread.start()

    def alive(self, worker: str) -> bool:
        if worker == self.worker:
            return True
        count, now = self.store.add(f"beat/{worker}", 0), time.monotonic()
        known = self._seen.get(worker)
        if known is None or known[0] != count:
            self._seen[worker] = (count, now)
            return True
        return now - known[1] < self._lease

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._beat):
            try:
                self.store.add(f"beat/{self.worker}", 1)
            except RuntimeError:
                return  # the store is gone, and the worker's next call says so


class StoreBoard:
    """A board in a torch.distributed store (a TCPStore), under a prefix."""

    def __init__(
        self,
        heart: Heart,
        prefix: str,
        items: Sequence[str],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._heart, self._store, self._me = heart, heart.store, heart.worker
        self._prefix = prefix
        self._items = items
        self._sleep = sleep
        self._done: set[int] = set()

    def claim(self) -> int | None:
        while True:
            item = self._store.add(f"{self._prefix}/next", 1) - 1
            if item >= len(self._items):
                break
            if not self._is_done(item) and self._take(item, ""):
                return int(item)
        # All have been handed out: wait for them, and take over what a dead worker had.
        while True:
            waiting = [i for i in range(len(self._items)) if not self._is_done(i)]
            if not waiting:
                return None
            for item in waiting:
                owner = self._owner(item)
                if (owner == "" or not self._heart.alive(owner)) and self._take(item, owner):
                    return item
            self._sleep(0.2)

    def holds(self, item: int) -> bool:
        return self._owner(item) == self._me

    def finish(self, item: int) -> None:
        self._store.set(self._key("done", item), "1")

    def find(self, key: str) -> Record | None:
        name = f"{self._prefix}/record/{key}"
        if not self._store.check([name]):
            return None
        record: Record = json.loads(self._store.get(name))
        return record

    def publish(self, key: str, record: Record) -> bool:
        name, text = f"{self._prefix}/record/{key}", json.dumps(record)
        # Another one's record may be the same, word for word: it was read from a journal.
        mine = not self._store.check([name])
        mine = mine and self._store.compare_set(name, "", text) == text.encode()
        if mine:
            self._store.add(f"{self._prefix}/records", 1)
        return bool(mine)

    def count(self) -> int:
        return int(self._store.add(f"{self._prefix}/records", 0))

    def _key(self, what: str, item: int) -> str:
        return f"{self._prefix}/{what}/{self._items[item]}"

    def _owner(self, item: int) -> str:
        key = self._key("owner", item)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _take(self, item: int, owner: str) -> bool:
        kept = self._store.compare_set(self._key("owner", item), owner, self._me)
        return bool(kept.decode() == self._me)

    def _is_done(self, item: int) -> bool:
        if item not in self._done and self._store.check([self._key("done", item)]):
            self._done.add(item)
        return item in self._done
