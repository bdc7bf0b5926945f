# SPDX-License-Identifier: Apache-2.0
"""Report texts for exceptions, wrong values and missing packages."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

# The packages that kernels import, by module, and how to install them.
_PACKAGES = {
    "triton": ("Triton", "pip install triton; CUDA builds of PyTorch bring it along"),
    "cutlass": ("the CuTe DSL", "pip install 'tiercel[jit]'"),
}
_FRAMES = 3
_VALUES = 4
_OURS = str(Path(__file__).parents[2])


def line_of(error: BaseException) -> str:
    """One line: the type where it tells something, and the message's first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def missing_package(error: BaseException) -> str | None:
    """How to install a package of the backend that the error says is missing."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _PACKAGES:
        return None
    name, mend = _PACKAGES[error.name]
    return f"it needs {name}, which is not installed: {mend}"


def error_report(error: BaseException, source: dict[str, str]) -> dict[str, str]:
    """`frames`: the traceback's last frames and the whole message; `traceback`: all of it."""
    frames = traceback.extract_tb(error.__traceback__)
    path = source.get("path")
    # Those of the kernel's file and below, without the operator's own that called it.
    own = [
        number
        for number, frame in enumerate(frames)
        if (frame.filename == path if path else not frame.filename.startswith(_OURS))
    ]
    shown = list(frames[own[0] :] if own else frames)[-_FRAMES:]
    if own and frames[own[-1]] not in shown:  # deep in a compiler: the kernel's line leads to it
        shown.insert(0, frames[own[-1]])
    text = "".join(traceback.format_list(shown)) if own or not path else ""
    return {
        "frames": text + "".join(traceback.format_exception_only(error)),
        "traceback": "".join(traceback.format_exception(error)),
    }


def some_values(name: str, due: Any, got: Any, close: Any) -> list[str]:
    """A few of the wrong elements: their places, what was expected and what came."""
    text = []
    for place in (~close).nonzero()[:_VALUES].tolist():
        at = ", ".join(map(str, place))
        expected, came = (_shown(values[tuple(place)]) for values in (due, got))
        text.append(f"{name}[{at}]: expected {expected}, got {came}")
    return text


def _shown(value: Any) -> str:
    import torch

    if value.dtype == torch.float4_e2m1fn_x2:  # two codes in a byte
        return f"0x{int(value.reshape(1).view(torch.uint8)):02x}"
    if not value.is_floating_point():
        return str(value.item())
    return f"{float(value):.6g}"
