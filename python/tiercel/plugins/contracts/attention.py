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


def _varlen_case(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: tuple[int, int],
    d: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    strided: bool = False,
) -> Case:
    sizes = {"Tq": sum(queries), "Tk": sum(keys), "H": heads[0], "Hk": heads[1], "D": d}
    lengths = f"{' '.join(map(str, queries))} of {' '.join(map(str, keys))}"
    lengths += " strided" if strided else ""
    options = {"causal": causal, **_REST}
    return Case(sizes | {"B1": len(queries) + 1}, dtype, options, lengths)


_VARLEN_CASES = (
    _varlen_case((130, 5, 64), (130, 5, 64), (2, 2), 128),
    _varlen_case((100, 0, 300), (100, 7, 257), (4, 2), 64, "float16", True),
    _varlen_case((20,), (33,), (2, 1), 64),
    _varlen_case((0, 0), (5, 3), (2, 2), 64),
    _varlen_case((70, 200), (70, 200), (2, 2), 64, "bfloat16", True, True),
)


def _make_varlen(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(length: str, heads: str) -> Any:
        shape = [case.sizes[name] for name in (length, heads, "D")]
        drawn = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        return torch.cat([drawn, -drawn], dim=1)[:, : shape[1]] if strided else drawn

    strided = case.values.endswith(" strided")
    made = {"q": random("Tq", "H"), "k": random("Tk", "Hk"), "v": random("Tk", "Hk")}
    spoken = case.values.removesuffix(" strided")
    lengths = [[int(n) for n in part.split()] for part in spoken.split(" of ")]
    for name, of_one in zip("qk", lengths, strict=True):
        starts = torch.tensor([0, *of_one]).cumsum(0)
        made[f"cu_seqlens_{name}"] = starts.to(device=device, dtype=torch.int32)
    longest = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
    return {**made, **longest, **case.options}


ATTENTION_VARLEN = Contract(
    family="attention",
    op="attention_varlen",
    arguments=(
        TensorSpec("q", ("Tq", "H", "D"), ("bfloat16", "float16"), strided=True),
        TensorSpec("k", ("Tk", "Hk", "D"), ("q",), strided=True),
        TensorSpec("v", ("Tk", "Hk", "D"), ("q",), strided=True),
        TensorSpec("cu_seqlens_q", ("B1",), ("int32",)),
        TensorSpec("cu_seqlens_k", ("B1",), ("int32",)),
        ScalarSpec("max_seqlen_q", "int"),
        ScalarSpec("max_seqlen_k", "int"),
        *ATTENTION.arguments[3:],
    ),
    outputs=(
        TensorSpec("out", ("Tq", "H", "D"), ("q",), rtol=1e-2, atol=1e-2),
        TensorSpec("lse", ("H", "Tq"), ("float32",), rtol=1e-4, atol=1e-4),
    ),
    cases=_VARLEN_CASES,
    timing={
        "cpu": _varlen_case((64, 30), (64, 30), (2, 2), 64),
        "cuda": _varlen_case((2048, 1000, 500), (2048, 1000, 500), (16, 16), 128, causal=True),
    },
    make=_make_varlen,
    variants={"attention_varlen": _out, "attention_varlen_lse": _both},
)

CONTRACTS = (ATTENTION, ATTENTION_VARLEN)
