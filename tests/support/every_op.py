# SPDX-License-Identifier: Apache-2.0
"""Calls of every public operator, made of the contracts' own cases: a new operator has some too."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator

import torch

import tiercel
from tiercel.core.dispatch import registry
from tiercel.core.dispatch import variants as families
from tiercel.plugins.contracts import CONTRACTS
from tiercel.workbench.smoke.measure import why_not

SEED = 1


@dataclasses.dataclass
class Call:
    """`forward` returns the outputs; `inputs` are those that a gradient is asked of."""

    title: str
    forward: Callable[[], tuple[torch.Tensor, ...]]
    inputs: list[torch.Tensor]

    def backward(self) -> Callable[[], object] | None:
        """The backward of a forward that has just run, or None where no output has one."""
        outputs = [out for out in self.forward() if out.requires_grad]
        if not outputs:
            return None
        grads = [torch.ones_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, self.inputs, grads, allow_unused=True)


def public_ops() -> list[str]:
    """The functions that tiercel exports of tiercel.ops."""
    found = {name: getattr(tiercel, name) for name in tiercel.__all__}
    return [
        name
        for name, value in found.items()
        if inspect.isfunction(value) and value.__module__.startswith("tiercel.ops.")
    ]


def has_gradient(name: str) -> bool:
    return name in OTHERS or any(op._function is not None for op in families[name])


def _wants_gradient(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
    )


def _call(title: str, function: Callable, arguments: dict, mutated: tuple[str, ...]) -> Call:
    inputs = []
    for name, value in arguments.items():
        if _wants_gradient(value) and name not in mutated:
            arguments[name] = value.detach().requires_grad_()
            inputs.append(arguments[name])

    def forward() -> tuple[torch.Tensor, ...]:
        result = function(**arguments)
        return result if isinstance(result, tuple) else (result,)

    return Call(title, forward, inputs)


def _of_contract(name: str, device: str, backend: str) -> Iterator[Call]:
    contract = CONTRACTS[name]
    gradient = has_gradient(name)
    for case in contract.cases:
        if backend != "ref" and why_not(contract, backend, case, device):
            continue
        arguments = contract.make(case, device, SEED) | {"backend": backend}
        fixed = contract.mutates + contract.written if gradient else tuple(arguments)
        yield _call(f"{name} {case}", registry[name].public, arguments, fixed)


def _reduce_sum(device: str, backend: str) -> Iterator[Call]:
    for shape, dim in (((33, 1000), 1), ((1000, 64), 0)):
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        arguments = {"x": x, "dim": dim, "backend": backend}
        yield _call(f"reduce_sum {shape}", tiercel.reduce_sum, arguments, ())


def _fused_mlp(device: str, backend: str) -> Iterator[Call]:
    for gated in (True, False):
        x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
        up = torch.randn(1024 if gated else 512, 256, device=device, dtype=torch.bfloat16) / 16
        down = torch.randn(256, 512, device=device, dtype=torch.bfloat16) / 16
        arguments = {"x": x, "up_weight": up, "down_weight": down, "gated": gated}
        arguments["backend"] = backend
        yield _call(f"fused_mlp gated={gated}", tiercel.fused_mlp, arguments, ())


# Those that are made of others and so have no contract.
OTHERS = {"reduce_sum": _reduce_sum, "fused_mlp": _fused_mlp}


def calls(name: str, device: str, backend: str) -> Iterator[Call]:
    """One call for each case that the backend takes.

    Raises:
        KeyError: A public operator has neither a contract nor calls here.
    """
    if name in OTHERS:
        return OTHERS[name](device, backend)
    return _of_contract(name, device, backend)
