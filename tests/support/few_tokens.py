# SPDX-License-Identifier: Apache-2.0
"""What the launcher of fused_moe for few tokens is called with."""

from typing import Any

from support.dlpack_tensor import ExchangeTensor

E4M3 = "float8_e4m3fn"


def scales(make: Any, of: str, experts: int, hidden: int, inner: int) -> dict[str, Any]:
    """`of`: rows, experts or blocks."""
    up, down = {
        "rows": ((experts, 2 * inner), (experts, hidden)),
        "experts": ((experts, 1), (experts, 1)),
        "blocks": (
            (experts, -(-2 * inner // 128), -(-hidden // 128)),
            (experts, -(-hidden // 128), -(-inner // 128)),
        ),
    }[of]
    return {"w_up_scale": make(*up), "w_down_scale": make(*down)}


def arguments(
    tokens: int,
    experts: int,
    k: int,
    hidden: int,
    inner: int,
    of: str = "rows",
    make: Any = ExchangeTensor,
) -> dict[str, Any]:
    """In the launcher's order."""
    return {
        "x": make(tokens, hidden, dtype="bfloat16"),
        "w_up": make(experts, 2 * inner, hidden, dtype=E4M3),
        "w_down": make(experts, hidden, inner, dtype=E4M3),
        **scales(make, of, experts, hidden, inner),
        "topk_weights": make(tokens, k),
        "topk_ids": make(tokens, k, dtype="int32"),
        "out": make(tokens, hidden, dtype="bfloat16"),
        "activation": 0,
    }
