# SPDX-License-Identifier: Apache-2.0
"""FlashInfer; it compiles its kernels with nvcc at their first call."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

find = package("flashinfer-python", "flashinfer", FLASHINFER_CUDA_ARCH_LIST="9.0a")

PEER = Peer("flashinfer", find)
