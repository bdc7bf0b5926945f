# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the losses, and the contracts of their plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.loss.spec import CROSS_ENTROPY, LINEAR
from tiercel.plugins.contract import Case, Contract

_OPTIONS = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


def _case(rows: int, classes: int, dtype: str, values: str = "random", **options: Any) -> Case:
    return Case({"T": rows, "V": classes}, dtype, _OPTIONS | options, values)


_CASES = (
    _case(4, 16, "float32"),
    _case(33, 128, "bfloat16", "weighted"),
    _case(7, 1000, "float16", label_smoothing=0.1),
    _case(5, 4097, "float32", "weighted", label_smoothing=0.1, z_loss=1e-3),
    _case(40, 264, "bfloat16", "scaled", softcap=30.0),
    _case(3, 20000, "float16", z_loss=1e-4),
    _case(2, 128256, "bfloat16", "ignored"),
    _case(129, 1, "float32"),
    _case(0, 64, "bfloat16"),
    _case(40, 264, "bfloat16", "strided"),
    _case(6, 40, "float32", "special", ignore_index=3),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, classes = case.sizes["T"], case.sizes["V"]
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    weight = scale = None
    if case.values == "weighted":
        weight = (torch.rand(classes, generator=generator) + 0.5).to(device)
    elif case.values == "scaled":
        scale = torch.rand(rows, generator=generator).to(device)
    elif case.values == "ignored":
        target[0] = case.options["ignore_index"]
    elif case.values == "special":
        for row, (first, value) in enumerate([(1, torch.nan), (1, torch.inf), (0, -torch.inf)]):
            logits[row : row + 1, first:] = value
        target[3:4] = case.options["ignore_index"]
    logits = logits.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        logits = torch.cat([logits, -logits], dim=1)[:, :classes]
    given = {"logits": logits, "target": target.to(device), "weight": weight, "scale": scale}
    # A backend gives the losses of the rows.
    return given | dict(case.options) | {"reduction": "none"}


_LINEAR_NAMES = [name for name in LINEAR.names if name != "accum_dtype"]  # of gradients alone


def _linear(
    rows: int, hidden: int, classes: int, dtype: str, values: str = "", **options: Any
) -> Case:
    sizes = {"T": rows, "H": hidden, "V": classes}
    return Case(sizes, dtype, _OPTIONS | options, values or "random")


_LINEAR_CASES = (
    _linear(4, 8, 16, "float32"),
    _linear(33, 64, 128, "bfloat16", "bias"),
    _linear(7, 40, 1000, "float16", label_smoothing=0.1),
    _linear(5, 16, 4097, "float32", "weighted", label_smoothing=0.1, z_loss=1e-3),
    _linear(40, 48, 264, "bfloat16", "scaled", softcap=30.0),
    _linear(300, 64, 2048, "bfloat16", "ignored"),
    _linear(0, 16, 64, "bfloat16"),
    _linear(40, 64, 264, "float16", "strided"),
)


def _make_linear(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, hidden, classes = (case.sizes[name] for name in "THV")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    weight = torch.randn(classes, hidden, generator=generator) / hidden**0.5
    given: dict[str, Any] = dict.fromkeys(("bias", "class_weight", "scale"))
    target = torch.randint(classes, (rows,), generator=generator)
    if case.values == "bias":
        given["bias"] = torch.randn(classes, generator=generator)
    elif case.values == "weighted":
        given["class_weight"] = torch.rand(classes, generator=generator) + 0.5
    elif case.values == "scaled":
        given["scale"] = torch.rand(rows, generator=generator)
    elif case.values == "ignored":
        target[::2] = case.options["ignore_index"]
    dtype = getattr(torch, case.dtype)
    if case.values == "strided":
        weight = weight.t().contiguous().t()
        x = torch.cat([x, -x], dim=1).to(dtype)[:, :hidden]
    given |= {"x": x.to(dtype), "weight": weight.to(dtype), "target": target}
    if given["bias"] is not None:
        given["bias"] = given["bias"].to(dtype)
    given = {name: None if t is None else t.to(device) for name, t in given.items()}
    given |= case.options
    return {name: given[name] for name in _LINEAR_NAMES} | {"reduction": "none"}


CONTRACTS = (
    Contract.of(
        "loss",
        CROSS_ENTROPY,
        cases=_CASES,
        timing={"cpu": _case(64, 4096, "bfloat16"), "cuda": _case(4096, 128256, "bfloat16")},
        make=_make,
        reference="losses",
    ),
    Contract.of(
        "loss",
        LINEAR,
        order=_LINEAR_NAMES,
        cases=_LINEAR_CASES,
        timing={
            "cpu": _linear(64, 64, 4096, "bfloat16"),
            "cuda": _linear(4096, 2048, 128256, "bfloat16"),
        },
        make=_make_linear,
        reference="linear_losses",
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Logits": "cross_entropy.logits",
    "ClassWeights": "cross_entropy.weight",
    "Losses": "cross_entropy.loss",
    "LossRows": "linear_cross_entropy.x",
    "VocabularyWeight": "linear_cross_entropy.weight",
}
