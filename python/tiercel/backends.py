# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator runs on.

Every operator has the backends ``sm90`` (the precompiled kernels) and ``ref`` (plain PyTorch, any
device). By default it runs on sm90 where that applies and otherwise on ref, with one warning per
reason; with TIERCEL_STRICT=1 that is an error instead.

The selection is looked up inside the operator on every call, so it also applies to graphs that
torch.compile compiled before. In order of priority: the call's ``backend=``,
``with use_backend(op=..., name=...)``, ``set_backend(op=..., name=...)``, the environment's
TIERCEL_BACKEND (``ref``, or ``topk_softmax=ref,...``; read when the operators are first used). A
selected backend that does not apply raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tiercel.core import selection
from tiercel.core.selection import FallbackWarning
from tiercel.plugins.loading import load_entry_points, load_folder, load_path
from tiercel.plugins.registration import register, unregister

__all__ = [
    "FallbackWarning",
    "load_entry_points",
    "load_folder",
    "load_path",
    "register",
    "set_backend",
    "unregister",
    "use_backend",
]


def set_backend(op: str | None = None, name: str | None = None) -> None:
    """Sets the backend of one operator for the whole process.

    Call it by keyword, like `use_backend`, whose positional order is different.

    Args:
        op: The operator's name, such as ``"topk_softmax"``; None for every operator.
        name: The backend's name, or None to go back to the default.

    Raises:
        ValueError: No such operator or backend.

    Example:
        >>> tiercel.set_backend(op="topk_softmax", name="ref")
    """
    _check_names(op, name)
    selection.choose_for_process(op, name)


@contextlib.contextmanager
def use_backend(name: str, op: str | None = None) -> Iterator[None]:
    """Runs operators on a backend inside a ``with`` block, in this thread or task only.

    Args:
        name: The backend's name.
        op: One operator's name; by default every operator.

    Raises:
        ValueError: No such operator or backend.

    Example:
        >>> with tiercel.use_backend(op="topk_softmax", name="ref"):
        ...     tiercel.topk_softmax(scores, 8)
    """
    _check_names(op, name)
    with selection.choose_for_block(op, name):
        yield


def _check_names(op: str | None, name: str | None) -> None:
    from tiercel import _needs_torch as _needs_torch
    from tiercel.core.dispatch import registry
    from tiercel.ops import _register as _register  # fills the registry

    if op is not None and op not in registry:
        swapped = f" (did you mean op={name!r}, name={op!r}?)" if name in registry else ""
        known_ops = ", ".join(sorted(registry))
        raise ValueError(f"tiercel has no operator {op!r}{swapped}; it has {known_ops}")
    known = {b for o in registry.values() if op in (None, o.name) for b in o.backends} | {"auto"}
    if name is not None and name not in known:
        raise ValueError(
            f"no operator has a backend {name!r}" if op is None else f"{op} has no backend {name!r}"
        )
