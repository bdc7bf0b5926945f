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

template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkRouteAlignThreads, 1)
    topk_route_align(const __grid_constant__ TopkRouteArgs topk,
                     const __grid_constant__ MoeAlignArgs align) {
  route_and_align(topk, align,
                  [&](int64_t row) { return finish_row_routed<Keys, kPerLane>(topk, row); });
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
