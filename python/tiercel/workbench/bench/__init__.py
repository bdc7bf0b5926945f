# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench``: times operators and their peers side by side.

A family's ``suite.yaml`` lists the cases, its ``cases.py`` has the inputs, byte counts, references
and tolerances of the operators, its ``peers.py`` the other implementations.
"""


class BenchError(Exception):
    """Something that the user can put right; its text is the whole message."""
