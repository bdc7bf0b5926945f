// SPDX-License-Identifier: Apache-2.0
// Shared by w4_moe's kernels: the elements of a thread block, and its epilogue.
#ifndef KERNELS_MOE_W4_MOE_EPILOGUE_CUH_
#define KERNELS_MOE_W4_MOE_EPILOGUE_CUH_

#include <cstdint>

#include "kernels/activation/functions.cuh"
#include "kernels/moe/w4_moe_kernels.h"

namespace tiercel {

template <int kThreads>
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Makes what other threads' copies brought visible to wgmma.
__device__ __forceinline__ void copies_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// An element's id, which may be anything.
__device__ __forceinline__ int64_t id_of(const W4MoeArgs& args, int element) {
  return args.wide_ids ? static_cast<const int64_t*>(args.ids)[element]
                       : static_cast<const int32_t*>(args.ids)[element];
}

// The expert of a block of the routing, -1 for none, -2 for a block that is not in use. The lists
// have an entry for every block, so that no load waits for another.
__device__ __forceinline__ int expert_of(const W4MoeArgs& args, int block, int tokens) {
  if (args.slots == nullptr) {
    const int64_t id = id_of(args, block);
    return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
  }
  const int used = *args.used, expert = args.expert_ids[block];
  if (block * tokens >= min(used, args.slot_count)) return -2;
  return expert >= 0 && expert < args.experts ? expert : -1;
}

// The element in a place of a block, or -1.
__device__ __forceinline__ int element_at(const W4MoeArgs& args, int block, int tokens, int place) {
  if (args.slots == nullptr) return place == 0 ? block : -1;
  const int slot = block * tokens + place;
  const int element = place < tokens && slot < args.slot_count ? args.slots[slot] : -1;
  return element >= 0 && element < args.elements ? element : -1;
}

// Floats of a token's sums in shared memory: all banks are in use.
constexpr int w4_moe_sum_row(int rows) { return rows + 4; }

// The activation of gates, times the values that they gate, to `v`: four at a time, since each is a
// long chain of instructions.
__device__ __forceinline__ void gate(const W4MoeArgs& args, float (&v)[4], float (&value)[4]) {
  // Comparisons, unlike min and max, keep NaN.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (v[j] > args.limit) v[j] = args.limit;
    if (value[j] > args.limit) value[j] = args.limit;
    if (value[j] < -args.limit) value[j] = -args.limit;
  }
  switch (args.activation) {
    case W4MoeActivation::kGelu:
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = Gelu<false>::value(v[j]) * value[j];
      break;
    case W4MoeActivation::kRelu:
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = Relu<false>::value(v[j]) * value[j];
      break;
    default: {
      const bool residual = args.activation == W4MoeActivation::kSiluResidual;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = residual ? value[j] + 1.0f : value[j];
        v[j] = sigmoid_times<false>(args.alpha * v[j], v[j]) * factor;
      }
    }
  }
}

__device__ __forceinline__ void read_sums(float (&v)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

// Four features of a token, of the sums of its rows with their bias.
__device__ __forceinline__ void finish(const W4MoeArgs& args, const float* sums, int feature,
                                       float (&v)[4]) {
  if (args.gated) {
    const float* const from = sums + feature / 8 * 16 + feature % 8;
    float value[4];
    read_sums(v, from);
    read_sums(value, from + 8);
    gate(args, v, value);
    return;
  }
  read_sums(v, sums + feature);
  if (args.down) return;
#pragma unroll
  for (float& one : v) {
    const float positive = Relu<false>::value(one);
    one = positive * positive;
  }
}

// Zeros for elements whose ids are in no block of the routing: a row for each thread.
template <int kThreads>
__device__ __forceinline__ void clear_unrouted(const W4MoeArgs& args) {
  if (args.slots == nullptr) return;
  for (int64_t e = blockIdx.x + static_cast<int64_t>(threadIdx.x) * gridDim.x; e < args.elements;
       e += static_cast<int64_t>(kThreads) * gridDim.x) {
    const int64_t id = id_of(args, static_cast<int>(e));
    if (id >= 0 && id < args.bound) continue;
    uint4* const row = reinterpret_cast<uint4*>(args.out + e * args.features);
    for (int i = 0; i < args.features / 8; ++i) row[i] = make_uint4(0, 0, 0, 0);
  }
}

// Stores a tile, four features of a token at a time. `results` has the sums of all rows, or is null
// for zeros.
template <typename Format, int kRows, int kThreads>
__device__ __forceinline__ void store_tile(const W4MoeArgs& args, const float* results,
                                           const int* elements, int block_tokens, int tile) {
  const int tile_features = args.gated ? kRows / 2 : kRows;
  const int first_feature = tile * tile_features;
#pragma unroll 1
  for (int i = threadIdx.x; i < block_tokens * tile_features / 4; i += kThreads) {
    const int token = args.gated ? i / (kRows / 8) : i / (kRows / 4);
    const int feature = i * 4 - token * tile_features;
    const int element = elements[token];
    if (element < 0 || first_feature + feature >= args.features) continue;
    float v[4] = {};
    if (results != nullptr) finish(args, results + token * w4_moe_sum_row(kRows), feature, v);
    const int64_t row = static_cast<int64_t>(element) * args.features;
    *reinterpret_cast<uint2*>(args.out + row + first_feature + feature) =
        make_uint2(Format::pack(v), Format::pack(v + 2));
  }
}

}  // namespace tiercel

#endif  // KERNELS_MOE_W4_MOE_EPILOGUE_CUH_
