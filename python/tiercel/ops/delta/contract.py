# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the gated delta rule, and the contracts of its plug-ins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Tensor
from tiercel.ops.delta.spec import GATED_DELTA_RULE, GATED_DELTA_RULE_DECODE, GATED_RMS_NORM
from tiercel.plugins.contract import Case, Contract


def _case(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: str = "bfloat16",
    values: str = "random",
    **more: Any,
) -> Case:
    named = {"B": batch, "T": tokens, "Hk": heads[0], "Hv": heads[1], "K": sizes[0], "V": sizes[1]}
    return Case(named, dtype, {"qk_l2norm": True} | more, values)


def inputs(case: Case, device: str, seed: int) -> dict[str, Any]:
    """q, k, v, g and beta as a model has them: values about 1, and unit keys where the kernel does
    not divide them by their lengths."""
    import torch

    batch, tokens, key_heads, heads, key_size, value_size = (
        case.sizes[name] for name in ("B", "T", "Hk", "Hv", "K", "V")
    )
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    q, k = (random(batch, tokens, key_heads, key_size) for _ in range(2))
    if not case.options["qk_l2norm"]:
        k = torch.nn.functional.normalize(k, dim=-1)
    v = random(batch, tokens, heads, value_size)
    shape = (batch, tokens, heads, key_size) if case.values == "channels" else v.shape[:3]
    g = torch.nn.functional.logsigmoid(random(*shape) + 2.0)
    beta = random(batch, tokens, heads).sigmoid()
    if case.values == "strided":
        q, k = (torch.cat([t, t], dim=2).to(dtype)[:, :, :key_heads] for t in (q, k))
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": beta}
    return {name: tensor.to(device) for name, tensor in given.items()}


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    given = inputs(case, device, seed)
    count, starts, initial = case.sizes["B"], None, None
    if case.values == "packed":
        tokens = case.sizes["T"]
        starts = torch.tensor([0, tokens // 3, tokens // 3, tokens], dtype=torch.int32).to(device)
        count = 3
    if case.values in ("packed", "state"):
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (count, *(case.sizes[name] for name in ("Hv", "K", "V")))
        initial = torch.randn(shape, generator=generator).to(device)
    given |= {"initial_state": initial, "cu_seqlens": starts, "scale": None}
    return given | {"qk_l2norm": case.options["qk_l2norm"]}


RULE = Contract.of(
    "delta",
    GATED_DELTA_RULE,
    cases=(
        _case(1, 1, (1, 1), (64, 16)),
        _case(2, 65, (1, 2), (64, 32)),
        _case(1, 130, (2, 2), (128, 64), qk_l2norm=False),
        _case(1, 200, (1, 2), (128, 32), "bfloat16", "packed"),
        _case(2, 70, (1, 1), (128, 32), "bfloat16", "state"),
        _case(1, 40, (2, 4), (64, 32), "bfloat16", "strided"),
        _case(1, 20, (1, 2), (64, 32), "float16"),
        _case(1, 90, (1, 2), (64, 32), "bfloat16", "channels"),
        _case(0, 8, (1, 2), (64, 32)),
    ),
    timing={
        "cpu": _case(1, 64, (1, 2), (64, 64)),
        "cuda": _case(1, 8192, (16, 32), (128, 128)),
    },
    make=_make,
)


def _make_decode(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    given = inputs(case, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    batch, tokens = case.sizes["B"], case.sizes["T"]
    columns = tokens if case.values == "slots" else 1
    slots = 2 * batch * columns + 1
    shape = (slots, *(case.sizes[name] for name in ("Hv", "K", "V")))
    states = torch.randn(shape, generator=generator)
    states = states.to(device, getattr(torch, case.options.get("states", "float32")))
    indices = torch.randperm(slots, generator=generator)[: batch * columns].view(batch, columns)
    indices[1::3] = -1
    accepted = torch.randint(1, tokens + 1, (batch,), generator=generator).to(torch.int32)
    return given | {
        "states": states,
        "out": torch.zeros_like(given["v"]),
        "state_indices": (indices if columns > 1 else indices[:, 0]).to(torch.int32).to(device),
        "accepted": accepted.to(device) if columns > 1 else None,
        "scale": None,
        "qk_l2norm": case.options["qk_l2norm"],
    }


# A backend returns new states and results, which the operator copies into those that it writes to.
# States may be bfloat16, and results are rounded to 16 bits, 2**-9.
_NEW = [
    replace(each, name=f"new_{each.name}", dtypes=each.name, written=False, rtol=1e-2, atol=1e-3)
    for each in GATED_DELTA_RULE_DECODE.tensors
    if each.written
]

DECODE = Contract.of(
    "delta",
    GATED_DELTA_RULE_DECODE.changed(
        results=_NEW,
        arguments=tuple(
            replace(each, written=False) if isinstance(each, Tensor) else each
            for each in GATED_DELTA_RULE_DECODE.arguments
        ),
    ),
    cases=(
        _case(1, 1, (1, 1), (64, 32)),
        _case(5, 1, (2, 4), (128, 64)),
        _case(3, 1, (1, 2), (64, 32), "float16", "channels", qk_l2norm=False),
        _case(4, 3, (1, 2), (64, 32), "bfloat16", "slots", states="bfloat16"),
        _case(2, 4, (2, 2), (128, 32), "bfloat16", "strided"),
        _case(0, 1, (1, 2), (64, 32)),
    ),
    timing={
        "cpu": _case(4, 1, (1, 2), (64, 64)),
        "cuda": _case(64, 1, (16, 32), (128, 128)),
    },
    make=_make_decode,
    mutates=("states", "out"),
)


def _make_norm(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, size = case.sizes["M"], case.sizes["N"]
    dtype = getattr(torch, case.dtype)
    x, gate = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    if case.values == "strided":
        x, gate = torch.cat([x, gate], dim=1).split(size, dim=1)
    weight = torch.randn(size, generator=generator).to(getattr(torch, case.options["weight"]))
    tensors = {"x": x, "gate": gate, "weight": weight}
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"eps": 1e-6}


def _case_norm(
    rows: int, size: int, dtype: str = "bfloat16", values: str = "random", weight: str = "float32"
) -> Case:
    return Case({"M": rows, "N": size}, dtype, {"weight": weight}, values)


NORM = Contract.of(
    "delta",
    GATED_RMS_NORM,
    cases=(
        _case_norm(5, 128),
        _case_norm(3, 64, weight="bfloat16"),
        _case_norm(7, 256, "float16"),
        _case_norm(2, 520),
        _case_norm(4, 128, values="strided"),
        _case_norm(3, 20),
        _case_norm(0, 128),
    ),
    timing={"cpu": _case_norm(64, 128), "cuda": _case_norm(262144, 128)},
    make=_make_norm,
)

CONTRACTS = (RULE, DECODE, NORM)
