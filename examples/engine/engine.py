# SPDX-License-Identifier: Apache-2.0
"""The loop: launches steps of all running sequences, and reads their tokens one step late."""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from memory import GREEDY, Pages, Rows, Sampling, sendable
from model import Model, Step
from scheduler import Piece, Scheduler, Sequence
from torch import Tensor

import tiercel

# Numbers of rows with a CUDA graph; a step with another number replays the next larger one.
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# The inputs of a step that has tokens of prompts: tokens, one value a piece (and one more start),
# one a drawn token, one a token that only the GPU knows. Positions and slots of the tokens follow
# from them on the GPU: the host runs no Python for each token of a prompt.
INPUTS = ("tokens", "starts", "lengths", "rows", "last", "drawn", "on_gpu", "on_gpu_rows")


@dataclasses.dataclass
class Flight:
    """A step in flight, and where its tokens arrive on the host."""

    sequences: list[Sequence]
    places: list[int]  # of their tokens
    tokens: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        return [tokens[place] for place in self.places]


class Engine:
    """Serves sequences with one model. Not thread-safe.

    Args:
        model: Weights and their computation.
        pages: Pages of the cache of keys and values.
        page_size: Tokens in a page.
        most_sequences: The most sequences that run at once; others wait.
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
        self.rows = Rows(most_sequences, -(-longest // page_size), page_size, self.device)
        self.scheduler = Scheduler(self.pages, self.rows, most_sequences, most_tokens)
        self.longest = longest
        self._flying: Flight | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if graphs and self.device.type == "cuda":
            self._capture(sorted({min(rows, most_sequences) for rows in GRAPHS}))

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
        """Steps until nothing is left to do; yields the sequences that got a token.

        The next step is launched before the host waits for the tokens of the previous one.
        """
        while (pieces := self.scheduler.next_step()) or self._flying:
            before, self._flying = self._flying, self.launch(pieces) if pieces else None
            if before:
                yield self.scheduler.finished(before.sequences, before.wait())

    @torch.inference_mode()
    def launch(self, pieces: list[Piece]) -> Flight:
        """Launches a step, and the copy of its tokens to the host."""
        self.rows.send()
        sequences = [piece.sequence for piece in pieces if piece.gives_token]
        if all(piece.sequence.decoding for piece in pieces):
            places = [sequence.row for sequence in sequences if sequence.row is not None]
            tokens = self.decode(max(places) + 1)
        else:
            places = list(range(len(sequences)))
            tokens = self._mixed(pieces)
        tokens = tokens.to("cpu", non_blocking=True, copy=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        self.scheduler.started(pieces)
        return Flight(sequences, places, tokens, arrived)

    @torch.inference_mode()
    def decode(self, rows: int) -> Tensor:
        """Draws a token for each of the first rows; all inputs are on the GPU."""
        for captured, graph in self._graphs.items():
            if captured >= rows:
                graph.replay()
                return self.rows.tokens[:rows]
        return self._decode_rows(rows)

    def _decode_rows(self, rows: int) -> Tensor:
        state, settings = self.rows, self.rows.settings
        tokens, positions, lengths = (
            x[:rows] for x in (state.tokens, state.positions, state.lengths)
        )
        active, bases, table = (
            x[:rows] for x in (settings.active, settings.bases, settings.page_table)
        )
        # Unused rows read and write no key, whatever their position.
        torch.addcmul(active, positions, active, out=lengths)
        step = Step(tokens, positions, positions + bases, lengths, table)
        tokens.copy_(self._draw(step, slice(rows), positions))
        positions.add_(active)
        return tokens

    def _draw(self, step: Step, rows: slice | Tensor, last: Tensor) -> Tensor:
        """Computes a step and draws the tokens of rows after the positions `last`."""
        settings = self.rows.settings
        return tiercel.sample(
            self.model(step, self.pages.layer),
            temperature=settings.temperatures[rows],
            top_k=settings.top_ks[rows],
            top_p=settings.top_ps[rows],
            seed=settings.seeds[rows],
            offset=last,
        )

    def _capture(self, sizes: list[int]) -> None:
        """Records decoding steps, all in the same memory, since only one runs at a time."""
        self.rows.send()
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for rows in sizes:
                self._decode_rows(rows)  # loads the kernels
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._decode_rows(rows)
                self._graphs[rows] = graph

    def _mixed(self, pieces: list[Piece]) -> Tensor:
        """A step that has tokens of prompts."""
        state, given = self.rows, self._inputs(pieces)
        tokens, last, drawn = given["tokens"], given["last"], given["drawn"]
        starts, lengths, rows = given["starts"], given["lengths"], given["rows"]
        tokens[given["on_gpu"]] = state.tokens[given["on_gpu_rows"]].long()
        piece_of = torch.repeat_interleave(starts.diff(), output_size=len(tokens))
        positions = torch.arange(len(tokens), device=self.device)
        positions += (lengths - starts[1:])[piece_of]
        step = Step(
            tokens,
            positions,
            state.slots(rows[piece_of], positions),
            lengths.int(),
            state.settings.page_table[rows],
            starts.int(),
            last,
            max(piece.count for piece in pieces),
        )
        positions = positions[last]
        new = self._draw(step, drawn, positions)
        state.tokens[drawn], state.positions[drawn] = new, positions + 1
        return new

    def _inputs(self, pieces: list[Piece]) -> dict[str, Tensor]:
        """Makes the inputs of a step that has tokens of prompts, by one copy to the GPU."""
        parts: dict[str, list[int]] = {name: [] for name in INPUTS}
        tokens, last = parts["tokens"], parts["last"]
        parts["starts"].append(0)
        for piece in pieces:
            sequence, end = piece.sequence, piece.sequence.cached + piece.count
            if sequence.decoding:
                parts["on_gpu"].append(len(tokens))
                parts["on_gpu_rows"].append(sequence.row)
                tokens.append(0)
            else:
                tokens += (sequence.prompt + sequence.new)[sequence.cached : end]
            parts["starts"].append(len(tokens))
            parts["lengths"].append(end)
            parts["rows"].append(sequence.row)
            if piece.gives_token:
                last.append(len(tokens) - 1)
                parts["drawn"].append(sequence.row)
        packed = torch.tensor(list(itertools.chain(*parts.values())))
        packed = sendable(packed, self.device).to(self.device, non_blocking=True)
        split = packed.split([len(part) for part in parts.values()])
        return dict(zip(parts, split, strict=True))
