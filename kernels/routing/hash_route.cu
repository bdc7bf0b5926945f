// SPDX-License-Identifier: Apache-2.0
// topk_softmax with a table of experts per token, as in the first layers of DeepSeek-V4; alone and,
// for few tokens, with the alignment.
//
// One warp per row: lane l < k reads the token's l-th expert and that expert's score, and the
// weights follow by the operations of topk_route, to the same bits. The softmax over the row reads
// all scores twice, from L1 the second time. Bound by the latency of three dependent loads: token,
// table, score.
#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/topk_route.cuh"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

__device__ __forceinline__ float score_of(const HashRouteArgs& args, const char* row, int expert) {
  const char* address = row + expert * args.inner_stride;
  if (args.dtype == DType::kFloat32) return *reinterpret_cast<const float*>(address);
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(address);
  return args.dtype == DType::kBFloat16 ? bfloat16_bits_to_float(bits)
                                        : float16_bits_to_float(bits);
}

// Like finish_row_routed; the index is -1 where the table has no expert.
__device__ __forceinline__ int finish_row_hashed(const HashRouteArgs& args, int64_t row) {
  const int lane = threadIdx.x % 32;
  const char* data = static_cast<const char*>(args.scores) + row * args.row_stride;
  const int64_t token = args.int64_tokens ? static_cast<const int64_t*>(args.token_ids)[row]
                                          : static_cast<const int32_t*>(args.token_ids)[row];
  int chosen = -1;
  if (lane < args.k && token >= 0 && token < args.tokens) {
    chosen = args.table[token * args.k + lane];
    if (chosen < 0 || chosen >= args.experts) chosen = -1;
  }
  float largest = 0.0f, sum = 0.0f;
  const bool softmax = args.scoring == TopkScoring::kSoftmax;
  if (softmax && args.all_scores) {
    uint32_t most = 0;
    for (int e = lane; e < args.experts; e += 32) {
      most = max(most, order_float(score_of(args, data, e)));
    }
    largest = score_of_order(warp_max(most));
    uint64_t all = 0;  // whole numbers, as in topk_route
    for (int e = lane; e < args.experts; e += 32) {
      const float term = exp_of_negative(__fsub_rn(score_of(args, data, e), largest));
      all += __float2ull_rn(__fmul_rn(term, 0x1p40f));
    }
    sum = __fmul_rn(__ull2float_rn(lanes_reduce<32>(all, Sum())), 0x1p-40f);
    if (!(fabsf(largest) < __builtin_huge_valf())) sum = __int_as_float(0x7fffffff);
  }
  // Lanes that count have an expert; the others have no part in the sums.
  const bool counts = chosen >= 0;
  const float score = counts ? score_of(args, data, chosen) : -__builtin_huge_valf();
  float weight;
  if (softmax) {
    if (!args.all_scores) largest = score_of_order(warp_max(counts ? order_float(score) : 0));
    weight = exp_of_negative(__fsub_rn(score, largest));
    if (!args.all_scores) sum = lanes_reduce<32>(counts ? weight : 0.0f, Sum());
    weight = divided(weight, sum);
  } else {
    weight = activated(score, args.scoring);
    if (args.renormalize) {
      sum = __fadd_rn(lanes_reduce<32>(counts ? weight : 0.0f, Sum()), 1e-20f);
      weight = sum == __builtin_huge_valf() ? __fmul_rn(weight, 0.0f) : divided(weight, sum);
    }
  }
  weight = counts ? __fmul_rn(weight, args.scaling) : 0.0f;
  if (lane >= args.k) {
    chosen = args.experts + lane - args.k;
    weight = 1.0f;
  }
  if (!args.early_launch) grid_dependency_launch();
  const int columns = args.k + args.shared;
  if (lane < columns) {
    const int64_t place = row * columns + lane;
    args.weights[place] = weight;
    if (args.int64_indices) {
      static_cast<int64_t*>(args.indices)[place] = chosen;
    } else {
      static_cast<int32_t*>(args.indices)[place] = chosen;
    }
  }
  return chosen;
}

__global__ void __launch_bounds__(kTopkRouteThreads)
    hash_route(const __grid_constant__ HashRouteArgs args) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kTopkRouteThreads / 32) + threadIdx.x / 32;
  grid_dependency_wait();
  if (args.early_launch) grid_dependency_launch();
  if (row < args.rows) finish_row_hashed(args, row);
}

__global__ void __launch_bounds__(kTopkRouteAlignThreads, 1)
    hash_route_align(const __grid_constant__ HashRouteArgs topk,
                     const __grid_constant__ MoeAlignArgs align) {
  route_and_align(topk, align, [&](int64_t row) { return finish_row_hashed(topk, row); });
}

const HashRouteKernel kKernels[] = {
    {false, Kernel("hash_route", reinterpret_cast<const void*>(hash_route))},
    {true, Kernel("hash_route_align", reinterpret_cast<const void*>(hash_route_align),
                  kTopkRouteAlignSharedBytes)}};

}  // namespace

const HashRouteKernel* hash_route_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
