# SPDX-License-Identifier: Apache-2.0
"""quack with its search for the best configuration: some 40 compilations for a kind of call."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, quack

PEER = Peer("quack.tuned", quack.find, on_request=True)
