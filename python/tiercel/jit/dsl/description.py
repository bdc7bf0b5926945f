# SPDX-License-Identifier: Apache-2.0
"""How a compiled function is launched, as plain data: a declaration without the DSL."""

from __future__ import annotations

import json
from typing import Any

_MAGIC = b"tiercel-cute 1\n"


def describe(function: Any, image: bytes) -> dict[str, Any]:
    """A declaration.Function as JSON would have it.

    Raises:
        ValueError: It launches several kernels, or the cubin does not have what it declares.
    """
    try:
        from tiercel.jit.dsl import cubin
    except ImportError:  # in the worker, beside this file
        import cubin  # type: ignore[import-not-found,no-redef]
    if len(function.launches) != 1:
        raise ValueError(f"{function.name}: one launch is expected, got {len(function.launches)}")
    (launch,) = function.launches
    fits = [k for k in cubin.kernels(image) if len(k.parameters) == len(launch.parameters)]
    if len(fits) != 1:
        raise ValueError(
            f"{function.name}: no kernel in the cubin has the {len(launch.parameters)} parameters "
            "that are declared"
        )
    (kernel,) = fits
    parameters = [_parameter(one) for one in launch.parameters]
    for parameter, (_, size) in zip(parameters, kernel.parameters, strict=True):
        if size != {"map": 128, "pointer": 8, "scalar": 4, "float": 4}[parameter["kind"]]:
            name = parameter["name"]
            raise ValueError(f"{function.name}: {name} is no {parameter['kind']}: {size} bytes")
    if kernel.threads not in (None, tuple(launch.block)):
        raise ValueError(
            f"{function.name}: the block is {kernel.threads}, {launch.block} is declared"
        )
    return {
        "name": function.name,
        "symbol": kernel.symbol,
        "layout": [list(place) for place in kernel.parameters],
        "parameters": parameters,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "smem": launch.smem,
        "dependent": launch.dependent,
    }


def _parameter(parameter: Any) -> dict[str, Any]:
    if hasattr(parameter, "box"):
        return {
            "kind": "map",
            "name": parameter.tensor,
            "box": list(parameter.box),
            "swizzle": parameter.swizzle,
            "l2_promotion": parameter.l2_promotion,
        }
    if hasattr(parameter, "dtype"):
        return {"kind": "pointer", "name": parameter.name}
    return {"kind": "float" if parameter.floating else "scalar", "name": parameter.name}


def pack(about: dict[str, Any], image: bytes) -> bytes:
    return _MAGIC + json.dumps(about).encode() + b"\n" + image


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    if not data.startswith(_MAGIC):
        raise ValueError("this is no compiled CuTe DSL function")
    about, _, image = data[len(_MAGIC) :].partition(b"\n")
    return json.loads(about), image
