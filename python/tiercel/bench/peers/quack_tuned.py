# SPDX-License-Identifier: Apache-2.0
"""quack with its search for the best configuration: some 40 compilations for a kind of call."""

from __future__ import annotations

from typing import Any

from tiercel.bench.launch import Launch
from tiercel.bench.peers import Peer, quack


def _linear_act(case: Any, inputs: dict[str, Any]) -> Launch:
    return quack.linear_act(case, inputs, tuned=True)


PEER = Peer("quack.tuned", quack.find, {"linear_act": _linear_act}, on_request=True)
