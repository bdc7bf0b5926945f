# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere (logs, files, other machines) on a terminal: shown, never obeyed."""

import re

# Colours, cursor movements and the like; every repetition is bounded.
_SEQUENCE = re.compile(r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]")
# C0 and C1 controls but tab and newline, what reorders text, and what no encoding has.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_colours(text: str) -> str:
    """Text without complete escape sequences of the kind that compilers colour with."""
    return _SEQUENCE.sub("", text) if "\x1b" in text else text


def plain(text: str) -> str:
    """Text with every control character but tab and newline written out, ``\\x1b`` for escape."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda found: _written(found[0]), text)


def line(text: object, most: int = 200) -> str:
    """`plain` text on one line and no longer than `most`."""
    shown = " ".join(plain(str(text)).split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _written(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
