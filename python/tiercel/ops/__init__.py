# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``.

A family is a folder. Its files that need no operator, such as its contract, are imported without
PyTorch: then this package registers the operators when one of its names is first used.
"""

from tiercel import _families


def _fill() -> None:
    from tiercel.ops import _register

    globals().update(_register.NAMES, __all__=sorted(_register.PUBLIC))


def __getattr__(name: str) -> object:
    if "__all__" not in globals() and (name == "__all__" or not name.startswith("_")):
        _fill()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not _families.only_plain_is_wanted():
    _fill()
