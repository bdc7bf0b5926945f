# SPDX-License-Identifier: Apache-2.0
"""The installation, as data: versions, driver, GPUs, and whether a kernel runs."""

import platform
import sys
from typing import Any


def examine() -> dict[str, Any]:
    """Every fact on its own: one that cannot be had does not hide the others."""
    from tiercel._version import __version__

    report: dict[str, Any] = {
        "tiercel": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "machine": f"{sys.platform} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "wheel_tag": f"cp{sys.version_info[0]}{sys.version_info[1]}",
    }
    report |= _torch()
    report |= _driver()
    report["gpus"] = _gpus(report)
    problems = [p for p in (report["torch_problem"], report["driver_problem"]) if p]
    if not problems:
        problems = [_try_a_kernel(report)]
    report["sm90_kernels_run"] = not any(problems)
    report["why_not"] = "; ".join(filter(None, problems)) or None
    return report


def _torch() -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": None, "torch_cuda": None, "torch_hip": None}
    facts["torch_problem"], facts["torch_sees_gpu"] = None, False
    try:
        from tiercel._torch import missing_torch

        facts["torch_problem"] = missing_torch()
        import torch

        facts["torch"] = torch.__version__
        facts["torch_cuda"] = torch.version.cuda
        facts["torch_hip"] = getattr(torch.version, "hip", None)
        facts["torch_sees_gpu"] = bool(torch.cuda.is_available())
    except Exception as error:
        facts["torch_problem"] = facts["torch_problem"] or f"PyTorch does not import: {error}"
    return facts


def _driver() -> dict[str, Any]:
    try:
        from tiercel import _C

        info = _C.driver_info()
    except Exception as error:
        return {"driver_cuda": None, "driver_problem": f"tiercel._C does not import: {error}"}
    version = info["version"]
    return {
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}" if version else None,
        "driver_problem": None if info["ok"] else info["message"],
    }


def _gpus(report: dict[str, Any]) -> list[dict[str, Any]]:
    """By the driver where it is open, with torch's names where torch sees them."""
    gpus: list[dict[str, Any]] = []
    if report["driver_problem"] is not None:
        return gpus
    from tiercel import _C

    for index in range(64):
        try:
            major, minor = _C.device_capability(index)
        except RuntimeError:
            break
        gpus.append({"index": index, "capability": f"{major}.{minor}", "name": _gpu_name(index)})
    return gpus


def _gpu_name(index: int) -> "str | None":
    try:
        import torch

        return torch.cuda.get_device_name(index)
    except Exception:  # no torch, a CPU build of it, or one that does not like this driver
        return None


def _try_a_kernel(report: dict[str, Any]) -> "str | None":
    """Runs one small kernel on the first GPU that has kernels; None when its answer is right."""
    import torch

    import tiercel

    if not report["torch_sees_gpu"]:
        return "this PyTorch sees no CUDA device (a CPU build of it, or CUDA_VISIBLE_DEVICES)"
    fitting = [gpu["index"] for gpu in report["gpus"] if gpu["capability"] == "9.0"]
    if not fitting:
        return (
            "no GPU here has compute capability 9.0 (H100, H200), which the kernels are built for"
        )
    try:
        scores = torch.randn(64, 32, device=f"cuda:{fitting[0]}")
        ours = tiercel.topk_softmax(scores, 4, backend="sm90")
        theirs = tiercel.topk_softmax(scores, 4, backend="ref")
        if not torch.allclose(ours[0], theirs[0]) or not torch.equal(ours[1], theirs[1]):
            return "a test kernel ran and gave a wrong answer: please report this"
    except Exception as error:
        return f"a test kernel failed: {error}"
    return None
