// SPDX-License-Identifier: Apache-2.0
// paged_combine: combines the partial results over parts of the keys, weighted by their sums.
//
// A thread has 16 bytes of the result. It reads 8 parts at once, results and logarithms together,
// so the time is the latency of a few reads from the L2.
//
// Parts of a fixed number of keys are added to the totals one after the other, the last one first,
// as in chained.py. Parts without keys of a row are skipped, so it does not matter which are empty.
#include <cstdint>

#include "kernels/attention/paged/combine.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kAtOnce = 8;
constexpr unsigned kFewBlocks = 132;
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
  const int own = args.part_keys == kPagedGrowing ? paged_growing_parts(longest)
                                                  : (longest + args.part_keys - 1) / args.part_keys;
  return min(max(own, 1), args.parts);
}

// A part of a fixed number of keys joins the totals of those behind it, with the operations of
// chained.py.
__device__ __forceinline__ void join(float own, const float (&values)[8], float* largest,
                                     float* sum, float (&out)[8]) {
  const float grown = fmaxf(*largest, own);
  const float kept = exp2_approx(*largest - grown), weight = exp2_approx(own - grown);
  *largest = grown;
  *sum = __fmaf_rn(*sum, kept, weight);
#pragma unroll
  for (int e = 0; e < 8; ++e) out[e] = __fmaf_rn(weight, values[e], __fmul_rn(out[e], kept));
}

__device__ __forceinline__ float log2_approx(float x) {
  float value;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

template <typename Format, bool kFixed>
__global__ void __launch_bounds__(kPagedCombineThreads, kFixed ? 0 : 5)
    paged_combine(const __grid_constant__ PagedCombineArgs args) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kPagedCombineThreads + threadIdx.x;
  // The kernel behind may begin, and wait, where this one leaves it room.
  if (kFixed && gridDim.x <= kFewBlocks) grid_dependency_launch();
  grid_dependency_wait();
  grid_dependency_launch();
  const int parts = kFixed ? used_parts(args) : args.parts;
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
  const float sink = largest;
  if (kFixed) largest = -INFINITY, sum = 0.0f;
  float out[8] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    float own[kAtOnce];
    uint32_t words[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own[i] = -INFINITY;
      if (first + i >= parts) continue;
      const int part = kFixed ? parts - 1 - (first + i) : first + i;
      const int64_t place = static_cast<int64_t>(part) * args.heads + head;
      const float logarithm = args.partial_lse[place * args.total + row];
      own[i] = kFixed ? __fmul_rn(logarithm, kLog2E) : logarithm * kLog2E;
      const int64_t line = (static_cast<int64_t>(row) * args.parts + part) * args.heads + head;
      load_vector(words[i], args.partial + (line * args.row_vectors + column) * 16);
    }
    if (kFixed) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (own[i] == -INFINITY) continue;
        float values[8];
        unpack<Format, 4>(words[i], values);
        join(own[i], values, &largest, &sum, out);
      }
      continue;
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
  if (kFixed && sink != -INFINITY) {
    const float nothing[8] = {};
    join(sink, nothing, &largest, &sum, out);
  }
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  uint32_t words[4];
#pragma unroll
  for (int e = 0; e < 8; ++e) out[e] *= factor;
  pack<Format, 4>(out, words);
  store_vector(args.out + row * args.out_strides[0] + head * args.out_strides[1] + column * 16,
               words);
  if (lse != nullptr) *lse = (largest + (kFixed ? log2_approx(sum) : log2f(sum))) * kLn2;
}

#define TIERCEL_COMBINE(dtype, fixed, name) \
  {DType::k##dtype, fixed, Kernel(name, reinterpret_cast<const void*>(paged_combine<dtype, fixed>))}

const PagedCombineKernel kKernels[] = {
    TIERCEL_COMBINE(BFloat16, false, "paged_combine<BFloat16>"),
    TIERCEL_COMBINE(BFloat16, true, "paged_combine<BFloat16, fixed>"),
    TIERCEL_COMBINE(Float16, false, "paged_combine<Float16>"),
    TIERCEL_COMBINE(Float16, true, "paged_combine<Float16, fixed>"),
};

}  // namespace

const PagedCombineKernel* paged_combine_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
