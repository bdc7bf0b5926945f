# SPDX-License-Identifier: Apache-2.0
"""The pages of the cache of keys and values, and who has which."""

import torch


class Pages:
    """Keys and values of all layers in one allocation, cut into pages that sequences borrow."""

    def __init__(
        self, layers: int, pages: int, page_size: int, heads: int, head_dim: int, **where: object
    ) -> None:
        self.page_size = page_size
        # A layer's keys and values side by side, so that each layer is one view.
        self.memory = torch.zeros(layers, 2, pages, page_size, heads, head_dim, **where)
        self._free = list(range(pages))[::-1]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[pages, page size, heads, head_dim]`` of keys and of values."""
        keys, values = self.memory[index]
        return keys, values

    @property
    def free(self) -> int:
        return len(self._free)

    def missing(self, owned: list[int], tokens: int) -> int:
        """How many pages a sequence of so many tokens lacks."""
        return max(0, -(-tokens // self.page_size) - len(owned))

    def extend(self, owned: list[int], tokens: int) -> bool:
        """Gives a sequence room for so many tokens; False, and nothing, if there is not enough."""
        missing = self.missing(owned, tokens)
        if missing > self.free:
            return False
        owned.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, owned: list[int]) -> None:
        self._free.extend(owned[::-1])
        owned.clear()

    def slot(self, owned: list[int], place: int) -> int:
        """The cache's slot of the token at a place of a sequence."""
        return owned[place // self.page_size] * self.page_size + place % self.page_size
