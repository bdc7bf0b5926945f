# SPDX-License-Identifier: Apache-2.0
"""Chooses the tokens of the next step: continuous batching, chunked prefill."""

import collections
import dataclasses

from pages import Pages


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a sequence's tokens are drawn, as ``tiercel.sample`` takes it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclasses.dataclass
class Sequence:
    """A prompt and the tokens that follow."""

    prompt: list[int]
    most_new: int
    end: int | None = None
    sampling: Sampling = GREEDY
    new: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the cache

    def token(self, place: int) -> int:
        prompt = len(self.prompt)
        return self.prompt[place] if place < prompt else self.new[place - prompt]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.new)

    @property
    def done(self) -> bool:
        return len(self.new) >= self.most_new or bool(self.new and self.new[-1] == self.end)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens of a sequence in a step: those from `cached` on, `count` of them."""

    sequence: Sequence
    count: int

    @property
    def gives_token(self) -> bool:
        return self.sequence.cached + self.count == self.sequence.length


class Scheduler:
    """Decoding sequences go first, a token each; prompts fill the rest of a step in chunks."""

    def __init__(self, pages: Pages, most_sequences: int, most_tokens: int) -> None:
        self._pages = pages
        self._most_sequences, self._most_tokens = most_sequences, most_tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []

    def next_step(self) -> list[Piece]:
        """The pieces of the next step, with pages for all of their tokens."""
        pieces: list[Piece] = []
        left = self._most_tokens
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # it gave its pages to an older one
            count = min(sequence.length - sequence.cached, left)
            if count == 0 or not self._make_room(sequence, count):
                continue
            pieces.append(Piece(sequence, count))
            left -= count
        while self.waiting and left and len(self.running) < self._most_sequences:
            sequence = self.waiting[0]
            count = min(sequence.length, left)
            if not self._pages.extend(sequence.pages, count):
                break
            self.running.append(self.waiting.popleft())
            pieces.append(Piece(sequence, count))
            left -= count
        return pieces

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Takes pages, if need be those of the youngest sequences, which start over later."""
        while not self._pages.extend(sequence.pages, sequence.cached + count):
            youngest = self.running.pop()
            self._pages.release(youngest.pages)
            youngest.cached = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def finish(self, pieces: list[Piece], tokens: list[int]) -> None:
        """Takes a step's results in: a token for each piece that gives one."""
        drawn = iter(tokens)
        for piece in pieces:
            sequence, gives = piece.sequence, piece.gives_token
            sequence.cached += piece.count
            if gives:
                sequence.new.append(next(drawn))
                if sequence.done:
                    self._pages.release(sequence.pages)
                    self.running.remove(sequence)
