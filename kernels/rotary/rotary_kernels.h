// SPDX-License-Identifier: Apache-2.0
// The interface of the family's host and device code: the kernels' arguments and tables.
#ifndef KERNELS_ROTARY_ROTARY_KERNELS_H_
#define KERNELS_ROTARY_ROTARY_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The stride of a dimension in bytes; 0 for a dimension of size 1, whose stride may be any number.
inline int64_t step_along(const TensorView& view, int dimension) {
  return view.shape[dimension] > 1 ? view.strides[dimension] * dtype_bytes(view.dtype) : 0;
}

// The heads of one token; strides in bytes.
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
  uint32_t last_position;  // of `cache`'s rows; positions beyond it and below 0 use the nearest row
  int q_heads;
  int heads;            // of q and k together
  int rotated;          // elements per head
  int turning;          // places per head that are rotated, which come first
  int rest;             // vectors per head that are only copied
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool wide_positions;  // int64
  bool wide_cache;      // float32, while q is not
};

struct RotaryKernel {
  DType dtype;
  bool interleaved;
  bool exchanged;  // a head has as many rotated as copied vectors; see the kernel
  int vector_bytes;
  int heads;  // per thread
  Kernel kernel;
};

inline constexpr int kRotaryMostThreads = 512;
inline constexpr int kRotaryMostHeads = 2;  // per thread

const RotaryKernel* rotary_kernels(int* count);

struct KvCacheArgs {
  HeadsOfTokens key, value;
  char* key_cache;
  char* value_cache;
  int64_t key_strides[3];  // bytes, of the cache: block, place, head
  int64_t value_strides[3];
  const void* slots;
  const float* key_scale;  // null means 1
  const float* value_scale;
  int64_t slot_count;  // of the cache; other slots are skipped
  int64_t tokens;
  int token_vectors;  // in a token's key, and in its value
  int head_vectors;   // per head
  int block_size;
  int block_shift;      // its binary logarithm, or -1 if it is not a power of two
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool key_scale_per_head;
  bool value_scale_per_head;
  bool wide_slots;  // int64
};

struct KvCacheKernel {
  DType dtype;
  bool to_float8;
  int elements;  // per vector
  Kernel kernel;
};

inline constexpr int kKvCacheThreads = 128;  // at most

const KvCacheKernel* kv_cache_kernels(int* count);

inline constexpr int kQkVector = 8;      // elements, 16 bytes
inline constexpr int kQkMostLanes = 32;  // per head

// Positions, angles and norms of the heads of queries and keys.
struct QkHeadsArgs {
  const void* positions;
  const char* angles;    // rows of cosines, then sines
  const char* q_weight;  // null: no norm
  const char* k_weight;
  float eps;
  float inverse_size;      // 1 / D
  uint32_t last_position;  // of `angles`; positions beyond it and below 0 use the nearest row
  int q_heads;
  int kv_heads;
  int rotated;          // elements per head
  int turning;          // places per head that are rotated, which come first
  int rest;             // vectors per head that are only copied
  bool wide_positions;  // int64
  bool wide_angles;     // float32
  bool wide_q_weight;
  bool wide_k_weight;
};

// Without `cache.slots` each token has a slot of its own in the order of the tokens: then the cache
// is a tensor of keys.
struct QkNormRopeCacheArgs : QkHeadsArgs {
  HeadsOfTokens q, q_out;
  KvCacheArgs cache;     // with the keys and values
  const float* q_scale;  // null means 1
  int heads;             // of q, k and v together
  bool q_scale_per_head;
  bool float8_q;
  bool float8_cache;
  bool early_launch;  // see grid_dependency_wait_and_launch()
  // With sections: which of a token's three positions turns each of a lane's eight pairs, two bits
  // a pair.
  uint16_t axes[kQkMostLanes];
};

struct QkNormRopeCacheKernel {
  DType dtype;
  bool interleaved;
  bool float8;    // q_out, the cache, or both
  bool sections;  // three positions per token
  int heads;      // per thread
  Kernel kernel;
};

inline constexpr int kQkMostThreads = 256;
inline constexpr int kQkMostHeads = 2;  // per thread

const QkNormRopeCacheKernel* qk_norm_rope_cache_kernels(int* count);

// Blocks below `q_blocks` have rows of q, the others rows of k: a row is a head of a token.
struct QkNormRopeBackwardArgs : QkHeadsArgs {
  HeadsOfTokens q, k, grad_q_out, grad_k_out, grad_q, grad_k;
  float* partial;  // [blocks, D], sums of a block's rows for its weight; null: no such gradient
  uint32_t q_rows;
  uint32_t k_rows;
  uint32_t q_blocks;
};

struct QkNormRopeBackwardKernel {
  DType dtype;
  bool interleaved;
  Kernel kernel;
};

inline constexpr int kQkBackwardThreads = 128;

const QkNormRopeBackwardKernel* qk_norm_rope_backward_kernels(int* count);

struct QkWeightGradArgs {
  const float* partial;  // [blocks, size], those of q first
  char* grad_q_weight;   // null: not wanted
  char* grad_k_weight;
  int q_blocks;
  int blocks;
  int size;
  bool wide_q_weight;  // float32
  bool wide_k_weight;
};

struct QkWeightGradKernel {
  DType dtype;
  Kernel kernel;
};

inline constexpr int kQkWeightGradColumns = 32;  // per block
inline constexpr int kQkWeightGradRows = 8;      // that a block adds at once

const QkWeightGradKernel* qk_weight_grad_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_ROTARY_KERNELS_H_
