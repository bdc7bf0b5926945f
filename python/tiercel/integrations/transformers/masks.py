# SPDX-License-Identifier: Apache-2.0
"""Masks of Hugging Face models, in the form that Tiercel's attention takes them.

transformers calls `make_mask` once per forward for each kind of layer, and passes its result to the
attention of every layer. A dense mask is only made if no other form expresses it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing


class _Rows(threading.local):
    """State of the forward that this thread runs."""

    one_sequence_each = False


_rows = _Rows()


def know_one_sequence_each(known: bool) -> None:
    """Sets whether each row of tokens is one sequence in this thread's next forwards."""
    _rows.one_sequence_each = known


def _look_for_sequences(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' look at position ids, for which the host waits until the GPU has ended all
    that it was given; not where `apply` knows the answer."""

    def find(position_ids: Tensor) -> Tensor | None:
        if not torch.compiler.is_compiling() and _rows.one_sequence_each:
            return None
        return theirs(position_ids)  # type: ignore[no-any-return]

    return find


masking_utils.find_packed_sequence_indices = _look_for_sequences(
    masking_utils.find_packed_sequence_indices
)


@dataclasses.dataclass(eq=False)
class Mask:
    """One forward's mask. Without any of the tensors, queries are aligned with the last key.

    Some models work on their mask before attention gets it: to them it is the bool tensor
    ``[B, 1, queries, keys]`` that sdpa's mask would be, and what they make of it is a tensor.
    """

    arguments: dict[str, Any]  # for the mask of all scores
    causal: bool = False
    window: tuple[int, int] | None = None
    keys: int | None = None  # the first so many may be seen; None: all
    places: Tensor | None = None  # [B, keys] int32: keys that are seen, then others
    used: Tensor | None = None  # [B] int32: the number of keys that are seen
    starts: Tensor | None = None  # [B] the first token that is no padding
    sequences: Tensor | None = None  # int32 starts of packed sequences over all rows
    longest: int = 0  # of the packed sequences
    perhaps_packed: bool = False  # position ids, unknown while a graph is made, would tell
    kept: dict[Any, Tensor] = dataclasses.field(default_factory=dict)

    ndim = 4  # transformers looks at it: this is no mask of padding
    dtype = torch.bool

    @property
    def shape(self) -> torch.Size:
        """That of the tensor, without making it."""
        given = self.arguments
        names = ("batch_size", "q_length", "kv_length")
        rows, queries, keys = (given[name] for name in names)
        return torch.Size((rows, 1, queries, keys))

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in type(self).__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def dense(x: Any) -> Any:
            return x.tensor() if isinstance(x, Mask) else x

        kwargs = {name: dense(x) for name, x in (kwargs or {}).items()}
        return function(*map(dense, args), **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Mask | Tensor:
        """On another device: accelerate moves what a layer is given."""
        if torch._C._nn._parse_to(*args, **kwargs)[1] not in (None, torch.bool):
            return self.tensor().to(*args, **kwargs)
        moved = {
            name: value.to(*args, **kwargs)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, kept={}, **moved)

    def keep(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Makes a tensor once for all layers; in a graph the compiler does that."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def tensor(self) -> Tensor:
        """The mask of all scores, bool."""
        return self.keep("dense", lambda: _dense(self.arguments))

    def dense(self, device: torch.device) -> Tensor | None:
        """The mask of all scores, bool; None where sdpa's `is_causal` is to say it."""
        return self.tensor().to(device) if self.arguments else None


def _dense(arguments: dict[str, Any]) -> Tensor:
    return sdpa_mask(**arguments, allow_is_causal_skip=False)  # type: ignore[no-any-return]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> Mask | Tensor:
    """The mask interface of ``attn_implementation="tiercel"``."""
    if isinstance(attention_mask, Mask):  # made before a compiled forward, by `generate`
        return attention_mask
    if isinstance(q_offset, Tensor) and q_length > 1 and not is_tracing(q_offset):
        q_offset = int(q_offset)
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    if q_length == 1:
        return _of_one_query(arguments)
    plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    joined = mask_function.__name__ == "and_mask" and not use_vmap
    causal = mask_function is causal_mask_function or (
        joined and allow_is_bidirectional_skip is None
    )
    sliding = local_size is not None and _slides(config, local_size)
    if not (plain or (joined and causal and (local_size is None or sliding))):
        return _dense(arguments)

    # Two causal masks joined, and no window: sequences are packed. With a window nobody says it.
    square = attention_mask is None and _is_zero(q_offset) and q_length == kv_length
    packed = joined and not allow_is_causal_skip and square
    if not packed and not (allow_is_causal_skip if causal else allow_is_bidirectional_skip):
        return _dense(arguments)  # the model works on the mask itself
    if joined and local_size is None and not packed:
        return _dense(arguments)

    mask = Mask(arguments, causal=causal)
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):  # in a static cache
        if not causal or attention_mask is not None:
            return _dense(arguments)
        if sliding and local_size < kv_length:  # type: ignore[operator]
            mask.window = (local_size - 1, 0)  # type: ignore[operator]
        used = torch.as_tensor(q_offset + q_length - kv_offset, device=device)
        mask.used = used.to(torch.int32).expand(batch_size)
        mask.places = _in_order(batch_size, kv_length, device)
        return mask
    mask.keys = q_offset + q_length - kv_offset if causal else kv_length
    if sliding and local_size < mask.keys:  # type: ignore[operator]
        mask.window = (local_size - 1, 0)  # type: ignore[operator]
    if packed:
        return _with_sequences(mask)
    return mask if attention_mask is None else _with_padding(mask)


