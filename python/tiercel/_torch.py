# SPDX-License-Identifier: Apache-2.0
"""Says in one sentence when PyTorch is missing or too old."""

import re

MINIMUM = (2, 9)


def missing_torch() -> "str | None":
    """The problem with the installed PyTorch, or None."""
    need = f"tiercel needs PyTorch {MINIMUM[0]}.{MINIMUM[1]} or newer"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # torch is there but broken: its own message says more
        return f"{need}, and none is installed: pip install 'tiercel[torch]'"
    version = str(getattr(torch, "__version__", "an unknown version"))
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or (int(number[1]), int(number[2])) < MINIMUM:
        return f"{need}, found {version}: pip install --upgrade torch"
    return None
