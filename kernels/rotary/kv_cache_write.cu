// SPDX-License-Identifier: Apache-2.0
// kv_cache_write: writes each token's key and value to the token's cache slot.
//
// All data is read once and written once. A thread processes the same vector of a token's key and
// value: 16 bytes in and 16, or 8 as float8, out. Both loads are in flight before the thread waits
// for the slot; a warp reads and writes runs of 512 bytes.
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/float8_store.cuh"
#include "kernels/rotary/integers.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

// A block covers vectors x tokens, the grid tokens x vectors.
template <typename Element, bool kToFloat8, int kElements>
__global__ void __launch_bounds__(kKvCacheThreads)
    kv_cache_write(const __grid_constant__ KvCacheArgs args) {
  constexpr int kBytes = kElements * Element::kBytes;
  constexpr int kOutBytes = kToFloat8 ? kElements : kBytes;
  const int column = blockIdx.y * blockDim.x + threadIdx.x;  // in a token's key
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int head = column / args.head_vectors, vector = column - head * args.head_vectors;
  const char* key_from =
      args.key.data + token * args.key.token_stride + head * args.key.head_stride + vector * kBytes;
  const char* value_from = args.value.data + token * args.value.token_stride +
                           head * args.value.head_stride + vector * kBytes;
  const bool mine = column < args.token_vectors && token < args.tokens;
  if (mine && is_prefetching(args.prefetch_blocks)) {
    prefetch_l2(key_from);
    prefetch_l2(value_from);
  }
  if (is_prefetching(args.prefetch_blocks) && threadIdx.x + threadIdx.y + blockIdx.y == 0) {
    prefetch_line(args.slots, blockIdx.x, args.tokens * (args.wide_slots ? 8 : 4));
  }
  grid_dependency_wait();
  grid_dependency_launch();
  // In their own scope: the compiler would move the loads behind an early exit.
  Integer number = {~0u, ~0u};
  Packed<Element, kElements> key, value;
  if (mine) {
    number.load(args.slots, token, args.wide_slots);
    key.load(key_from);
    value.load(value_from);
  }
  Divisor of_key, of_value;
  if (kToFloat8 && mine) {
    of_key = divisor_of(args.key_scale, args.key_scale_per_head, head);
    of_value = divisor_of(args.value_scale, args.value_scale_per_head, head);
  }
  const int64_t slot = number.value(args.wide_slots);
  if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(args.slot_count)) return;
  const int64_t block = args.block_shift >= 0 ? slot >> args.block_shift : slot / args.block_size;
  const int64_t place = slot - block * args.block_size;
  char* key_to = args.key_cache + block * args.key_strides[0] + place * args.key_strides[1] +
                 head * args.key_strides[2] + vector * kOutBytes;
  char* value_to = args.value_cache + block * args.value_strides[0] +
                   place * args.value_strides[1] + head * args.value_strides[2] +
                   vector * kOutBytes;
  if constexpr (kToFloat8) {
    store_float8<kElements>(key_to, key, of_key);
    store_float8<kElements>(value_to, value, of_value);
  } else {
    key.store(key_to);
    value.store(value_to);
  }
}

#define TIERCEL_KV_CACHE(dtype, to_float8, elements)                                   \
  {DType::k##dtype, to_float8, elements,                                               \
   Kernel("kv_cache_write<" #dtype ", float8=" #to_float8 ", elements=" #elements ">", \
          reinterpret_cast<const void*>(kv_cache_write<dtype##Element, to_float8, elements>))}

// By dtype; vector kernels before element kernels.
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
