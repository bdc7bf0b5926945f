// SPDX-License-Identifier: Apache-2.0
// Parts that the gradients of a chunk share with a gate per head and per channel. A block has
// kDeltaGradientThreads threads, and a chunk with a head of keys.
#ifndef KERNELS_DELTA_GRADIENTS_CUH_
#define KERNELS_DELTA_GRADIENTS_CUH_

#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kThreads = kDeltaGradientThreads;
constexpr int kSlice = kDeltaSlice;                  // columns of values at a time
constexpr int kValuePitch = kSlice * 2 + kDeltaPad;  // bytes
constexpr int kValueTile = kTokens * kValuePitch;    // likewise
constexpr int kMatrixTiles = kTokens / 2 / 8;        // of a warp: half of 64 columns

// 64 columns of the values of a head: tiles of tokens, and of the states.
struct DeltaGradientStage {
  char *grad, *written, *grad_rest, *state, *grad_state;
};

template <int kKeySize>
struct DeltaGradientTiles {
  static constexpr int kPitch = kKeySize * 2 + kDeltaPad;
  static constexpr int kTile = kTokens * kPitch;
  static constexpr int kStage = 3 * kValueTile + 2 * kTile;

  static __device__ __forceinline__ DeltaGradientStage stage(char* at) {
    char* const state = at + 3 * kValueTile;
    return {at, at + kValueTile, at + 2 * kValueTile, state, state + kTile};
  }
};

// A slice of the values of a head.
template <int kKeySize>
__device__ __forceinline__ void copy_stage(const DeltaBackArgs& args,
                                           const DeltaGradientStage& stage, const DeltaChunk& chunk,
                                           int64_t place, int head, int slice) {
  const int column = slice * kSlice, vectors = min(kSlice, args.value_size - column) / 8;
  const int64_t row_bytes = args.value_size * 2;
  const int64_t values = place * kTokens * row_bytes + column * 2;
  const int64_t states = (place * args.value_size + column) * kKeySize * 2;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const char* const from = i == 0 ? delta_row(args, args.grad, chunk.first, head) + column * 2
                                    : (i == 1 ? args.written : args.grad_rest) + values;
    copy_rows<kSlice * 2>(shared_address(stage.grad) + i * kValueTile, from,
                          i == 0 ? args.grad.token : row_bytes, i == 0 ? chunk.rows : kTokens,
                          threadIdx.x, kThreads, vectors);
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    copy_rows<kKeySize * 2>(shared_address(stage.state) + i * DeltaGradientTiles<kKeySize>::kTile,
                            (i == 0 ? args.states : args.grad_states) + states, kKeySize * 2,
                            vectors * 8, threadIdx.x, kThreads);
  }
}

// Two neighbours of a tile's row.
template <typename Format>
__device__ __forceinline__ float2 load_pair(const char* tile, int pitch, int row, int column) {
  float pair[2];
  Format::unpack(*reinterpret_cast<const uint32_t*>(tile + row * pitch + column * 2), pair);
  return {pair[0], pair[1]};
}

// sums += a b^T of tiles with rows along kDepth columns: 16 rows of a from `row` on, and rows of b
// from `column` on that are not beyond those.
template <typename Format, int kDepth, int kUnrolled = 2>
__device__ __forceinline__ void multiply_lower(float (&sums)[kMatrixTiles][4], uint32_t a,
                                               uint32_t b, int pitch, int row, int column) {
#pragma unroll kUnrolled
  for (int depth = 0; depth < kDepth; depth += 16) {
    uint32_t left[4];
    load_matrices<false>(left, block_by_columns(a, pitch, row, depth));
#pragma unroll
    for (int pair = 0; pair < kMatrixTiles / 2; ++pair) {
      if (column + pair * 16 > row) continue;
      uint32_t right[4];
      load_matrices<false>(right, block_by_rows(b, pitch, column + pair * 16, depth));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        warp_multiply_add<Format>(sums[2 * pair + i], left[0], left[1], left[2], left[3],
                                  right[2 * i], right[2 * i + 1]);
      }
    }
  }
}

// sums += a b, along the rows `first` to `last` of b: 16 rows of a from `row` on or, if kTurned,
// columns of a; and columns of b from `column` on.
template <typename Format, bool kTurned, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&sums)[kTiles][4], uint32_t a, int pitch_a,
                                              int row, uint32_t b, int pitch_b, int column,
                                              int first, int last) {
#pragma unroll 1
  for (int depth = first; depth < last; depth += 16) {
    uint32_t left[4];
    if (kTurned) {
      load_matrices<true>(left, block_by_rows(a, pitch_a, depth, row));
    } else {
      load_matrices<false>(left, block_by_columns(a, pitch_a, row, depth));
    }
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      uint32_t right[4];
      load_matrices<true>(right, block_by_columns(b, pitch_b, depth, column + pair * 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        warp_multiply_add<Format>(sums[2 * pair + i], left[0], left[1], left[2], left[3],
                                  right[2 * i], right[2 * i + 1]);
      }
    }
  }
}

template <typename Format>
__device__ __forceinline__ void store_beta(const DeltaBackArgs& args, int64_t place, float value) {
  if (args.beta_float) {
    reinterpret_cast<float*>(args.dbeta)[place] = value;
  } else {
    store_element<Format>(args.dbeta + place * 2, value);
  }
}

