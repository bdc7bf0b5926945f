# SPDX-License-Identifier: Apache-2.0
"""The loop: takes a step of all sequences that run, and hands out the tokens."""

from collections.abc import Iterator

import torch
from model import Model, Step
from pages import Pages
from scheduler import GREEDY, Piece, Sampling, Scheduler, Sequence
from torch import Tensor

import tiercel

# Numbers of sequences that have a CUDA graph; a smaller batch is padded to the next.
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Engine:
    """Serves sequences with one model. Not thread-safe.

    Args:
        model: Weights and their computation.
        pages: Pages of the cache of keys and values.
        page_size: Tokens in a page.
        most_sequences: The most sequences in work at once; others wait.
        most_tokens: The most tokens of a step; longer prompts are computed in chunks.
        longest: The most tokens of a sequence, prompt included.
        graphs: Whether decoding steps are captured, once, and replayed.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: int = 4096,
        page_size: int = 16,
        most_sequences: int = 256,
        most_tokens: int = 2048,
        longest: int = 4096,
        graphs: bool = True,
    ) -> None:
        config, weight = model.config, model.embeddings
        if most_sequences > most_tokens:
            raise ValueError(
                f"`most_sequences` must be at most `most_tokens` ({most_tokens}), "
                f"got {most_sequences}"
            )
        if pages * page_size < longest:
            raise ValueError(f"`longest`, {longest}, is more than the cache of {pages} pages holds")
        self.model = model
        self.device = weight.device
        heads, size = config.num_key_value_heads, config.head_dim
        where = {"dtype": weight.dtype, "device": self.device}
        self.pages = Pages(config.num_hidden_layers, pages, page_size, heads, size, **where)
        self.scheduler = Scheduler(self.pages, most_sequences, most_tokens)
        self.longest = longest
        self._columns = -(-longest // page_size)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        if graphs and self.device.type == "cuda":
            for count in (c for c in GRAPHS if c <= most_sequences):
                self._capture(count)

    def add(
        self,
        prompt: list[int],
        most_new: int,
        *,
        end: int | None = None,
        sampling: Sampling = GREEDY,
    ) -> Sequence:
        """Queues a sequence; its tokens appear in ``.new``.

        Raises:
            ValueError: The prompt is empty, or prompt and new tokens are more than ``longest``.
        """
        if not prompt or most_new < 1:
            raise ValueError("a sequence needs a prompt and room for at least one new token")
        if len(prompt) + most_new > self.longest:
            raise ValueError(
                f"prompt and new tokens are {len(prompt) + most_new}, more than {self.longest}"
            )
        sequence = Sequence(prompt, most_new, end, sampling)
        self.scheduler.waiting.append(sequence)
        return sequence

    def run(self) -> Iterator[list[Sequence]]:
        """Steps until nothing is left to do; yields the sequences that got a token."""
        while pieces := self.scheduler.next_step():
            drawn = [piece.sequence for piece in pieces if piece.gives_token]
            self.scheduler.finish(pieces, self.step(pieces))
            yield drawn

    @torch.inference_mode()
    def step(self, pieces: list[Piece]) -> list[int]:
        """Computes the pieces: the next token of each that gives one."""
        if all(piece.count == 1 and piece.gives_token for piece in pieces):
            for count, (graph, buffer, tokens) in self._graphs.items():
                if count >= len(pieces):
                    self._move(self._inputs(pieces, count), buffer)
                    graph.replay()
                    return tokens[: len(pieces)].tolist()
        inputs = self._move(self._inputs(pieces, len(pieces)))
        return self._compute(inputs, max(piece.count for piece in pieces)).tolist()

    def _compute(self, inputs: list[Tensor], most_new: int) -> Tensor:
        seeds, offsets, temperatures, top_ks, top_ps, *rest = inputs
        logits = self.model(Step(*rest, most_new), self.pages.layer)
        return tiercel.sample(
            logits,
            temperature=temperatures,
            top_k=top_ks,
            top_p=top_ps,
            seed=seeds,
            offset=offsets,
        )

    def _capture(self, count: int) -> None:
        """Records a decoding step of so many sequences."""
        buffer = self._pack(self._inputs([], count)).to(self.device)
        inputs = self._move(self._inputs([], count), buffer)
        with torch.inference_mode():
            self._compute(inputs, 1)  # loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                tokens = self._compute(inputs, 1)
        self._graphs[count] = graph, buffer, tokens

    def _inputs(self, pieces: list[Piece], sequences: int) -> list[Tensor]:
        """Makes a step's inputs on the host: the parameters of draws, then the fields of `Step`.

        Sequences behind the last piece have one token, which goes nowhere and sees nothing.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        last: list[int] = []
        table = torch.zeros(sequences, self._columns, dtype=torch.int32)
        for row, piece in enumerate(pieces):
            sequence = piece.sequence
            places = range(sequence.cached, sequence.cached + piece.count)
            tokens += map(sequence.token, places)
            positions += places
            slots += (self.pages.slot(sequence.pages, place) for place in places)
            starts.append(len(tokens))
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
            if piece.gives_token:
                last.append(len(tokens) - 1)
        padding = sequences - len(pieces)
        for _ in range(padding):
            last.append(len(tokens))
            tokens.append(0)
            positions.append(0)
            slots.append(-1)
            starts.append(len(tokens))
        lengths = [piece.sequence.cached + piece.count for piece in pieces] + [0] * padding
        draws = [piece.sequence for piece in pieces if piece.gives_token]
        settings = [sequence.sampling for sequence in draws] + [GREEDY] * padding
        ints, floats = torch.int32, torch.float32
        return [
            torch.tensor([s.seed for s in settings], dtype=torch.int64),
            torch.tensor([d.length for d in draws] + [0] * padding, dtype=torch.int64),
            torch.tensor([s.temperature for s in settings], dtype=floats),
            torch.tensor([s.top_k for s in settings], dtype=ints),
            torch.tensor([s.top_p for s in settings], dtype=floats),
            *(
                torch.tensor(part, dtype=ints)
                for part in (tokens, positions, slots, starts, lengths)
            ),
            table,
            torch.tensor(last, dtype=ints),
        ]

    @staticmethod
    def _pack(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])

    def _move(self, tensors: list[Tensor], buffer: Tensor | None = None) -> list[Tensor]:
        """The tensors on the GPU, by one copy; a graph's inputs always go to its own buffer."""
        packed = self._pack(tensors)
        buffer = packed.to(self.device) if buffer is None else buffer.copy_(packed)
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]
