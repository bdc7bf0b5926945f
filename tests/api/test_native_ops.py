# SPDX-License-Identifier: Apache-2.0
"""docs/native-ops.json: which operators C++ calls without Python, and why not the others.

To write it again, with an installed wheel: python tests/api/test_native_ops.py
"""

import json
import os
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


def test_torch_has_the_interface():
    import torch

    from tiercel import _C

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert _C.has_native_ops() == (version >= (2, 10))


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
