# SPDX-License-Identifier: Apache-2.0
"""How a family declares its CuTe DSL kernels: what compile.py builds and checks.

A family's main file defines `functions()`, a list of Function. Sizes that depend on the problem are
expressions in the names of the function's scalars, such as "(m + 127) // 128".
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

Expression = int | str

# In the order of the driver's numbers.
SWIZZLES = ("none", "32B", "64B", "128B")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A host argument that is an address, and any kernel parameter of the same name."""

    name: str
    dtype: type  # a Numeric type of the DSL
    align: int = 16


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A 32-bit host argument, and the kernel parameter of the same name."""

    name: str
    floating: bool = False  # Float32, otherwise Int32; expressions may name integers only


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter that describes a tensor to TMA."""

    tensor: str  # the Pointer that it starts at
    shape: tuple[Expression, ...]  # row-major, as in torch
    box: tuple[int, ...]  # in the same order
    swizzle: str = "128B"  # of SWIZZLES
    l2_promotion: str = "128B"  # of L2_PROMOTIONS


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel that a function launches."""

    parameters: tuple[Pointer | Scalar | TensorMap, ...]  # in the kernel's order
    grid: tuple[Expression, Expression, Expression]
    block: tuple[int, int, int]
    smem: int  # dynamic shared memory, bytes
    cluster: tuple[Expression, Expression, Expression] = (1, 1, 1)
    dependent: bool = False  # programmatic dependent launch: the kernel waits for its predecessor


@dataclasses.dataclass(frozen=True)
class Function:
    """One host function of the DSL, compiled to one cubin."""

    name: str  # what explain and error messages call it
    function: object  # what cute.compile takes
    arguments: tuple[object, ...]  # of the host function before the stream: see `leaves`
    launches: tuple[Launch, ...]
    attributes: tuple[str, ...]  # C++ initialisers of the family's variant struct
    problems: tuple[dict[str, int], ...]  # scalar values at which the build runs the host code

    @property
    def leaves(self) -> list[Pointer | Scalar]:
        """The Pointers and Scalars of the arguments: some are in tuples, None is no argument."""
        return list(_leaves(self.arguments))


def _leaves(arguments: tuple[object, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _leaves(argument)
        elif argument is not None:
            yield argument


def evaluate(expression: Expression, scalars: dict[str, int]) -> int:
    """The value of an expression for a problem."""
    if isinstance(expression, int):
        return expression
    return int(eval(expression, {"__builtins__": {}, "min": min, "max": max}, dict(scalars)))
