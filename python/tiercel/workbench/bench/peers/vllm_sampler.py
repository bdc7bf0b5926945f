# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler in Triton: Gumbel noise, and top-k and top-p by pivots; what it runs where the
fused samplers of FlashInfer are not eligible. It compiles for each case.

TIERCEL_BENCH_VLLM_SOURCE names the folder above ``vllm/v1/sample/ops``,
``vllm/v1/worker/gpu/sample`` and ``vllm/model_executor/warmup``.
"""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer
from tiercel.workbench.bench.peers.vllm_triton import finder

GUMBEL, FILTERS = "worker.gpu.sample.gumbel", "sample.ops.topk_topp_triton"

PEER = Peer("vllm.sampler", finder("vllm.v1", GUMBEL, FILTERS), on_request=True)
