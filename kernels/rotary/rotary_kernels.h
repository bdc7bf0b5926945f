// SPDX-License-Identifier: Apache-2.0
// What the family's launchers and device code agree on: the kernels' arguments and their tables.
#ifndef KERNELS_ROTARY_ROTARY_KERNELS_H_
#define KERNELS_ROTARY_ROTARY_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// From one entry along a dimension to the next, in bytes: 0 where there is no next one, whose
// stride may be any number.
inline int64_t step_along(const TensorView& view, int dimension) {
  return view.shape[dimension] > 1 ? view.strides[dimension] * dtype_bytes(view.dtype) : 0;
}

// Heads of one token in memory; strides in bytes.
struct HeadsOfTokens {
  char* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct RotaryArgs {
  HeadsOfTokens q, k, q_out, k_out;
  const void* positions;
  const char* cache;
  int64_t tokens;
  uint32_t last_position;  // row of `cache`: positions beyond it, and below 0, take the nearest row
  int q_heads;
  int heads;            // of q and k
  int rotated;          // elements of a head
  int turning;          // places of a head that turn: those that come first
  int rest;             // vectors of a head that are only copied
  int ahead;            // so many blocks ask for their data before they may read it
  bool wide_positions;  // int64
  bool wide_cache;      // float32, where q is not
};

struct RotaryKernel {
  DType dtype;
  bool interleaved;
  bool exchanged;  // a head's places are as many vectors that turn, then as many that are copied
  int vector_bytes;
  int heads;  // a thread
  Kernel kernel;
};

inline constexpr int kRotaryMostThreads = 512;
inline constexpr int kRotaryMostHeads = 2;  // a thread

const RotaryKernel* rotary_kernels(int* count);

struct KvCacheArgs {
  HeadsOfTokens key, value;
  char* key_cache;
  char* value_cache;
  int64_t key_strides[3];  // bytes, of the cache: block, place, head
  int64_t value_strides[3];
  const void* slots;
  const float* key_scale;  // null: 1
  const float* value_scale;
  int64_t slot_count;  // places of the cache: other slots are skipped
  int64_t tokens;
  int token_vectors;  // of a token's key; as many of its value
  int head_vectors;   // of one head
  int block_size;
  int block_shift;  // its logarithm, -1 where it is no power of two
  int ahead;        // so many blocks ask for their data before they may read it
  bool key_scale_per_head;
  bool value_scale_per_head;
  bool wide_slots;  // int64
};

struct KvCacheKernel {
  DType dtype;
  bool to_float8;
  int elements;  // of a vector
  Kernel kernel;
};

inline constexpr int kKvCacheThreads = 128;  // at most

const KvCacheKernel* kv_cache_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_ROTARY_KERNELS_H_
