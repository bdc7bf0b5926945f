# SPDX-License-Identifier: Apache-2.0
"""Tiercel's layers for Hugging Face's `kernels` package, as a repository in a local folder."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["write"]

_BACKENDS = ("cpu", "cuda")
_MODULE = '''\
# SPDX-License-Identifier: Apache-2.0
"""The layers of the installed tiercel."""

from tiercel.integrations.kernels import layers

__all__ = ["layers"]
'''


def write(folder: str | Path) -> Path:
    """Writes a repository of kernels that uses the installed Tiercel.

    ``kernels.get_local_kernel(folder)`` loads it; its ``layers`` are `RMSNorm`,
    `RMSNormZeroCentered`, `SwiGLUMLP` and `GeGLUMLP`. It has a variant for CUDA and one for the
    CPU, which fit every PyTorch.

    Args:
        folder: Is made if it does not exist; files of an older repository are replaced.

    Returns:
        The folder.

    Example:
        >>> folder = tiercel.integrations.kernels.write("tiercel-kernels")
        >>> norm = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    """
    folder = Path(folder)
    for backend in _BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        metadata = {
            "name": "tiercel",
            "id": f"_tiercel_{backend}",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
        (variant / "__init__.py").write_text(_MODULE, "utf-8")
    return folder
