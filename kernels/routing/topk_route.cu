// SPDX-License-Identifier: Apache-2.0
// topk_softmax with other scores, a bias, groups and shared experts, and for large E and k; alone
// and, for few tokens, with the alignment.
//
// One warp per row. Each lane holds up to E / 32 neighbouring experts of one group as 32-bit keys
// in the scores' order. A round of the selection is a warp-wide maximum (redux.sync), a ballot for
// the first lane that has it, and the search among that lane's keys. With a bias, and for the
// softmax over the row, all E scores are computed, otherwise only those of the selected.
//
// At E = 256 and k = 8: 40 instructions a round, 25 for each score with a bias, so about 600 for a
// warp; a row is 512 bytes. A launch is bound by the latency of the rounds up to about 1000 rows,
// then by instructions: 8192 rows are 10 us on 132 multiprocessors.
#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/topk_route.cuh"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkRouteThreads)
    topk_route(const __grid_constant__ TopkRouteArgs args) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kTopkRouteThreads / 32) + threadIdx.x / 32;
  grid_dependency_wait();
  if (args.early_launch) grid_dependency_launch();
  if (row < args.rows) finish_row_routed<Keys, kPerLane>(args, row);
}

// The first warps route a row each; all take part in the alignment, with a thread per expert.
template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkRouteAlignThreads, 1)
    topk_route_align(const __grid_constant__ TopkRouteArgs topk,
                     const __grid_constant__ MoeAlignArgs align) {
  extern __shared__ uint32_t words[];
  cluster_arrive_relaxed();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const AlignShared shared = cut_shared(words, align.experts, kTopkAlignRows, cluster_blocks());
  if (warp < kTopkAlignRows) clear_counts(shared, align.experts);
  grid_dependency_wait();
  grid_dependency_launch();

  fill_outputs(align, cluster_rank(), cluster_blocks());
  const int columns = topk.k + topk.shared;
  const uint32_t first_row = cluster_rank() * kTopkAlignRows;
  const int64_t row = first_row + warp;
  if (warp < kTopkAlignRows && row < topk.rows) {
    const int index = finish_row_routed<Keys, kPerLane>(topk, row);
    if (lane < columns) shared.sorted[warp * columns + lane] = index;
  }
  __syncthreads();
  const uint32_t first_id = first_row * columns;
  const uint32_t ids = first_id < align.numel ? min(align.span, align.numel - first_id) : 0;
  uint32_t expert[1] = {static_cast<uint32_t>(align.experts)};
  if (threadIdx.x < ids) expert[0] = shared.sorted[threadIdx.x];
  to_local_experts(align, expert);
  align_block<10, true>(align, shared, expert, first_id, (ids + 31) / 32);
}

#define TIERCEL_ROUTE(keys, dtype, per_lane)                                    \
  {DType::k##dtype, per_lane, false,                                            \
   Kernel("topk_route<" #dtype ", per_lane=" #per_lane ">",                     \
          reinterpret_cast<const void*>(topk_route<keys, per_lane>))},          \
  {                                                                             \
    DType::k##dtype, per_lane, true,                                            \
        Kernel("topk_route_align<" #dtype ", per_lane=" #per_lane ">",          \
               reinterpret_cast<const void*>(topk_route_align<keys, per_lane>), \
               kTopkRouteAlignSharedBytes)                                      \
  }
#define TIERCEL_ALL_ROUTES(keys, dtype) \
  TIERCEL_ROUTE(keys, dtype, 8), TIERCEL_ROUTE(keys, dtype, 16), TIERCEL_ROUTE(keys, dtype, 32)

const TopkRouteKernel kKernels[] = {TIERCEL_ALL_ROUTES(KeysOf16Bit<BFloat16Format>, BFloat16),
                                    TIERCEL_ALL_ROUTES(KeysOf16Bit<Float16Format>, Float16),
                                    TIERCEL_ALL_ROUTES(KeysOfFloat32, Float32)};

}  // namespace

const TopkRouteKernel* topk_route_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