// Tokens without a sequence have no gradient: zeros for the block's. A gate has `size` elements.
template <typename Format, int kKeySize>
__device__ __forceinline__ void clear_gradients(const DeltaBackArgs& args, int key_head, int size) {
  if (args.starts == nullptr) return;
  const int group = args.v_heads / args.k_heads, first_head = key_head * group;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const bool of_v = i == 2;
    clear_strays<kThreads>(args, blockIdx.x,
                           i == 0 ? args.dq
                           : of_v ? args.dv
                                  : args.dk,
                           of_v ? first_head : key_head, of_v ? group : 1,
                           of_v ? args.value_size : kKeySize);
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int64_t begin = delta_start(args, 0), end = delta_start(args, args.count);
  for (int i = threadIdx.x; i < kTokens * group; i += kThreads) {
    const int64_t token = first + i / group;
    if (token >= args.tokens || (token >= begin && token < end)) continue;
    const int64_t place = token * args.v_heads + first_head + i % group;
    for (int j = 0; j < size; ++j) args.dg[place * size + j] = 0.0f;
    store_beta<Format>(args, place, 0.0f);
  }
}

// Divides the rows of a tile by their lengths, a half of a row a thread.
template <typename Format, int kKeySize>
__device__ __forceinline__ void normalize_row(char* tile, int thread, float norm) {
  char* at = tile + thread / 2 * (kKeySize * 2 + kDeltaPad) + thread % 2 * kKeySize;
#pragma unroll
  for (int i = 0; i < kKeySize / 16; ++i) {
    uint32_t words[4];
    float values[8];
    load_vector(words, at + i * 16);
    unpack<Format>(words, values);
#pragma unroll
    for (float& value : values) value *= norm;
    pack<Format>(values, words);
    store_vector(at + i * 16, words);
  }
}

// Copies the chunk's queries and keys, starts what `copy` copies, and divides by the lengths.
template <typename Format, int kKeySize, typename Copy>
__device__ __forceinline__ void load_keys(const DeltaBackArgs& args, const DeltaChunk& chunk,
                                          int key_head, char* q, char* k, float* norm_q,
                                          float* norm_k, Copy copy) {
  copy_rows<kKeySize * 2>(shared_address(q), delta_row(args, args.q, chunk.first, key_head),
                          args.q.token, chunk.rows, threadIdx.x, kThreads);
  copy_rows<kKeySize * 2>(shared_address(k), delta_row(args, args.k, chunk.first, key_head),
                          args.k.token, chunk.rows, threadIdx.x, kThreads);
  async_copy_commit();
  copy();
  async_copy_commit();
  async_copy_wait<1>();
  __syncthreads();
  const int thread = threadIdx.x % kDeltaChunkThreads;
  const bool of_k = threadIdx.x >= kDeltaChunkThreads;
  char* const tile = of_k ? k : q;
  float norm = 1.0f;
  if (args.l2norm) {
    norm = row_norm<Format, kKeySize>(tile, thread);
    normalize_row<Format, kKeySize>(tile, thread, norm);
  }
  if (thread % 2 == 0) (of_k ? norm_k : norm_q)[thread / 2] = norm;
  __syncthreads();
}

// Rows of Y . W, a quarter of a row a thread, of a slice of the values.
template <typename Format>
__device__ __forceinline__ float multiply_rest(const DeltaBackArgs& args, const char* grad_rest,
                                               int64_t place, int slice) {
  const int token = threadIdx.x / 4, first = threadIdx.x % 4 * 16;
  float product = 0.0f;
  if (slice * kSlice + first >= args.value_size) return product;
  const char* const from =
      args.rest + ((place * kTokens + token) * args.value_size + slice * kSlice + first) * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4], b[4];
    float x[8], y[8];
    load_vector(a, from + i * 16);
    load_vector(b, grad_rest + token * kValuePitch + first * 2 + i * 16);
    unpack<Format>(a, x);
    unpack<Format>(b, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) product = fmaf(x[j], y[j], product);
  }
  return product;
}

// Stores the gradient of queries or keys: with q = x / |x| that of x is (dq - q (q . dq)) / |x|.
// A warp has 16 rows and half of the columns; `halves` has room for sums of both.
template <typename Format, int kKeySize, int kTiles>
__device__ __forceinline__ void store_keys(const DeltaBackArgs& args, const DeltaHeads& of,
                                           const DeltaChunk& chunk, int key_head, const char* tile,
                                           const float* norms, float (&halves)[2][kTokens],
                                           const float (&grad)[kTiles][4]) {
  constexpr int kPitch = DeltaGradientTiles<kKeySize>::kPitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int half = warp % 2, key = half * (kKeySize / 2);
  const int own_row = warp / 2 * 16 + lane / 4, along = lane % 4 * 2;
  if (args.l2norm) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float dot = 0.0f;
#pragma unroll
      for (int at = 0; at < kTiles; ++at) {
        const float2 own = load_pair<Format>(tile, kPitch, own_row + 8 * i, key + at * 8 + along);
        dot = fmaf(own.x, grad[at][2 * i], fmaf(own.y, grad[at][2 * i + 1], dot));
      }
      dot = lanes_reduce<4>(dot, Sum());
      if (lane % 4 == 0) halves[half][own_row + 8 * i] = dot;
    }
    __syncthreads();
  }
  char* const to = const_cast<char*>(delta_row(args, of, chunk.first, key_head)) + key * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = own_row + 8 * i;
    if (token >= chunk.rows) continue;
    const float dot = args.l2norm ? halves[0][token] + halves[1][token] : 0.0f;
#pragma unroll
    for (int at = 0; at < kTiles; ++at) {
      const float2 own = load_pair<Format>(tile, kPitch, token, key + at * 8 + along);
      *reinterpret_cast<uint32_t*>(to + token * of.token + (at * 8 + along) * 2) =
          pack_pair<Format>(norms[token] * fmaf(-own.x, dot, grad[at][2 * i]),
                            norms[token] * fmaf(-own.y, dot, grad[at][2 * i + 1]));
    }
  }
}

}  // namespace
}  // namespace tiercel

#endif  // KERNELS_DELTA_GRADIENTS_CUH_