def _slides(config: Any, size: int) -> bool:
    """False for chunks, which have the same argument."""
    return size == getattr(config, "sliding_window", None) and size != getattr(
        config, "attention_chunk_size", None
    )


def _is_zero(offset: int | Tensor) -> bool:
    return not isinstance(offset, Tensor) and offset == 0


def _in_order(batch: int, keys: int, device: Any) -> Tensor:
    return torch.arange(keys, dtype=torch.int32, device=device).expand(batch, -1)


def _of_one_query(arguments: dict[str, Any]) -> Mask:
    """Any mask of one query is a list of keys."""
    seen = _dense(arguments)[:, 0, 0]
    order = _in_order(*seen.shape, seen.device)
    last = seen.shape[1]
    rank = torch.where(seen, seen.cumsum(1) - 1, last)
    places = order.new_zeros(len(seen), last + 1).scatter(1, rank, order)[:, :last]
    return Mask(arguments, used=seen.sum(1, dtype=torch.int32), places=places)


def _with_sequences(mask: Mask) -> Mask:
    """A sequence begins where a query does not see the key before its own."""
    if is_tracing(torch.empty(0)):
        mask.perhaps_packed = True
        return mask
    given = mask.arguments
    batch, length, device = given["batch_size"], given["q_length"], given["device"]
    row, query = (torch.arange(size, device=device) for size in (batch, length))
    before = (query - 1).clamp(min=0)
    seen = given["mask_function"](
        row[:, None, None, None],
        row.new_zeros(1, 1, 1, 1),
        query[None, None, :, None],
        before[None, None, :, None],
    )
    begins = ~seen.expand(batch, 1, length, 1).reshape(batch, length)
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]
    if len(starts) > batch:
        end = starts.new_tensor([batch * length])
        mask.sequences = torch.cat([starts, end]).to(torch.int32)
        mask.longest = int(mask.sequences.diff().max())
    return mask


def _with_padding(mask: Mask) -> Mask | Tensor:
    given = mask.arguments
    padding = prepare_padding_mask(given["attention_mask"], given["kv_length"], given["kv_offset"])
    first = given["kv_offset"]
    padding = padding[:, first : first + mask.keys]
    starts = padding.int().argmax(1)
    # One run of tokens: as many as from the first to the last.
    ends = padding.shape[1] - padding.flip(1).int().argmax(1)
    whole = (padding.sum(1) == ends - starts) | ~padding.any(1)
    alone = mask.causal and mask.keys == given["q_length"]
    if is_tracing(padding):
        if not alone:
            return _dense(given)
        torch._assert_async(whole.all(), "tiercel: a padding mask must have its ones side by side")
        mask.starts = starts
        return mask
    facts = torch.stack([padding.all(), whole.all(), (starts == 0).all()])
    full, one_run, right = facts.tolist()
    if full:
        return mask
    if not (alone and one_run):
        return _dense(given)
    # No token sees padding on its right.
    mask.starts = None if right else starts
    return mask
