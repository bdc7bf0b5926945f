# SPDX-License-Identifier: Apache-2.0
"""The environment of a run: checkout, commit, GPU, driver."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

from tiercel.workbench.bench import BenchError

SUITES = Path("python") / "tiercel" / "ops"  # below it, suite.yaml of each family


def checkout(start: Path | None = None) -> Path | None:
    """The checkout that a folder (default: the current one) lies in."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / SUITES).is_dir():
            return folder
    return None


def suites_path(named: Path | None = None) -> Path:
    """The named one, else the checkout's, else the package's."""
    if named is not None:
        return named
    root = checkout()
    return root / SUITES if root else Path(__file__).parents[2] / "ops"


def commit(root: Path | None = None) -> str:
    """TIERCEL_COMMIT, else git's in a checkout, else what pip noted of the wheel's origin."""
    named = os.environ.get("TIERCEL_COMMIT")
    if named:
        return named
    root = root or checkout()
    if root is not None and (root / ".git").exists():
        try:
            head = _git(root, "rev-parse", "HEAD")
            return head + ("-dirty" if _git(root, "status", "--porcelain", "-uno") else "")
        except (OSError, subprocess.CalledProcessError):
            pass
    try:
        origin = importlib.metadata.distribution("tiercel").read_text("direct_url.json")
        return str(json.loads(origin or "{}")["vcs_info"]["commit_id"])
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return "unknown"


def _git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def describe() -> dict[str, Any]:
    """The fields that all records of one run share."""
    import torch

    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": str(torch.__version__),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return output.stdout.strip().splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word[:3].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"


def check_torch() -> None:
    """Raises with a sentence where PyTorch is missing or too old."""
    from tiercel._torch import missing_torch

    problem = missing_torch()
    if problem is not None:
        raise BenchError(problem)


def check_gpu() -> None:
    """Raises with a sentence where nothing can be measured."""
    check_torch()
    import torch

    if not torch.cuda.is_available():
        raise BenchError(f"nothing to measure on: torch {torch.__version__} sees no CUDA GPU")
