# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation="tiercel"``: attention of Hugging Face models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tiercel
from tiercel.core import selection
from tiercel.integrations.transformers.masks import Mask

# A keyword that `apply` adds to a forward without position ids.
ONE_SEQUENCE = "tiercel_one_sequence"
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
# Arguments of attention that Tiercel lacks, and sdpa too but for a bias.
_UNSUPPORTED = (
    "output_attentions",
    "position_bias",
    "head_mask",
    "sinks",
    "indices",
    "block_indices",
)
_EAGER_ONLY = ("output_attentions", "head_mask", "sinks")

_SEQUENCES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention interface: ``[B, H, S, D]`` to ``[B, S, H, D]``, and no weights.

    Unsupported calls run on the model's own sdpa or eager attention, with one warning per reason.
    """
    query, key, value = _under_autocast(query, key, value)
    mask = attention_mask
    if mask is None:
        mask = _mask_of_none(module, query, key, is_causal)
    why = _why_not(query, key, value, mask, dropout, kwargs)
    if why is None:
        assert isinstance(mask, Mask)
        return _attend(query, key, value, mask, scaling, softcap, s_aux, kwargs), None

    dense = attention_mask
    if isinstance(mask, Mask) and attention_mask is not None:
        dense = mask.dense(query.device)
    indices, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    if indices is not None or blocks is not None:
        dense = _allowed(dense, mask, query, key)
    if indices is not None:
        dense = _selected(indices, dense, key)
    if blocks is not None:
        dense = _of_blocks(module, blocks, dense, query, key)
    known = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    eager = softcap is not None or s_aux is not None or any(_is_given(kwargs, _EAGER_ONLY))
    if not eager:
        _warn("sdpa", why)
        return sdpa_attention_forward(module, query, key, value, dense, **known, **kwargs)  # type: ignore[no-any-return]
    _warn("eager", why)
    more = {"softcap": softcap, "s_aux": s_aux}
    known = {"dropout": dropout, "scaling": scaling}
    known.update({name: option for name, option in more.items() if option is not None})
    additive = _additive(dense, mask, query, key)
    return _eager_of(module)(module, query, key, value, additive, **known, **kwargs)  # type: ignore[no-any-return]


def _is_given(kwargs: dict[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    """Those of the names that the call gives."""
    for name in names:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            yield name


# Models with sparse attention narrow the mask themselves only where the attention is named eager or
# sdpa; others get the selection.


def _allowed(
    dense: Tensor | None, mask: Mask | Tensor, query: Tensor, key: Tensor
) -> Tensor | None:
    """The mask before a selection, None where every query sees all keys."""
    if dense is None and isinstance(mask, Mask) and mask.causal:
        return _causal(query, key)
    return dense


def _selected(indices: Tensor, dense: Tensor | None, key: Tensor) -> Tensor:
    """The mask, narrowed to the keys that ``indices`` selects for each query: ``[B, S, N]``."""
    shape = (*indices.shape[:2], key.shape[2])
    chosen = torch.zeros(shape, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if dense is None:
        return chosen
    if dense.dtype == torch.bool:
        return dense & chosen
    return dense.masked_fill(~chosen, torch.finfo(dense.dtype).min)


def _of_blocks(
    module: torch.nn.Module, blocks: Tensor, dense: Tensor | None, query: Tensor, key: Tensor
) -> Tensor:
    """The mask, narrowed to blocks of keys by the model's own indexer."""
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise NotImplementedError(
            f'attn_implementation="tiercel": {type(module).__name__} passes `block_indices` and '
            "has no `indexer.build_block_mask` that makes a mask of them; use sdpa"
        )
    if dense is None:
        dense = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
    made: Tensor = build(blocks, dense, key.shape[2], query.dtype, key.device, position_ids=None)
    return made


def _causal(query: Tensor, key: Tensor) -> Tensor:
    at = torch.arange(key.shape[2], device=query.device)
    return (at <= at[: query.shape[2], None])[None, None]


def _under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
    return tensors


