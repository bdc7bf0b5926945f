// SPDX-License-Identifier: Apache-2.0
// sums[target] += by * x for tokens that are sorted by their targets, as target_rows.h says.
//
// Bound by memory: x is read, and each row of sums that occurs is read and written. A block takes
// one position of the order, a thread eight columns; the block ends at once if the previous token
// has the same target. Otherwise it adds the rows of the target's tokens in order, four of them in
// flight, in float32, and finally the previous row of sums. No shared memory, no barrier. Launched
// with programmatic dependent launch.
#include "kernels/loss/target_rows_kernels.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kAhead = 4;  // rows in flight

template <typename Format, int kElements>
__global__ void __launch_bounds__(kTargetRowsThreads)
    target_rows(const __grid_constant__ TargetRowsArgs args) {
  constexpr int kWords = (kElements * Format::kBytes + 3) / 4;
  const int first = static_cast<int>(blockIdx.x);
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kElements;
  grid_dependency_wait();
  grid_dependency_launch();
  const int row = args.target[first];
  if (first > 0 && args.target[first - 1] == row) return;
  if (row < 0 || row >= args.rows || column >= args.columns) return;

  const auto load = [&](const char* at, float (&values)[kElements]) {
    if constexpr (kElements == 1) {
      values[0] = load_element<Format>(at);
    } else {
      uint32_t words[kWords];
      load_vector(words, at);
      unpack<Format>(words, values);
    }
  };
  char* const place = args.sums + row * args.sums_stride + int64_t{column} * Format::kBytes;
  const char* const x = args.x + int64_t{column} * Format::kBytes;
  float before[kElements], sum[kElements] = {};
  load(place, before);
  bool more = true;
  for (int at = first; more; at += kAhead) {
    float by[kAhead], values[kAhead][kElements];
    bool there[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      there[i] = at + i < args.tokens && args.target[at + i] == row;
      if (!there[i]) continue;
      const int64_t token = max(int64_t{0}, min(args.order[at + i], int64_t{args.tokens} - 1));
      by[i] = args.by[token];
      load(x + token * args.x_stride, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!there[i]) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) sum[e] = fmaf(by[i], values[i][e], sum[e]);
    }
    more = there[kAhead - 1];
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) sum[e] += before[e];
  if constexpr (kElements == 1) {
    store_element<Format>(place, sum[0]);
  } else {
    uint32_t words[kWords];
    pack<Format>(sum, words);
    store_vector(place, words);
  }
}

#define TIERCEL_TARGET_ROWS(type, elements)                 \
  {DType::k##type, elements,                                \
   Kernel("target_rows<" #type ", elements=" #elements ">", \
          reinterpret_cast<const void*>(target_rows<type, elements>))}

const TargetRowsKernel kKernels[] = {
    TIERCEL_TARGET_ROWS(BFloat16, 8), TIERCEL_TARGET_ROWS(BFloat16, 1),
    TIERCEL_TARGET_ROWS(Float16, 8), TIERCEL_TARGET_ROWS(Float16, 1)};

}  // namespace

const TargetRowsKernel* target_rows_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
