// SPDX-License-Identifier: Apache-2.0
// topk_softmax with other scores, a bias, groups and shared experts, and for large E and k; alone
// and, for few tokens, with the alignment.
//
// One warp per row. Each lane holds up to E / 32 neighbouring experts of one group as 32-bit keys
// in the scores' order, and sorts them. A round of the selection is a warp-wide maximum
// (redux.sync) and the owner's step to its next key. With a bias, and for the softmax over the row,
// all E scores are computed, otherwise only those of the selected.
//
// A launch is bound by latency up to about 1000 rows, where each warp has a quarter of a
// multiprocessor: the chain of E = 256 and k = 8 in groups is about 2000 cycles, of which 60 are a
// round. Beyond that it is bound by instructions: about 900 for a row, 10 us for 8192 rows.
#include <cstdint>

#include "kernels/routing/topk_route.cuh"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkRouteThreads)
    topk_route(const __grid_constant__ TopkRouteArgs args) {
  __shared__ ScoreMemory<kPerLane> memory[kTopkRouteThreads / 32];
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kTopkRouteThreads / 32) + threadIdx.x / 32;
  grid_dependency_wait();
  if (args.early_launch) grid_dependency_launch();
  if (row < args.rows) finish_row_routed<Keys>(args, row, memory[threadIdx.x / 32]);
}

template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkRouteAlignThreads, 1)
    topk_route_align(const __grid_constant__ TopkRouteArgs topk,
                     const __grid_constant__ MoeAlignArgs align) {
  __shared__ ScoreMemory<kPerLane> memory[kTopkAlignRows];
  route_and_align(topk, align, [&](int64_t row) {
    return finish_row_routed<Keys>(topk, row, memory[threadIdx.x / 32]);
  });
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
