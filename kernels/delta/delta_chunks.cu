// SPDX-License-Identifier: Apache-2.0
// Prepares what a chunk needs of its queries, keys and gates before a state goes through it: for
// each head of values the inverse of I + A, where A[i][j] = beta[i] (k[i] . k[j]) decay(j to i)
// below the diagonal, times beta by columns; and scale (q[i] . k[j]) decay(j to i) up to the
// diagonal. A block has a chunk and a head of keys. Warps 0 to 3 multiply the keys, 16 rows each,
// and then invert; warps 4 to 7 multiply the queries, and load what the next head of values needs.
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

constexpr int kThreads = kDeltaPrepareThreads;

struct Numbers {
  // Of a head of values, and of the next: sums of the gates' logarithms, base 2, and betas.
  float gate[2][kTokens];
  float beta[2][kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
};

// With kBackward for gradients: the inverse is left without the betas, which go to the factors.
template <typename Format, int kKeySize, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2)
    gated_delta_rule_chunks(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = kKeySize * 2 + kDeltaPad;
  extern __shared__ __align__(16) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(k_tile + kTokens * kTilePitch);
  float* const half = matrix + kTokens * kDeltaPitch;
  Numbers& numbers = *reinterpret_cast<Numbers*>(half + kDeltaHalf * kDeltaHalfPitch);

  const int thread = threadIdx.x, lane = thread % 32, block = thread / 32 % 4;
  const bool of_q = thread >= kDeltaChunkThreads;
  const int key_head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  const int group = args.v_heads / args.k_heads;
  if (!kBackward && args.starts != nullptr) {
    clear_strays<kThreads>(args, args.out, key_head * group, group, args.value_size);
  }
  const auto [first, rows] = delta_chunk(args, blockIdx.x);
  if (rows == 0) return;

  const uint32_t q_at = static_cast<uint32_t>(__cvta_generic_to_shared(q_tile));
  const uint32_t k_at = static_cast<uint32_t>(__cvta_generic_to_shared(k_tile));
  copy_rows<kKeySize * 2>(q_at, delta_row(args, args.q, first, key_head), args.q.token, rows,
                          thread, kThreads);
  copy_rows<kKeySize * 2>(k_at, delta_row(args, args.k, first, key_head), args.k.token, rows,
                          thread, kThreads);
  async_copy_commit();
  if (of_q) {
    load_numbers<Format>(args, first, rows, key_head * group, thread - kDeltaChunkThreads,
                         numbers.gate[0], numbers.beta[0]);
  }
  async_copy_wait<0>();
  __syncthreads();
  {
    const int at = thread % kDeltaChunkThreads;
    const float norm = args.l2norm ? row_norm<Format, kKeySize>(of_q ? q_tile : k_tile, at) : 1.0f;
    if (at % 2 == 0) {
      (of_q ? numbers.norm_q : numbers.norm_k)[at / 2] = of_q ? norm * args.scale : norm;
    }
  }

  // A warp has 16 rows of a product, of which it needs the columns up to its last row.
  float products[kTiles][4] = {};
#pragma unroll 2
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t a[4];
    load_matrices<false>(a, block_by_columns(of_q ? q_at : k_at, kTilePitch, block * 16, depth));
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (pair > block) continue;
      uint32_t b[4];
      load_matrices<false>(b, block_by_rows(k_at, kTilePitch, pair * 16, depth));
      warp_multiply_add<Format>(products[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
      warp_multiply_add<Format>(products[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
    char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
    char* const scores = solved + kDeltaMatrixBytes;
    const float* const gate = numbers.gate[member & 1];
    const float* const beta = numbers.beta[member & 1];
    // Hidden, or the compiler would keep addresses in registers from head to head.
    int none = 0;
    asm volatile("" : "+r"(none));
    // A lane's first element of both matrices; the others are at constant distances.
    const int first_row = block * 16 + lane / 4 + none, first_column = lane % 4 * 2 + none;
    char* const score = scores + (first_row * kTokens + first_column) * 2;
    float* const element = matrix + first_row * kDeltaPitch + first_column;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 > block) continue;
      asm volatile(
          "" ::
              : "memory");  // one tile's factors after the other's, or some would be spilled
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 8 * i, column = tile * 8 + first_column;
        const float of_row = of_q ? numbers.norm_q[row] : beta[row] * numbers.norm_k[row];
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool real = column + j < row + (of_q ? 1 : 0);
          const float factor =
              real ? exp2_approx(gate[row] - gate[column + j]) * numbers.norm_k[column + j] : 0.0f;
          pair[j] = of_row * factor * products[tile][2 * i + j];
        }
        if (of_q) {
          *reinterpret_cast<uint32_t*>(score + (8 * i * kTokens + tile * 8) * 2) =
              pack_pair<Format>(pair[0], pair[1]);
        } else {
          *reinterpret_cast<float2*>(element + 8 * i * kDeltaPitch + tile * 8) =
              make_float2(pair[0], pair[1]);
        }
      }
    }
    if (of_q) {
      if (member + 1 < group) {
        load_numbers<Format>(args, first, rows, head + 1, thread - kDeltaChunkThreads,
                             numbers.gate[(member + 1) & 1], numbers.beta[(member + 1) & 1]);
      }
    } else {
      delta_chunk_sync();
      solve_chunk<Format, !kBackward>(matrix + none, half + none, beta, solved);
      if (thread < kTokens) {
        float* const factors =
            args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
        const float own = gate[thread], last = gate[kTokens - 1];
        const float decay = exp2_approx(own);
        factors[thread] = decay * numbers.norm_k[thread];
        factors[kTokens + thread] = decay * numbers.norm_q[thread];
        factors[2 * kTokens + thread] = exp2_approx(last - own) * numbers.norm_k[thread];
        if (thread < 4) factors[3 * kTokens + thread] = exp2_approx(last);
        if (kBackward) factors[kDeltaFactors + thread] = beta[thread];
      }
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
