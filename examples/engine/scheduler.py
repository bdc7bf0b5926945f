# SPDX-License-Identifier: Apache-2.0
"""Chooses the tokens of the next step: continuous batching, chunked prefill.

It plans a step before the tokens of the previous one are known, because it only needs their number.
"""

import collections
import dataclasses

from memory import GREEDY, Pages, Rows, Sampling


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that follow."""

    prompt: list[int]
    most_new: int
    end: int | None = None
    sampling: Sampling = GREEDY
    new: list[int] = dataclasses.field(default_factory=list)  # those that the host has read
    drawn: int = 0  # new tokens, those included that only the GPU knows yet
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the cache
    row: int | None = None  # while it runs
    decoding: bool = False  # its row has its last token

    @property
    def length(self) -> int:
        return len(self.prompt) + self.drawn

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

    def __init__(self, pages: Pages, rows: Rows, most_sequences: int, most_tokens: int) -> None:
        self._pages, self._rows = pages, rows
        self._most_sequences, self._most_tokens = most_sequences, most_tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []

    def next_step(self) -> list[Piece]:
        """The pieces of the next step, with pages for all of their tokens."""
        pieces: list[Piece] = []
        left = self._most_tokens
        for sequence in list(self.running):
            if sequence.row is None:
                continue  # it gave its pages to an older one
            count = min(sequence.length - sequence.cached, left)
            if count == 0 or not self._make_room(sequence, count):
                continue
            pieces.append(Piece(sequence, count))
            left -= count
        while self.waiting and left and len(self.running) < self._most_sequences:
            sequence = self.waiting[0]
            count = min(sequence.length, left)
            if (
                len(sequence.new) < sequence.drawn
                or self._pages.missing([], count) > self._pages.free
            ):
                break
            self.running.append(self.waiting.popleft())
            sequence.row = self._rows.take(sequence.sampling)
            self._extend(sequence, count)
            pieces.append(Piece(sequence, count))
            left -= count
        return pieces

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        before = len(sequence.pages)
        enough = self._pages.extend(sequence.pages, tokens)
        assert sequence.row is not None
        self._rows.add_pages(sequence.row, sequence.pages, before)
        return enough

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Takes pages, if necessary those of the youngest sequences, which start over later."""
        while not self._extend(sequence, sequence.cached + count):
            youngest = self.running[-1]
            self._stop(youngest)
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def _stop(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence; steps in flight still read and write it."""
        assert sequence.row is not None
        self.running.remove(sequence)
        self._pages.release(sequence.pages)
        self._rows.release(sequence.row)
        sequence.row, sequence.cached, sequence.decoding = None, 0, False

    def started(self, pieces: list[Piece]) -> None:
        """Records that the step was launched: what its last tokens free may be reused."""
        for piece in pieces:
            sequence, gives = piece.sequence, piece.gives_token
            sequence.cached += piece.count
            if gives:
                sequence.drawn += 1
                sequence.decoding = True
                if sequence.drawn == sequence.most_new:
                    self._stop(sequence)

    def finished(self, sequences: list[Sequence], tokens: list[int]) -> list[Sequence]:
        """Stores the tokens of a step; returns the sequences that got one.

        A sequence that ended one step earlier, with the next step already in flight, gets none.
        """
        going = [(s, token) for s, token in zip(sequences, tokens, strict=True) if not s.done]
        for sequence, token in going:
            sequence.new.append(token)
            if sequence.done and sequence.row is not None:
                self._stop(sequence)
            elif sequence.done and sequence in self.waiting:
                self.waiting.remove(sequence)
        return [sequence for sequence, _ in going]
