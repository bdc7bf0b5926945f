# SPDX-License-Identifier: Apache-2.0
"""The declarations of the routing ops."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, INDICES, Bool, Call, DType, Int, Spec, Tensor


def check_k(op: str, k: int, experts: int) -> None:
    if k < 1 or k > experts:
        raise ValueError(
            f"{op}: k must be between 1 and the number of experts, got k = {k} "
            f"for {experts} experts"
        )


def _check_topk(call: Call) -> None:
    check_k("topk_softmax", call.k, call.scores.shape[1])


TOPK_SOFTMAX = Spec(
    "topk_softmax",
    Tensor("scores", "T E", FLOATS, strided=True),
    Int("k"),
    Bool("softmax_first", True),
    Bool("renormalize", False),
    DType("indices_dtype", "int32", choices=INDICES),
    results=[
        # float32 arithmetic: some roundings of 2**-24 each.
        Tensor("weights", "T k", "float32", rtol=1e-5, atol=1e-6),
        Tensor("indices", "T k", "indices_dtype"),
    ],
    check=_check_topk,
)
