# SPDX-License-Identifier: Apache-2.0
"""The declarations of the attention ops."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, HALVES, Bool, Call, Float, Int, Numerics, Scalar, Spec, Tensor

FLOAT8 = "float8_e4m3fn"
DESCALES = ("q_descale", "k_descale", "v_descale")


def _options(causal: bool = False) -> tuple[Scalar, ...]:
    """Which keys a query sees, and what becomes of its scores."""
    return (
        Bool("causal", causal),
        Scalar("window", None, kind="int[]", optional=True),  # (left, right); -1 is no limit
        Float("scale", None, optional=True),
        Float("softcap", None, optional=True),
    )


OPTIONS = tuple(option.name for option in _options())


def _results(out: str, lse: str) -> tuple[Tensor, Tensor]:
    # Probabilities and results are rounded to bfloat16, 2**-9 each; values are about 1.
    return (
        Tensor(
            "out",
            out,
            "q",
            strided=True,
            dtype_instead=(FLOAT8, "bfloat16"),
            rtol=1e-2,
            atol=1e-2,
        ),
        Tensor("lse", lse, "float32", rtol=1e-4, atol=1e-4),
    )


def _with_lse(spec: Spec) -> tuple[Spec, Spec]:
    """The op without and with the logarithms of the rows' sums as a second result."""
    return spec.changed(results=spec.results[:1]), spec.changed(name=f"{spec.name}_lse")


def _check_heads(op: str, name: str, heads: int, kv_heads: int) -> None:
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{op}: `{name}` must have a number of heads that divides that of `q`, {heads}, "
            f"got {kv_heads}"
        )


def _check_descales(op: str, call: Call, batch: int, kv_heads: int) -> None:
    import torch

    from tiercel.core.checks import dtype_name

    for name in DESCALES:
        scale = getattr(call, name)
        if scale is None:
            continue
        if call.q.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"{op}: `{name}` must be None unless `q` is float8_e4m3fn, got a tensor and "
                f"`q` of {dtype_name(call.q.dtype)}"
            )
        if scale.numel() != 1 and tuple(scale.shape) not in ((kv_heads,), (batch, kv_heads)):
            raise ValueError(
                f"{op}: `{name}` must have shape [B, Hk] = {[batch, kv_heads]}, [Hk] or one "
                f"element, got {list(scale.shape)}"
            )


def _check_attention(call: Call) -> None:
    batch, _, kv_heads, _ = call.k.shape
    _check_heads("attention", "k", call.q.shape[2], kv_heads)
    _check_descales("attention", call, batch, kv_heads)


def _check_varlen(call: Call) -> None:
    op, starts, kv_heads = "attention_varlen", call.cu_seqlens_q.shape[0], call.k.shape[1]
    _check_heads(op, "k", call.q.shape[1], kv_heads)
    if starts == 0:
        raise ValueError(f"{op}: `cu_seqlens_q` must have at least one element, got none")
    if call.max_seqlen_q < 0 or call.max_seqlen_k < 0:
        raise ValueError(
            f"{op}: `max_seqlen_q` and `max_seqlen_k` must be at least 0, "
            f"got {call.max_seqlen_q} and {call.max_seqlen_k}"
        )
    _check_descales(op, call, starts - 1, kv_heads)


# One more score of each head in the softmax's sum.
_SINKS = Tensor("sinks", "H", "float32", optional=True)
_DESCALES = tuple(Tensor(name, "*", "float32", strided=True, optional=True) for name in DESCALES)
_STARTS = tuple(
    Tensor(f"cu_seqlens_{name}", "B1", "int32", strided=True, shape_text="[B + 1]") for name in "qk"
)

ATTENTION, ATTENTION_LSE = _with_lse(
    Spec(
        "attention",
        Tensor("q", "B Sq H D", (*HALVES, FLOAT8), strided=True),
        Tensor("k", "B Sk Hk D", "q", strided=True),
        Tensor("v", "B Sk Hk Dv", "q", strided=True),
        *_options(),
        *_DESCALES,
        _SINKS,
        results=_results("B Sq H Dv", "B H Sq"),
        check=_check_attention,
        limits="D and Dv multiples of 8 up to 256 (float8: D = Dv, a multiple of 16 up to 128, "
        "no sinks), 16-byte aligned strides",
        numerics=Numerics(
            2**-8,
            of="terms",
            sums="float32: keys in order, by tiles; probabilities rounded to the dtype of v",
        ),
    )
)

