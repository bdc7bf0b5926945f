# SPDX-License-Identifier: Apache-2.0
"""The declarations of the attention ops."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, HALVES, Bool, Call, Float, Int, Scalar, Spec, Tensor

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
)
