// SPDX-License-Identifier: Apache-2.0
// paged_queries: float8 queries in bfloat16, each row of q by a block; a thread converts 8 columns
// at once. Bound: the latency of a launch; q is small beside the cache.
#include <cstdint>

#include "kernels/attention/paged/queries.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

__global__ void __launch_bounds__(kPagedQueriesThreads)
    paged_queries(const __grid_constant__ PagedQueriesArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  const char* from = args.q + blockIdx.x * args.row;
  const int vectors = args.heads * args.vectors;
  char* to = args.to + static_cast<int64_t>(blockIdx.x) * vectors * 16;
  for (int i = threadIdx.x; i < vectors; i += kPagedQueriesThreads) {
    const int head = i / args.vectors;
    uint32_t narrow[2], wide[4];
    load_vector(narrow, from + head * args.head + (i - head * args.vectors) * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 values = e4m3x2_to_float2(narrow[j / 2] >> (j % 2 * 16));
      const float pair[2] = {values.x, values.y};
      wide[j] = BFloat16::pack(pair);
    }
    store_vector(to + static_cast<int64_t>(i) * 16, wide);
  }
  if (blockIdx.x > 0 || args.q_scale == nullptr) return;
  for (int head = threadIdx.x; head < args.kv_heads; head += kPagedQueriesThreads) {
    const float of_keys = args.k_scale == nullptr ? 1.0f : args.k_scale[head * args.k_scale_step];
    args.factors[head] = *args.q_scale * of_keys;
  }
}

const PagedQueriesKernel kKernels[] = {
    {Kernel("paged_queries", reinterpret_cast<const void*>(paged_queries))},
};

}  // namespace

const PagedQueriesKernel* paged_queries_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