def _mask_of_none(
    module: torch.nn.Module, query: Tensor, key: Tensor, is_causal: bool | None
) -> Mask:
    """A missing mask as sdpa_attention_forward understands it: query i stands at key i."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal and query.shape[2] > 1:
        return Mask({}, causal=True, keys=query.shape[2])
    return Mask({}, keys=key.shape[2])


def _why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """The reason why Tiercel does not support this call, or None."""
    d, d_v = query.shape[-1], value.shape[-1]
    if query.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {str(query.dtype).removeprefix('torch.')}"
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value have several dtypes"
    if d != key.shape[-1]:
        return "queries and keys have different head dimensions"
    for size in (d, d_v):
        if size % 8 or not 8 <= size <= 256:
            return f"a head dimension of {size}, which is no multiple of 8 up to 256"
    if dropout:
        return "dropout of attention weights"
    for name in _is_given(kwargs, _UNSUPPORTED):
        return f"`{name}`"
    if not isinstance(mask, Mask):
        return "a mask of all scores"
    if mask.places is not None:
        if mask.places.shape[1] != key.shape[2]:
            return "a mask for another number of keys"
        if d_v > d:
            return "a cache whose values have a larger head dimension than its keys"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return "gradients through attention over a cache"
        return None
    if mask.keys is not None and (
        mask.keys > key.shape[2] or (mask.causal and mask.keys < query.shape[2])
    ):
        return "a mask for another number of keys"
    if mask.sequences is not None or _given_sequences(kwargs, mask, query):
        return None
    if mask.perhaps_packed and not kwargs.get(ONE_SEQUENCE):
        return (
            "position ids may pack sequences, which a compiled graph cannot know: pass "
            "`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, or use "
            "tiercel.integrations.transformers.apply(model) and pass no position ids"
        )
    return None


def _given_sequences(kwargs: dict[str, Any], mask: Mask, query: Tensor) -> bool:
    """True if the caller describes packed sequences as for FlashAttention."""
    given = all(kwargs.get(name) is not None for name in _SEQUENCES)
    return given and mask.causal and mask.starts is None and mask.keys == query.shape[2]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": mask.window}
    q, k, v = (_readable(x).transpose(1, 2) for x in (query, key, value))
    if mask.places is not None:
        options["return_lse"] = sinks is not None
        return _with_sinks(_decode(q, key, value, mask, options), sinks)
    options["sinks"] = None if sinks is None else sinks.float()
    if mask.keys is not None and mask.keys != k.shape[1]:
        k, v = k[:, : mask.keys], v[:, : mask.keys]
    options["causal"] = mask.causal
    if mask.sequences is not None or _given_sequences(kwargs, mask, query):
        flat = _packed(q, k, v, mask, options, kwargs)
        return flat.view(*q.shape[:-1], v.shape[-1])
    if mask.starts is None:
        return tiercel.attention(q, k, v, **options)  # type: ignore[return-value]
    # Each row's padding goes to its end, where no token sees it.
    at = torch.arange(q.shape[1], device=q.device)
    q, k, v = (_rows(x, at + mask.starts[:, None]) for x in (q, k, v))
    out = tiercel.attention(q, k, v, **options)
    return _rows(out, at - mask.starts[:, None])


def _readable(x: Tensor) -> Tensor:
    """Strides that the kernels take: the last dimension contiguous, others on 16 bytes."""
    *strides, last = x.stride()
    return x if last == 1 and all(step % 8 == 0 for step in strides) else x.contiguous()


def _rows(x: Tensor, at: Tensor) -> Tensor:
    at = at.remainder(x.shape[1])[:, :, None, None]
    return x.gather(1, at.expand(-1, -1, *x.shape[2:]))


def _with_sinks(result: Any, sinks: Tensor | None) -> Tensor:
    """A sink is one more key, of that score and a value of 0."""
    if sinks is None:
        return result  # type: ignore[no-any-return]
    out, lse = result
    share = torch.sigmoid(lse - sinks.float()[:, None]).transpose(-1, -2)
    return (out * share[..., None]).to(out.dtype)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: dict[str, Any], kwargs: dict[str, Any]
) -> Any:
    if _given_sequences(kwargs, mask, q.transpose(1, 2)):
        starts_q, starts_k, *longest = (kwargs[name] for name in _SEQUENCES)
        starts = starts_q.to(torch.int32), starts_k.to(torch.int32)
    else:
        assert mask.sequences is not None
        starts, longest = (mask.sequences,) * 2, [mask.longest] * 2
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return tiercel.attention_varlen(*flat, *starts, *longest, **options)


def _decode(q: Tensor, key: Tensor, value: Tensor, mask: Mask, options: dict[str, Any]) -> Any:
    """Attention over a cache `[B, Hk, L, D]`, of which each key is a page."""
    batch, heads, length, d = key.shape
    assert mask.places is not None and mask.used is not None
    if value.shape[-1] < d:
        wide = torch.nn.functional.pad(value, (0, d - value.shape[-1]))
        found = _decode(q, key, wide, mask, options)
        narrow = slice(value.shape[-1])
        return (found[0][..., narrow], found[1]) if options["return_lse"] else found[..., narrow]
    table = mask.places
    if batch == 1:
        caches = [x[0].transpose(0, 1)[:, None] for x in (key, value)]
    else:
        row = heads * length
        pages = row * (batch - 1) + length  # the first head's; the others' lie behind each
        caches = [
            x.contiguous().as_strided((pages, 1, heads, d), (d, d, length * d, 1))
            for x in (key, value)
        ]

        def over_all_rows() -> Tensor:
            first = torch.arange(batch, dtype=torch.int32, device=q.device) * row
            return mask.places + first[:, None]  # type: ignore[operator]

        table = mask.keep(row, over_all_rows)
    return tiercel.decode_attention(q, *caches, table, mask.used, **options)


def _additive(
    dense: Tensor | None, mask: Mask | Tensor, query: Tensor, key: Tensor
) -> Tensor | None:
    """A mask as eager attention takes it."""
    dense = _allowed(dense, mask, query, key)
    if dense is None or dense.dtype != torch.bool:
        return dense
    hidden = torch.finfo(query.dtype).min
    return torch.zeros((), dtype=query.dtype, device=query.device).where(dense, hidden)


def _eager_of(module: torch.nn.Module) -> Any:
    """The attention that the model's own file falls back to."""
    name = "eager_attention_forward"
    found = getattr(sys.modules[type(module).__module__], name, None)
    if found is None:
        raise NotImplementedError(f"{type(module).__name__} has no `{name}` beside it")
    return found


@torch.compiler.assume_constant_result  # while a graph is made, it warns then
def _warn(stand_in: str, why: str) -> bool:
    name = 'attn_implementation="tiercel"'
    selection.fall_back(name, NotImplementedError, why, stand_in)
    return True
