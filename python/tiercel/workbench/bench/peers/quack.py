# SPDX-License-Identifier: Apache-2.0
"""quack (CuTe DSL kernels; compiles at its first call for a shape)."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

# Without the target the DSL may build for another one.
find = package("quack-kernels", "quack.topk", CUTE_DSL_ARCH="sm_90a")

PEER = Peer("quack", find)
