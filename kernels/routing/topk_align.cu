// SPDX-License-Identifier: Apache-2.0
// topk_softmax_align: topk_softmax and moe_align_block_size in one launch, for few tokens.
//
// One warp per row selects as in topk_softmax_by_rounds and writes weights and indices. The indices
// of a block's rows stay in its shared memory, and the cluster's blocks sort them as in
// moe_align_small. Up to 8 blocks of 16 rows. The lower bound is the latency of both steps, without
// the second launch and without the indices' way through global memory.
#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/topk_align_kernels.h"
#include "kernels/routing/topk_rounds.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

template <typename Keys, int kPerLane>
__device__ __forceinline__ int choose(const TopkSoftmaxArgs& args, int64_t row) {
  if constexpr (sizeof(typename Keys::Key) == 4) {
    return finish_row_by_rounds<Keys, kPerLane, kTopkSoftmaxMaxK>(args, row);
  } else {
    constexpr int kIndexBits = kPerLane == 2 ? 6 : kPerLane == 4 ? 7 : kPerLane == 8 ? 8 : 9;
    return finish_row_by_rounded_rounds<kIndexBits, kPerLane, kTopkSoftmaxMaxK>(args, row);
  }
}

template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkAlignThreads, 1)
    topk_softmax_align(const __grid_constant__ TopkSoftmaxArgs topk,
                       const __grid_constant__ MoeAlignArgs align) {
  extern __shared__ uint32_t words[];
  cluster_arrive_relaxed();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const AlignShared shared = cut_shared(words, align.experts, kTopkAlignRows, cluster_blocks());
  clear_counts(shared, align.experts);
  grid_dependency_wait();
  grid_dependency_launch();

  fill_outputs(align, cluster_rank(), cluster_blocks());
  const uint32_t first_row = cluster_rank() * kTopkAlignRows;
  const int64_t row = first_row + warp;
  if (row < topk.rows) {
    const int index = choose<Keys, kPerLane>(topk, row);
    if (lane < topk.k) shared.sorted[warp * topk.k + lane] = index;
  }
  __syncthreads();
  const uint32_t first_id = first_row * topk.k;
  const uint32_t ids = first_id < align.numel ? min(align.span, align.numel - first_id) : 0;
  uint32_t expert[1] = {static_cast<uint32_t>(align.experts)};
  if (threadIdx.x < ids) expert[0] = shared.sorted[threadIdx.x];
  to_local_experts(align, expert);
  align_block<9, true>(align, shared, expert, first_id, (ids + 31) / 32);
}

#define TIERCEL_FUSED(keys, dtype, per_lane)                                 \
  {DType::k##dtype, 32 * per_lane,                                           \
   Kernel("topk_softmax_align<" #dtype ", per_lane=" #per_lane ">",          \
          reinterpret_cast<const void*>(topk_softmax_align<keys, per_lane>), \
          kTopkAlignMaxSharedBytes)}
#define TIERCEL_ALL_FUSED(keys, dtype)                                                         \
  TIERCEL_FUSED(keys, dtype, 2), TIERCEL_FUSED(keys, dtype, 4), TIERCEL_FUSED(keys, dtype, 8), \
      TIERCEL_FUSED(keys, dtype, 16)

const TopkAlignKernel kKernels[] = {TIERCEL_ALL_FUSED(KeysOf16Bit<BFloat16Format>, BFloat16),
                                    TIERCEL_ALL_FUSED(KeysOf16Bit<Float16Format>, Float16),
                                    TIERCEL_ALL_FUSED(KeysOfFloat32, Float32)};

}  // namespace

const TopkAlignKernel* topk_align_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
