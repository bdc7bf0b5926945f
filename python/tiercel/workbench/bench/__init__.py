# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench``: times operators and their peers side by side.

What is measured is data: cases in a family's ``suite.yaml``, an operator's inputs, byte count,
reference and tolerance in its ``cases.py``, other implementations in its ``peers.py``.
"""


class BenchError(Exception):
    """Something that the user can put right; its text is the whole message."""
