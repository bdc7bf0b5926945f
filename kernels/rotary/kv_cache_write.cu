// SPDX-License-Identifier: Apache-2.0
// kv_cache_write: each token's key and value to the cache slot that is its own.
//
// The plan. Everything is read once and written once. A task is a vector of one head of a token's key
// or value: 16 bytes in, the same out, or half of them as float8. A thread has kKvCacheTasks tasks,
// all loaded before the first is stored; tasks of one token are next to each other, so a warp reads
// and writes runs of 512 bytes, and its slot and scales come from L1.
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

// Four floats as float8_e4m3fn, the first in the lowest byte; beyond +-448 it is that, NaN stays.
__device__ __forceinline__ uint32_t to_float8(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
}

template <typename Element, bool kToFloat8, int kElements>
__global__ void __launch_bounds__(kKvCacheThreads)
    kv_cache_write(const __grid_constant__ KvCacheArgs args) {
  constexpr int kTasks = kKvCacheTasks;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTasks * kKvCacheThreads + threadIdx.x;
  const int token_tasks = args.heads * args.head_vectors;  // of its key; as many of its value
  grid_dependency_wait();
  grid_dependency_launch();

  float values[kTasks][kElements];
  char* places[kTasks];
  float scales[kTasks];
#pragma unroll
  for (int t = 0; t < kTasks; ++t) {
    places[t] = nullptr;
    const int64_t task = first + t * kKvCacheThreads;
    if (task >= args.tasks) continue;
    const int64_t line = task / token_tasks;  // token and which of the two
    const int within = static_cast<int>(task % token_tasks);
    const int head = within / args.head_vectors, vector = within % args.head_vectors;
    const int64_t token = line >> 1;
    const bool is_key = (line & 1) == 0;
    const int64_t slot = args.wide_slots ? static_cast<const int64_t*>(args.slots)[token]
                                         : static_cast<const int32_t*>(args.slots)[token];
    if (slot < 0) continue;
    const HeadsOfTokens& in = is_key ? args.key : args.value;
    load_elements<Element>(values[t], in.data + token * in.token_stride + head * in.head_stride +
                                          vector * (kElements * Element::kBytes));
    const int64_t* strides = is_key ? args.key_strides : args.value_strides;
    constexpr int kOutBytes = kElements * (kToFloat8 ? 1 : Element::kBytes);
    places[t] = (is_key ? args.key_cache : args.value_cache) +
                slot / args.block_size * strides[0] + slot % args.block_size * strides[1] +
                head * strides[2] + vector * kOutBytes;
    if constexpr (kToFloat8) {
      const float* scale = is_key ? args.key_scale : args.value_scale;
      const bool per_head = is_key ? args.key_scale_per_head : args.value_scale_per_head;
      scales[t] = scale == nullptr ? 1.0f : scale[per_head ? head : 0];
    }
  }
#pragma unroll
  for (int t = 0; t < kTasks; ++t) {
    if (places[t] == nullptr) continue;
    if constexpr (!kToFloat8) {
      store_elements<Element>(places[t], values[t]);
    } else if constexpr (kElements == 1) {
      *places[t] = static_cast<char>(to_float8(values[t][0] / scales[t], 0.0f, 0.0f, 0.0f));
    } else {
      uint32_t words[kElements / 4];
#pragma unroll
      for (int w = 0; w < kElements / 4; ++w) {
        const float* of = &values[t][w * 4];
        words[w] = to_float8(of[0] / scales[t], of[1] / scales[t], of[2] / scales[t],
                             of[3] / scales[t]);
      }
      store_vector(places[t], words);
    }
  }
}

#define TIERCEL_KV_CACHE(dtype, to_float8, elements)                                           \
  {DType::k##dtype,                                                                            \
   to_float8,                                                                                  \
   elements,                                                                                   \
   Kernel("kv_cache_write<" #dtype ", float8=" #to_float8 ", elements=" #elements ">",         \
          reinterpret_cast<const void*>(kv_cache_write<dtype##Element, to_float8, elements>))}

// By dtype; vectors before elements.
const KvCacheKernel kKernels[] = {
    TIERCEL_KV_CACHE(BFloat16, false, 8), TIERCEL_KV_CACHE(BFloat16, false, 1),
    TIERCEL_KV_CACHE(BFloat16, true, 8),  TIERCEL_KV_CACHE(BFloat16, true, 1),
    TIERCEL_KV_CACHE(Float16, false, 8),  TIERCEL_KV_CACHE(Float16, false, 1),
    TIERCEL_KV_CACHE(Float16, true, 8),   TIERCEL_KV_CACHE(Float16, true, 1),
};

}  // namespace

const KvCacheKernel* kv_cache_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
