// SPDX-License-Identifier: Apache-2.0
// Prepares what a chunk needs of its queries, keys and gates before a state goes through it: for
// each head of values the inverse of I + A, where A[i][j] = beta[i] (k[i] . k[j]) decay(j to i)
// below the diagonal, times beta by columns; and scale (q[i] . k[j]) decay(j to i) up to the
// diagonal. A block has a chunk and a head of keys.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kTiles = kTokens / 8;

struct Numbers {
  float gate[kTokens];  // sums of the gates' logarithms, base 2
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
};

// With kBackward for gradients: the inverse is left without the betas, which go to the factors.
template <typename Format, int kKeySize, bool kBackward>
__global__ void __launch_bounds__(kDeltaChunkThreads, 3)
    gated_delta_rule_chunks(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = kKeySize * 2 + kDeltaPad;
  extern __shared__ __align__(16) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(k_tile + kTokens * kTilePitch);
  float* const half = matrix + kTokens * kDeltaPitch;
  Numbers& numbers = *reinterpret_cast<Numbers*>(half + kDeltaHalf * kDeltaHalfPitch);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  const int group = args.v_heads / args.k_heads;
  if (!kBackward && args.starts != nullptr) {
    clear_strays<kDeltaChunkThreads>(args, args.out, key_head * group, group, args.value_size);
  }
  const auto [first, rows] = delta_chunk(args, blockIdx.x);
  if (rows == 0) return;

  const uint32_t q_at = static_cast<uint32_t>(__cvta_generic_to_shared(q_tile));
  const uint32_t k_at = static_cast<uint32_t>(__cvta_generic_to_shared(k_tile));
  copy_rows<kKeySize * 2>(q_at, delta_row(args, args.q, first, key_head), args.q.token, rows,
                          threadIdx.x, kDeltaChunkThreads);
  copy_rows<kKeySize * 2>(k_at, delta_row(args, args.k, first, key_head), args.k.token, rows,
                          threadIdx.x, kDeltaChunkThreads);
  async_copy_commit();
  async_copy_wait<0>();
  __syncthreads();

  const float norm_q = args.l2norm ? row_norm<Format, kKeySize>(q_tile, threadIdx.x) : 1.0f;
  const float norm_k = args.l2norm ? row_norm<Format, kKeySize>(k_tile, threadIdx.x) : 1.0f;
  if (threadIdx.x % 2 == 0) {
    numbers.norm_q[threadIdx.x / 2] = norm_q * args.scale;
    numbers.norm_k[threadIdx.x / 2] = norm_k;
  }

  // A warp has 16 rows of both products, of which it needs the columns up to its last row.
  float kk[kTiles][4] = {}, qk[kTiles][4] = {};
#pragma unroll
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t k_rows[4], q_rows[4];
    load_matrices<false>(k_rows, block_by_columns(k_at, kTilePitch, warp * 16, depth));
    load_matrices<false>(q_rows, block_by_columns(q_at, kTilePitch, warp * 16, depth));
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (pair > warp) continue;
      uint32_t b[4];
      load_matrices<false>(b, block_by_rows(k_at, kTilePitch, pair * 16, depth));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = 2 * pair + i;
        warp_multiply_add<Format>(kk[tile], k_rows[0], k_rows[1], k_rows[2], k_rows[3], b[2 * i],
                                  b[2 * i + 1]);
        warp_multiply_add<Format>(qk[tile], q_rows[0], q_rows[1], q_rows[2], q_rows[3], b[2 * i],
                                  b[2 * i + 1]);
      }
    }
  }

#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
    char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
    char* const scores = solved + kDeltaMatrixBytes;
    load_numbers<Format>(args, first, rows, head, numbers.gate, numbers.beta);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 > warp) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp * 16 + lane / 4 + 8 * i, column = tile * 8 + lane % 4 * 2;
        const float of_k = numbers.beta[row] * numbers.norm_k[row];
        const float of_q = numbers.norm_q[row];
        float below[2], up_to[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float gates = numbers.gate[row] - numbers.gate[column + j];
          const float factor =
              column + j > row ? 0.0f : exp2_approx(gates) * numbers.norm_k[column + j];
          below[j] = column + j == row ? 0.0f : of_k * factor * kk[tile][2 * i + j];
          up_to[j] = of_q * factor * qk[tile][2 * i + j];
        }
        *reinterpret_cast<float2*>(&matrix[row * kDeltaPitch + column]) =
            make_float2(below[0], below[1]);
        *reinterpret_cast<uint32_t*>(scores + (row * kTokens + column) * 2) =
            pack_pair<Format>(up_to[0], up_to[1]);
      }
    }
    __syncthreads();
    solve_chunk<Format, !kBackward>(matrix, half, numbers.beta, solved);
    if (threadIdx.x < kTokens) {
      float* const factors = args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
      const int token = threadIdx.x;
      const float gate = numbers.gate[token], last = numbers.gate[kTokens - 1];
      const float decay = exp2_approx(gate);
      factors[token] = decay * numbers.norm_k[token];
      factors[kTokens + token] = decay * numbers.norm_q[token];
      factors[2 * kTokens + token] = exp2_approx(last - gate) * numbers.norm_k[token];
      if (token < 4) factors[3 * kTokens + token] = exp2_approx(last);
      if (kBackward) factors[kDeltaFactors + token] = numbers.beta[token];
    }
    __syncthreads();
  }
}

#define TIERCEL_CHUNKS(dtype, size, backward)                                            \
  {backward ? DeltaPart::kBackChunks : DeltaPart::kChunks, size, DType::k##dtype, false, \
   Kernel((backward) ? "gated_delta_rule_chunks<" #dtype ", K=" #size ", backward>"      \
                     : "gated_delta_rule_chunks<" #dtype ", K=" #size ">",               \
          reinterpret_cast<const void*>(gated_delta_rule_chunks<dtype, size, backward>), \
          delta_chunks_smem(size))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_CHUNKS(BFloat16, 64, false), TIERCEL_CHUNKS(BFloat16, 128, false),
    TIERCEL_CHUNKS(Float16, 64, false),  TIERCEL_CHUNKS(Float16, 128, false),
    TIERCEL_CHUNKS(BFloat16, 64, true),  TIERCEL_CHUNKS(BFloat16, 128, true),
    TIERCEL_CHUNKS(Float16, 64, true),   TIERCEL_CHUNKS(Float16, 128, true),
};

}  // namespace

const DeltaRuleKernel* delta_chunks_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
