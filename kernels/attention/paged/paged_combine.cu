// SPDX-License-Identifier: Apache-2.0
// paged_combine: the results of parts of the keys, each weighted by its share of the sum.
//
// A thread has 16 bytes of the result. It reads 8 parts at once, results and logarithms together,
// so the time is the latency of a few reads from the L2.
//
// Parts of a fixed number of keys may be empty, and come at other places where a window's first
// part is another. So the largest logarithm of all is found first: then no grouping of parts
// matters.
#include <cstdint>

#include "kernels/attention/paged/combine.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kAtOnce = 8;
constexpr float kLn2 = 0.693147181f;

__device__ __forceinline__ int start_at(const PagedCombineArgs& args, int entry) {
  const int64_t offset = static_cast<int64_t>(args.step) * entry;
  const int start = *reinterpret_cast<const int32_t*>(args.starts + offset);
  return min(max(start, 0), args.total);
}

// The parts that the first kernel has written: those of the longest sequence.
__device__ __forceinline__ int used_parts(const PagedCombineArgs& args) {
  int longest = 0;
  for (int entry = threadIdx.x % 32; entry < args.batch; entry += 32) {
    const int64_t offset = static_cast<int64_t>(args.length_step) * entry;
    longest = max(longest, *reinterpret_cast<const int32_t*>(args.lengths + offset));
  }
  longest = min(__reduce_max_sync(~0u, longest), args.capacity);
  return min(max((longest + args.part_keys - 1) / args.part_keys, 1), args.parts);
}

template <typename Format>
__global__ void __launch_bounds__(kPagedCombineThreads)
    paged_combine(const __grid_constant__ PagedCombineArgs args) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kPagedCombineThreads + threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  const int parts = args.part_keys == 0 ? args.parts : used_parts(args);
  if (vector >= args.vectors) return;
  const int column = static_cast<int>(vector % args.row_vectors);
  const int64_t of_heads = vector / args.row_vectors;
  const int head = static_cast<int>(of_heads % args.heads);
  const int row = static_cast<int>(of_heads / args.heads);
  float* lse = args.lse == nullptr || column != 0
                   ? nullptr
                   : args.lse + static_cast<int64_t>(head) * args.total + row;
  if (row < start_at(args, 0) || row >= start_at(args, args.batch)) {
    // The row is in no sequence: the first kernel has stored zeros.
    if (lse != nullptr) *lse = -INFINITY;
    return;
  }

  // Logarithms of base 2, relative to the largest so far. The sink is a part without values.
  float largest = args.sinks == nullptr ? -INFINITY : args.sinks[head] * kLog2E;
  float sum = largest == -INFINITY ? 0.0f : 1.0f;
  if (args.part_keys > 0) {
    const float sink = largest;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const int64_t place = static_cast<int64_t>(part) * args.heads + head;
      largest = fmaxf(largest, args.partial_lse[place * args.total + row] * kLog2E);
    }
    if (sink != -INFINITY) sum = exp2_approx(sink - largest);
  }
  float out[8] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    float own[kAtOnce];
    uint32_t words[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own[i] = -INFINITY;
      if (first + i >= parts) continue;
      const int64_t place = static_cast<int64_t>(first + i) * args.heads + head;
      own[i] = args.partial_lse[place * args.total + row] * kLog2E;
      const int64_t line = (static_cast<int64_t>(row) * args.parts + first + i) * args.heads + head;
      load_vector(words[i], args.partial + (line * args.row_vectors + column) * 16);
    }
    float grown = largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) grown = fmaxf(grown, own[i]);
    const float reference = grown == -INFINITY ? 0.0f : grown;
    const float shrink = exp2_approx(largest - reference);
    largest = grown;
    sum *= shrink;
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] *= shrink;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (own[i] == -INFINITY) continue;
      const float weight = exp2_approx(own[i] - reference);
      float values[8];
      unpack<Format, 4>(words[i], values);
      sum += weight;
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e] += weight * values[e];
    }
  }
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  uint32_t words[4];
#pragma unroll
  for (int e = 0; e < 8; ++e) out[e] *= factor;
  pack<Format, 4>(out, words);
  store_vector(args.out + row * args.out_strides[0] + head * args.out_strides[1] + column * 16,
               words);
  if (lse != nullptr) *lse = (largest + log2f(sum)) * kLn2;
}

#define TIERCEL_COMBINE(dtype) \
  {DType::k##dtype,            \
   Kernel("paged_combine<" #dtype ">", reinterpret_cast<const void*>(paged_combine<dtype>))}

const PagedCombineKernel kKernels[] = {TIERCEL_COMBINE(BFloat16), TIERCEL_COMBINE(Float16)};

}  // namespace

const PagedCombineKernel* paged_combine_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
