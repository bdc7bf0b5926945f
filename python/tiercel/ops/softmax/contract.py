# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


def _case(rows: int, columns: int, dtype: str, values: str = "no mask", scale: Any = None) -> Case:
    # A backend gets two dimensions and softmax goes along the last.
    return Case({"M": rows, "N": columns, "dim": -1}, dtype, {"scale": scale}, values)


_CASES = (
    _case(1, 16, "float32"),
    _case(33, 128, "bfloat16"),
    _case(7, 1000, "float16", scale=0.125),
    _case(5, 4097, "float32", "keep"),
    _case(40, 264, "bfloat16", "add", scale=0.125),
    _case(3, 20000, "float16", "keep"),
    _case(2, 70000, "bfloat16"),
    _case(129, 1, "float32"),
    _case(0, 64, "bfloat16"),
    _case(40, 264, "bfloat16", "strided"),
    _case(40, 32, "float32", "special"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, columns = case.sizes["M"], case.sizes["N"]
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(rows, columns, generator=generator)
    mask = None
    if case.values == "keep":
        mask = (torch.rand(rows, columns, generator=generator) < 0.8).to(device)
    elif case.values == "add":
        mask = torch.randn(rows, columns, generator=generator).to(device)
    elif case.values == "special":  # one in twenty
        special = torch.tensor([torch.nan, torch.inf, -torch.inf])
        chosen = special[torch.randint(len(special), (rows, columns), generator=generator)]
        x = torch.where(torch.rand(rows, columns, generator=generator) < 0.05, chosen, x)
    x = x.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        x = torch.cat([x, -x], dim=1)[:, :columns]
    return {"x": x, "mask": mask, "dim": -1, **case.options}


def _along_last(call: Any, x: Any, mask: Any, dim: int, scale: Any) -> Any:
    """The result for any number of dimensions, along any of them."""
    moved = x.movedim(dim, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    if mask is not None:
        mask = mask.expand(x.shape).movedim(dim, -1).reshape(flat.shape)
    (result,) = call(flat, mask, -1, scale)
    return result.view(moved.shape).movedim(-1, dim).contiguous()


def _backward(log: bool) -> Any:
    """The reference's gradient, whatever the backend, from the result."""

    def run(call: Any, grad: Any, y: Any, *rest: Any) -> Any:
        *keep, dim, scale = rest
        wide_grad, wide_y = grad.float(), y.float()
        if log:
            result = wide_grad - wide_y.exp() * wide_grad.sum(dim, keepdim=True)
        else:
            result = wide_y * (wide_grad - (wide_grad * wide_y).sum(dim, keepdim=True))
        result = result if scale is None else result * scale
        return (result.masked_fill(~keep[0], 0.0) if keep else result).to(y.dtype).contiguous()

    return run


def _contract(op: str, log: bool, rtol: float, atol: float) -> Contract:
    def plain(call: Any, x: Any, dim: int, scale: Any) -> Any:
        return _along_last(call, x, None, dim, scale)

    def into(call: Any, x: Any, mask: Any, out: Any, dim: int, scale: Any) -> None:
        out.copy_(_along_last(call, x, mask, dim, scale))

    def plain_into(call: Any, x: Any, out: Any, dim: int, scale: Any) -> None:
        out.copy_(_along_last(call, x, None, dim, scale))

    return Contract(
        family="softmax",
        op=op,
        arguments=(
            TensorSpec("x", ("M", "N"), ("float32", "bfloat16", "float16"), strided=True),
            TensorSpec("mask", ("M", "N"), ("bool", "float32"), strided=True, optional=True),
            ScalarSpec("dim", "int"),
            ScalarSpec("scale", "float | None"),
        ),
        # One rounding to bfloat16, 2**-9, on either side.
        outputs=(TensorSpec("out", ("M", "N"), ("x",), rtol=rtol, atol=atol),),
        cases=_CASES,
        timing={"cpu": _case(256, 1024, "bfloat16"), "cuda": _case(16384, 4096, "bfloat16")},
        make=_make,
        variants={
            op: _along_last,
            f"{op}_out": into,
            f"{op}_no_mask": plain,
            f"{op}_no_mask_out": plain_into,
            f"{op}_backward": _backward(log),
            f"{op}_no_mask_backward": _backward(log),
        },
    )


SOFTMAX_ONLINE = _contract("softmax_online", False, 8e-3, 1e-7)
LOG_SOFTMAX = _contract("log_softmax", True, 8e-3, 1e-5)

CONTRACTS = (SOFTMAX_ONLINE, LOG_SOFTMAX)