ATTENTION_VARLEN, ATTENTION_VARLEN_LSE = _with_lse(
    Spec(
        "attention_varlen",
        Tensor("q", "Tq H D", (*HALVES, FLOAT8), strided=True),
        Tensor("k", "Tk Hk D", "q", strided=True),
        Tensor("v", "Tk Hk Dv", "q", strided=True),
        *_STARTS,
        Int("max_seqlen_q", varies=True),
        Int("max_seqlen_k", varies=True),
        *_options(),
        *_DESCALES,
        _SINKS,
        results=_results("Tq H Dv", "H Tq"),
        check=_check_varlen,
        limits="as `attention`; no softcap in float8",
        numerics=Numerics(
            2**-8,
            of="terms",
            sums="float32: keys in order, by tiles; probabilities rounded to the dtype of v",
        ),
    )
)


def _backward(name: str, queries: str, keys: str, sums: str, starts: tuple[Tensor, ...]) -> Spec:
    """The gradients of q, k and v, of which `deterministic` fixes the order of q's sums."""
    results, values = f"{queries}v", f"{keys}v"  # their head dimension is Dv
    return Spec(
        name,
        Tensor("grad", results, "q", strided=True),
        Tensor("q", queries, HALVES, strided=True),
        Tensor("k", keys, "q", strided=True),
        Tensor("v", values, "q", strided=True),
        *starts,
        Tensor("out", results, "q", strided=True),
        Tensor("lse", sums, "float32", strided=bool(starts)),
        Tensor("grad_lse", sums, "float32", strided=True, optional=True),
        *_options(),
        Bool("deterministic", False),
        results=[Tensor("dq", queries, "q"), Tensor("dk", keys, "q"), Tensor("dv", values, "q")],
    )


ATTENTION_BACKWARD = _backward("attention_backward", "B Sq H D", "B Sk Hk D", "B H Sq", ())
ATTENTION_VARLEN_BACKWARD = _backward(
    "attention_varlen_backward", "Tq H D", "Tk Hk D", "H Tq", _STARTS
)
ATTENTION_SINKS_BACKWARD = Spec(
    "attention_sinks_backward",
    Tensor("grad", "B S H D", HALVES, strided=True),
    Tensor("out", "B S H D", "grad", strided=True),
    Tensor("lse", "B H S", "float32", strided=True),
    Tensor("grad_lse", "B H S", "float32", strided=True, optional=True),
    Tensor("sinks", "H", "float32"),
    results=[Tensor("dsinks", "H", "float32")],
)


def _check_decode(call: Call) -> None:
    from tiercel.core.checks import check_cache_scale

    op, cache = "decode_attention", call.k_cache
    _check_heads(op, "k_cache", call.q.shape[2], cache.shape[2])
    for name in ("k_scale", "v_scale"):
        check_cache_scale(op, name, getattr(call, name), cache, "Hk", cache.shape[2])


_CACHE = "pages page_size Hk D"
_CACHE_TEXT = "[pages, page size, Hk, D]"

DECODE_ATTENTION, DECODE_ATTENTION_LSE = _with_lse(
    Spec(
        "decode_attention",
        Tensor("q", "B Sq H D", HALVES, strided=True),
        Tensor("k_cache", _CACHE, ("q", FLOAT8), strided=True, shape_text=_CACHE_TEXT),
        Tensor("v_cache", _CACHE, "k_cache", strided=True, shape_text=_CACHE_TEXT),
        Tensor("page_table", "B pages_each", "int32", True, shape_text="[B, pages of a sequence]"),
        Tensor("seqused_k", "B", "int32", strided=True),
        Tensor("prefix", "B", "int32", strided=True, optional=True),
        Tensor("k_scale", "*", "float32", optional=True),
        Tensor("v_scale", "*", "float32", optional=True),
        *_options(causal=True),
        Int("max_seqused_k", None, optional=True, varies=True),
        results=_results("B Sq H D", "B H Sq"),
        check=_check_decode,
        limits="page sizes that are powers of two, D a multiple of 8 up to 256 (float8 cache: "
        "of 16)",
        numerics=Numerics(
            2**-8,
            of="terms",
            sums="float32: keys in order, by tiles and splits; probabilities rounded "
            "to the dtype of v",
            batch_invariant=False,
            varies="the splits of the keys, which are chosen by the batch",
        ),
    )
)


