# SPDX-License-Identifier: Apache-2.0
"""The one kind of failure that a user sees: a line that says what to do, never a traceback."""


class SetupError(Exception):
    """Raised with one complete sentence; `main` prints it and exits with status 2."""


def one_line(text: str) -> str:
    """Folds whatever a tool printed into a single line."""
    return " ".join(text.split())
