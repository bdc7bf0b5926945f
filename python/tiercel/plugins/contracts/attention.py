# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec

_REST = {"window": None, "scale": None, "softcap": None, "return_lse": True}


def _case(
    batch: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    d: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    values: str = "random",
) -> Case:
    sizes = {"B": batch, "Sq": queries, "Sk": keys, "H": heads[0], "Hk": heads[1], "D": d}
    return Case(sizes, dtype, {"causal": causal, **_REST}, values)


_CASES = (
    _case(1, 128, 128, (2, 2), 128),
    _case(2, 300, 300, (4, 2), 64, "float16", True),
    _case(2, 65, 257, (4, 1), 128, "bfloat16", True),
    _case(1, 200, 100, (2, 2), 64, "bfloat16", True),
    _case(3, 1, 77, (2, 1), 128, "float16"),
    _case(0, 16, 16, (2, 2), 64),
    _case(2, 130, 130, (2, 2), 64, "bfloat16", True, "strided"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(length: str, heads: str) -> Any:
        shape = [case.sizes[name] for name in ("B", length, heads, "D")]
        drawn = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        if case.values != "strided":
            return drawn
        return torch.cat([drawn, -drawn], dim=2)[:, :, : shape[2]]

    tensors = {"q": random("Sq", "H"), "k": random("Sk", "Hk"), "v": random("Sk", "Hk")}
    return {**tensors, **case.options}


def _both(call: Any, *args: Any) -> Any:
    return call(*args, True)


def _out(call: Any, *args: Any) -> Any:
    return _both(call, *args)[0]


def _into(call: Any, q: Any, k: Any, v: Any, out: Any, *options: Any) -> None:
    out.copy_(_out(call, q, k, v, *options))


def _both_into(call: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any) -> None:
    results = _both(call, q, k, v, *options)
    out.copy_(results[0])
    lse.copy_(results[1])


ATTENTION = Contract(
    family="attention",
    op="attention",
    arguments=(
        TensorSpec("q", ("B", "Sq", "H", "D"), ("bfloat16", "float16"), strided=True),
        TensorSpec("k", ("B", "Sk", "Hk", "D"), ("q",), strided=True),
        TensorSpec("v", ("B", "Sk", "Hk", "D"), ("q",), strided=True),
        ScalarSpec("causal", "bool"),
        ScalarSpec("window", "(int, int) or None"),
        ScalarSpec("scale", "float or None"),
        ScalarSpec("softcap", "float or None"),
        ScalarSpec("return_lse", "bool"),  # always true: both outputs are due
    ),
    # Probabilities and results are rounded to bfloat16, 2**-9 each; values are about 1.
    outputs=(
        TensorSpec("out", ("B", "Sq", "H", "D"), ("q",), rtol=1e-2, atol=1e-2),
        TensorSpec("lse", ("B", "H", "Sq"), ("float32",), rtol=1e-4, atol=1e-4),
    ),
    cases=_CASES,
    timing={
        "cpu": _case(1, 128, 128, (2, 2), 64),
        "cuda": _case(2, 2048, 2048, (16, 16), 128, "bfloat16", True),
    },
    make=_make,
    variants={
        "attention": _out,
        "attention_lse": _both,
        "attention_out": _into,
        "attention_lse_out": _both_into,
    },
)

CONTRACTS = (ATTENTION,)
