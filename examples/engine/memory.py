# SPDX-License-Identifier: Apache-2.0
"""The GPU memory of sequences: pages of the cache, and rows of a decoding step."""

import dataclasses
import heapq

import torch
from torch import Tensor


class Pages:
    """Keys and values of all layers in one allocation, divided into pages for sequences."""

    def __init__(
        self, layers: int, pages: int, page_size: int, heads: int, head_dim: int, **where: object
    ) -> None:
        self.page_size = page_size
        # A layer's keys and values are adjacent, so that each layer is one view.
        self.memory = torch.zeros(layers, 2, pages, page_size, heads, head_dim, **where)
        self._free = list(range(pages))[::-1]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """``[pages, page size, heads, head_dim]`` of keys and of values."""
        keys, values = self.memory[index]
        return keys, values

    @property
    def free(self) -> int:
        return len(self._free)

    def missing(self, owned: list[int], tokens: int) -> int:
        """The number of pages that a sequence of so many tokens still needs."""
        return max(0, -(-tokens // self.page_size) - len(owned))

    def extend(self, owned: list[int], tokens: int) -> bool:
        """Gives a sequence pages for so many tokens; returns False, and gives none, if too few are
        free."""
        missing = self.missing(owned, tokens)
        if missing > self.free:
            return False
        owned.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, owned: list[int]) -> None:
        self._free.extend(owned[::-1])
        owned.clear()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A sequence's sampling parameters, in the form that ``tiercel.sample`` takes."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclasses.dataclass
class Settings:
    """The part of the rows that the host decides; all tensors are views of one."""

    active: Tensor  # [rows] int64: 1, or 0 for a row that nobody has
    bases: Tensor  # [rows] int64: the slot of a position in the last page, less the position
    seeds: Tensor  # [rows] int64
    temperatures: Tensor  # [rows] float32
    top_ks: Tensor  # [rows] int32
    top_ps: Tensor  # [rows] float32
    page_table: Tensor  # [rows, pages of a sequence] int32

    @classmethod
    def of(cls, memory: Tensor, rows: int) -> "Settings":
        """Views of int32 memory of `size` elements."""
        columns = memory.numel() // rows - 9
        *parts, table = memory.split([2 * rows] * 3 + [rows] * 3 + [rows * columns])
        types = (torch.int64,) * 3 + (torch.float32, torch.int32, torch.float32)
        views = (part.view(dtype) for part, dtype in zip(parts, types, strict=True))
        return cls(*views, table.view(rows, columns))

    @staticmethod
    def size(rows: int, columns: int) -> int:
        return rows * (9 + columns)


class Rows:
    """A row for each running sequence, which decoding steps read and advance on the GPU.

    The host changes its own copy of the settings, and sends it before a step if it differs.
    """

    _NO_SLOT = -(2**40)  # a base that makes every slot negative: nothing is written there

    def __init__(self, rows: int, columns: int, page_size: int, device: torch.device) -> None:
        self._host = torch.zeros(Settings.size(rows, columns), dtype=torch.int32)
        self._device = torch.empty_like(self._host, device=device)
        self._ours = Settings.of(self._host, rows)
        self._ours.bases.fill_(self._NO_SLOT)
        self._page_size = page_size
        self._free = list(range(rows))
        self._changed = True
        self.settings = Settings.of(self._device, rows)
        # The last token of each sequence, and its position: the next step's input.
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def take(self, sampling: Sampling) -> int:
        """The first free row."""
        row, ours = heapq.heappop(self._free), self._ours
        ours.active[row] = 1
        ours.seeds[row] = sampling.seed
        ours.temperatures[row] = sampling.temperature
        ours.top_ks[row] = sampling.top_k
        ours.top_ps[row] = sampling.top_p
        self._changed = True
        return row

    def release(self, row: int) -> None:
        self._ours.active[row] = 0
        self._ours.bases[row] = self._NO_SLOT
        heapq.heappush(self._free, row)
        self._changed = True

    def add_pages(self, row: int, pages: list[int], before: int) -> None:
        """Adds the new pages of a sequence."""
        if len(pages) > before:
            new = torch.tensor(pages[before:], dtype=torch.int32)
            self._ours.page_table[row, before : len(pages)] = new
            self._ours.bases[row] = (pages[-1] - len(pages) + 1) * self._page_size
            self._changed = True

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The cache's slots of tokens at positions of rows' sequences; all on the GPU."""
        pages = self.settings.page_table[rows, positions // self._page_size].long()
        return pages * self._page_size + positions % self._page_size

    def send(self) -> None:
        """Copies the settings to the GPU, if they changed, behind the steps in flight."""
        if self._changed:
            self._device.copy_(sendable(self._host, self._device.device), non_blocking=True)
            self._changed = False


def sendable(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that the GPU can read later; its memory is reused only after that."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
