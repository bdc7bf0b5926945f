// SPDX-License-Identifier: Apache-2.0
// merge_attention_states: two results of attention, each weighted by the share of its keys.
//
// Bound by memory: everything is read once and written once. A thread has 16 bytes of both results,
// and the two lse of their row, which its neighbours share. Both loads are in flight before the
// first is used; a warp reads 512 bytes of each at a time.
#include <cstdint>

#include "kernels/attention/merge/merge.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

template <typename Format>
__global__ void __launch_bounds__(kMergeThreads)
    merge_attention_states(const __grid_constant__ MergeArgs args) {
  constexpr int kElements = 4 * Format::kPerWord;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  if (vector >= args.vectors) return;
  const int64_t row = vector / args.row_vectors;  // in the order of lse
  const int column = static_cast<int>(vector % args.row_vectors);
  const int64_t query = row % args.queries, head = row / args.queries % args.heads;
  const int64_t b = row / args.queries / args.heads;
  uint32_t first[4], second[4];
  load_vector(first, args.a + b * args.a_strides[0] + query * args.a_strides[1] +
                         head * args.a_strides[2] + column * 16);
  load_vector(second, args.b + b * args.b_strides[0] + query * args.b_strides[1] +
                          head * args.b_strides[2] + column * 16);
  const float lse_a = args.lse_a[row], lse_b = args.lse_b[row];

  const float largest = fmaxf(lse_a, lse_b);
  const float reference = largest == -INFINITY ? 0.0f : largest;
  float weight_a = __expf(lse_a - reference), weight_b = __expf(lse_b - reference);
  const float sum = weight_a + weight_b;
  if (sum != 0.0f) weight_a /= sum, weight_b /= sum;
  float x[kElements], y[kElements];
  unpack<Format, 4>(first, x);
  unpack<Format, 4>(second, y);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    // The result over no keys may have any contents.
    x[i] =
        (weight_a == 0.0f ? 0.0f : weight_a * x[i]) + (weight_b == 0.0f ? 0.0f : weight_b * y[i]);
  }
  pack<Format, 4>(x, first);
  store_vector(args.out + b * args.out_strides[0] + query * args.out_strides[1] +
                   head * args.out_strides[2] + column * 16,
               first);
  if (column == 0) args.lse[row] = largest == -INFINITY ? largest : largest + __logf(sum);
}

#define TIERCEL_MERGE(dtype)                                     \
  {DType::k##dtype, Kernel("merge_attention_states<" #dtype ">", \
                           reinterpret_cast<const void*>(merge_attention_states<dtype>))}

const MergeKernel kKernels[] = {TIERCEL_MERGE(Float32), TIERCEL_MERGE(BFloat16),
                                TIERCEL_MERGE(Float16)};

}  // namespace

const MergeKernel* merge_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
