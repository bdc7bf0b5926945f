# SPDX-License-Identifier: Apache-2.0
"""Transitional: see tiercel._op."""

from typing import Any


class Argument(int):
    pass


class Output(int):
    pass


def Choice(*args: Any) -> Any:  # noqa: N802
    return args


def Like(*args: Any, **named: Any) -> Any:  # noqa: N802
    return args


def launcher(launch: Any, takes: Any, *, otherwise: Any, **more: Any) -> Any:
    return otherwise
