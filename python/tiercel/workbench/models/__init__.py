# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench model``: whole Hugging Face models with random weights, with and without us.

`configs/` has the sizes of published models. Each way of running a model is measured in the same
process, one after the other.
"""

from __future__ import annotations

from typing import Any

PHASES = ("prefill", "decode", "train")

# The order is that in which they are shown.
WAYS = ("transformers", "transformers.compiled", "tiercel", "tiercel.compiled", "engine", "liger")


def label(record: dict[str, Any]) -> str:
    """The name of a record's way, marked if the newest run of its case lacked it."""
    return f"{record['way']} ‡" if record.get("older") else str(record["way"])
