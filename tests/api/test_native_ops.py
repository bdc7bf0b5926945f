# SPDX-License-Identifier: Apache-2.0
"""docs/native-ops.json: which operators C++ calls without Python, and why not the others.

To write it again, with an installed wheel: python tests/api/test_native_ops.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
PAGE = Path(os.environ.get("NATIVE_OPS", Path(__file__).parents[2] / "docs/native-ops.json"))


def found():
    import tiercel.ops  # noqa: F401
    from tiercel.core import native
    from tiercel.core.dispatch import operators

    return {name: native.through_python.get(name, "native") for name in sorted(operators)}


def text():
    return json.dumps(found(), indent=1) + "\n"


def test_the_list_is_right():
    assert json.loads(PAGE.read_text()) == found(), "run python tests/api/test_native_ops.py"


def test_reasons_are_stated():
    reasons = set(found().values())
    assert "native" in reasons and all(reason and "\n" not in reason for reason in reasons)


def test_versions():
    """Only releases that were tested: a wrong guess crashes."""
    from tiercel.core import native

    for major, minor in native.TESTED:
        for build in ("", "+cpu", "+cu130"):
            assert native.is_tested(f"{major}.{minor}.1{build}")
        for build in ("a0+git1", "a0+nv26.1", ".dev20260101", "+rocm7"):
            assert not native.is_tested(f"{major}.{minor}.0{build}")
    for other in ("2.9.1", "2.99.0", "3.11.0", "2.11"):
        assert not native.is_tested(other)


def test_the_switch():
    import torch

    from tiercel import _C
    from tiercel.core import native

    assert _C.has_native_ops() == native.is_tested(torch.__version__)
    code = """
import tiercel.ops, torch
from tiercel import _C
assert torch.equal(torch.ops.tiercel.silu(torch.zeros(2, 8)), torch.zeros(2, 8))
print(_C.has_native_ops())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"TIERCEL_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False"], done.stderr


def test_wrong_descriptions_are_refused():
    """They never get to torch."""
    import tiercel.ops  # noqa: F401
    from tiercel import _C
    from tiercel.core.dispatch import operators

    op = operators["rms_norm"]
    below, autograd = op.eager_calls[2], op.eager_calls[1]
    good = [("Tensor", False, 0), ("Tensor", True, 1), ("Tensor", True, 2), ("float", False, 3)]
    backend = ("str", True, 4)
    for wrong in ([*good], [*good[:3], backend], [*good[:3], ("Device", False, 3), backend]):
        with pytest.raises(ValueError, match="register_native"):
            _C.register_native("tiercel", "rms_norm", below, autograd, tuple(wrong))
    with pytest.raises(TypeError, match="must be an EagerCall"):
        _C.register_native("tiercel", "rms_norm", print, autograd, (*good, backend))
    wrong = (good[0], good[1], ("int", True, 2), good[3], backend)
    why = _C.register_native("tiercel", "rms_norm", below, autograd, wrong)
    assert why == "an int is read in Python"


if __name__ == "__main__":
    PAGE.write_text(text())
