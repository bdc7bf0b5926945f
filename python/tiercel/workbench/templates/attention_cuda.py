# SPDX-License-Identifier: Apache-2.0
"""new_kernel: attention in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Attended, Keys, LogSums, Queries, Sinks, Values

CODE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr int kMost = 256 / 32;  // of depth and width, for each lane

// One warp a query of one head: key after key, with a running maximum and sum.
template <typename T>
__global__ void attention(const T* q, const T* k, const T* v, T* out, float* lse,
                          const float* sinks, int queries, int keys, int heads, int shared,
                          int depth, int width, float scale, float softcap, int left,
                          int right, long q_batch, long q_row, long q_head, long q_step,
                          long k_batch, long k_row, long k_head, long k_step, long v_batch,
                          long v_row, long v_head, long v_step) {
  const int query = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (query >= queries) return;  // the whole warp
  const long head = blockIdx.y % heads, batch = blockIdx.y / heads;
  q += batch * q_batch + query * q_row + head * q_head;
  k += batch * k_batch + head / shared * k_head;
  v += batch * v_batch + head / shared * v_head;

  float own[kMost], sums[kMost] = {};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int d = lane + 32 * i;
    own[i] = d < depth ? float(q[d * q_step]) : 0.0f;
  }
  // The last query is aligned with the last key; a negative limit is none.
  const int place = query + keys - queries;
  const int first = left < 0 ? 0 : max(place - left, 0);
  const int end = right < 0 ? keys : min(place + right + 1, keys);
  float largest = -CUDART_INF_F, total = 0.0f;
  for (int key = first; key < end; ++key) {
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int d = lane + 32 * i;
      if (d < depth) score += own[i] * float(k[key * k_row + d * k_step]);
    }
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
    score *= scale;
    if (softcap > 0.0f) score = softcap * tanhf(score / softcap);
    const float before = largest;
    largest = fmaxf(before, score);
    const float shrink = expf(before - largest), weight = expf(score - largest);
    total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int d = lane + 32 * i;
      if (d < width) sums[i] = sums[i] * shrink + weight * float(v[key * v_row + d * v_step]);
    }
  }

  if (sinks != nullptr) {  // one more score, which no value belongs to
    const float before = largest;
    largest = fmaxf(before, sinks[head]);
    const float base = largest == -CUDART_INF_F ? 0.0f : largest;
    const float shrink = expf(before - base);
    total = total * shrink + expf(sinks[head] - base);
#pragma unroll
    for (int i = 0; i < kMost; ++i) sums[i] *= shrink;
  }

  // A query that sees no key: 0, and the logarithm of nothing.
  const bool blind = total == 0.0f;
  out += ((batch * queries + query) * heads + head) * width;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int d = lane + 32 * i;
    if (d < width) out[d] = T(blind ? 0.0f : sums[i] / total);
  }
  if (lane == 0) {
    lse[(batch * heads + head) * queries + query] = blind ? -CUDART_INF_F : largest + logf(total);
  }
}
"""

WARPS = 4
MOST_DEPTH = 256
CPP = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# All instances are compiled together, at the first launch.
NAMES = [f"attention<{name}>" for name in CPP.values()]
KERNELS = dict(zip(CPP, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="attention",
    name="new_kernel",
    language="cuda",
    description="one warp a query, key after key",
)
def new_kernel(
    q: Queries,  # [B, Sq, H, D] bfloat16 or float16, any strides
    k: Keys,  # [B, Sk, Hk, D], the same dtype; H is a multiple of Hk
    v: Values,  # [B, Sk, Hk, Dv]
    causal: bool,
    window: tuple[int, int] | None,  # keys before and after a query's own; -1 is no limit
    scale: float | None,
    softcap: float | None,
    sinks: Sinks,  # [H] float32, one more score of each head in the softmax's sum, or None
    return_lse: bool,  # always true
) -> tuple[Attended, LogSums]:  # [B, Sq, H, Dv], the dtype of q, and [B, H, Sq] float32
    batches, queries, heads, depth = q.shape
    width = v.shape[3]
    if max(depth, width) > MOST_DEPTH:
        raise NotImplementedError(f"heads of at most {MOST_DEPTH}, got {depth} and {width}")
    out = torch.empty(batches, queries, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batches, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    left, right = (-1, -1) if window is None else window
    KERNELS[q.dtype](
        [(queries + WARPS - 1) // WARPS, batches * heads],
        [32, WARPS],
        q,
        k,
        v,
        out,
        lse,
        sinks,
        queries,
        k.shape[1],
        heads,
        heads // max(k.shape[2], 1),
        depth,
        width,
        depth**-0.5 if scale is None else scale,
        0.0 if softcap is None else softcap,
        left,
        0 if causal else right,
        *q.stride(),
        *k.stride(),
        *v.stride(),
    )
    return out, lse