def _check_paged(call: Call) -> None:
    from tiercel.core.checks import check_cache_scale, dtype_name

    op, cache, starts = "paged_attention", call.k_cache, call.cu_seqlens_q.shape[0]
    batch, heads = call.page_table.shape[0], call.q.shape[1]
    _check_heads(op, "k_cache", heads, cache.shape[2])
    if starts != batch + 1:
        raise ValueError(
            f"{op}: `cu_seqlens_q` must have shape [B + 1] = [{batch + 1}], got [{starts}]"
        )
    if call.max_seqlen_q < 0:
        raise ValueError(f"{op}: `max_seqlen_q` must be at least 0, got {call.max_seqlen_q}")
    for name in ("k_scale", "v_scale"):
        check_cache_scale(op, name, getattr(call, name), cache, "Hk", cache.shape[2])
    if call.tree_mask is not None and not call.causal:
        raise ValueError(f"{op}: `tree_mask` must be None unless `causal`, got a tensor")
    if call.tree_mask is not None and call.max_seqlen_q > 64:
        raise ValueError(
            f"{op}: `max_seqlen_q` must be at most 64 with `tree_mask`, got {call.max_seqlen_q}"
        )
    if call.prefix is not None and call.tree_mask is not None:
        raise ValueError(f"{op}: `prefix` must be None with `tree_mask`, got a tensor")
    if call.q_scale is not None and dtype_name(call.q.dtype) != FLOAT8:
        raise ValueError(
            f"{op}: `q_scale` must be None unless `q` is {FLOAT8}, got a tensor and `q` of "
            f"{dtype_name(call.q.dtype)}"
        )


PAGED_ATTENTION, PAGED_ATTENTION_LSE = _with_lse(
    Spec(
        "paged_attention",
        Tensor("q", "Tq H D", (*HALVES, FLOAT8), strided=True),
        Tensor("k_cache", _CACHE, ("q", FLOAT8), strided=True, shape_text=_CACHE_TEXT),
        Tensor(
            "v_cache",
            "pages page_size Hk Dv",
            "k_cache",
            strided=True,
            shape_text="[pages, page size, Hk, Dv]",
        ),
        Tensor("page_table", "B pages_each", "int32", True, shape_text="[B, pages of a sequence]"),
        Tensor("seqused_k", "B", "int32", strided=True),
        Tensor("cu_seqlens_q", "B1", "int32", strided=True, shape_text="[B + 1]"),
        Int("max_seqlen_q", varies=True),
        _SINKS,
        Tensor("k_scale", "*", "float32", optional=True),
        Tensor("v_scale", "*", "float32", optional=True),
        Tensor("q_scale", "1", "float32", optional=True),
        Tensor("tree_mask", "Tq", "int64", strided=True, optional=True),
        Tensor("prefix", "B", "int32", strided=True, optional=True),
        *_options(causal=True),
        Int("max_seqused_k", None, optional=True, varies=True),
        results=_results("Tq H Dv", "H Tq"),
        check=_check_paged,
        limits="page sizes that are powers of two, D a multiple of 8 up to 512 (Dv other than D: "
        "both up to 256, 16 bits, pages of 4 keys or more), up to 64 query heads per key head",
        numerics=Numerics(
            2**-8,
            of="terms",
            sums="float32: keys in order, by tiles and splits; probabilities rounded "
            "to the dtype of v",
            batch_invariant=False,
            varies="the tiles and splits of the keys, which are chosen by the batch",
        ),
    )
)

_STATE = "B S H D"
_SUMS = "B H S"

MERGE_ATTENTION_STATES = Spec(
    "merge_attention_states",
    Tensor("out_a", _STATE, FLOATS, strided=True),
    Tensor("lse_a", _SUMS, "float32"),
    Tensor("out_b", _STATE, "out_a", strided=True),
    Tensor("lse_b", _SUMS, "float32"),
    # The result's rounding to bfloat16, 2**-9.
    results=[
        Tensor("out", _STATE, "out_a", strided=True, rtol=4e-3, atol=1e-5),
        Tensor("lse", _SUMS, "float32", rtol=1e-5, atol=1e-5),
    ],
    numerics=Numerics(4e-6, of="terms"),
)
