// SPDX-License-Identifier: Apache-2.0
// Parts of preparing a chunk that kernels for a gate per head and per channel share. The block's
// first kDeltaChunkThreads threads call them.
#ifndef KERNELS_DELTA_SOLVE_CUH_
#define KERNELS_DELTA_SOLVE_CUH_

#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

inline constexpr int kDeltaHalf = kDeltaChunk / 2;
inline constexpr int kDeltaBlock = kDeltaHalf / 2;
inline constexpr int kDeltaPitch = kDeltaChunk + 4;     // floats between rows of the matrix
inline constexpr int kDeltaHalfPitch = kDeltaHalf + 4;  // and of a half
inline constexpr float kDeltaLeastGate =
    -100.0f;                            // no decay is stronger; sums' differences stay numbers
inline constexpr int kDeltaAhead = 16;  // gates of a thread that are loaded together

// A barrier of a team of kDeltaChunkThreads threads, which have a chunk together. A block has up to
// kDeltaChunkTeams. Numbers are constants: one in a register would reserve all 16 barriers.
__device__ __forceinline__ void delta_chunk_sync(int team = 0) {
  static_assert(kDeltaChunkTeams == 3);
  if (team == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(kDeltaChunkThreads) : "memory");
  } else if (team == 1) {
    asm volatile("bar.sync 2, %0;" ::"n"(kDeltaChunkThreads) : "memory");
  } else {
    asm volatile("bar.sync 3, %0;" ::"n"(kDeltaChunkThreads) : "memory");
  }
}

// Inverts the unit lower triangular matrix whose part below the diagonal is
// given, 16x16, in place: a lane has a column, as has the lane 16 further.
__device__ __forceinline__ void invert_block(float* matrix) {
  const int lane = threadIdx.x % kDeltaBlock;
  float column[kDeltaBlock];
#pragma unroll
  for (int i = 0; i < kDeltaBlock; ++i) {
    float sums[4] = {i == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *reinterpret_cast<const float4*>(&matrix[i * kDeltaPitch + j]);
      sums[0] = fmaf(-row.x, column[j], sums[0]);
      if (j + 1 < i) sums[1] = fmaf(-row.y, column[j + 1], sums[1]);
      if (j + 2 < i) sums[2] = fmaf(-row.z, column[j + 2], sums[2]);
      if (j + 3 < i) sums[3] = fmaf(-row.w, column[j + 3], sums[3]);
    }
    column[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDeltaBlock; ++i) matrix[i * kDeltaPitch + lane] = column[i];
}

// Two floats as sums of two bfloat16 each, which is 16 of their bits.
struct DeltaPair {
  uint32_t high, low;

  __device__ __forceinline__ DeltaPair(float a, float b) {
    high = pack_pair<BFloat16>(a, b);
    float rounded[2];
    BFloat16::unpack(high, rounded);
    low = pack_pair<BFloat16>(a - rounded[0], b - rounded[1]);
  }
};

// c = sign a b, square, by two warps or, for 32 rows, four. Tensor cores, because scalar products
// would read shared memory nine times as often.
template <int kSize, int kPitchA, int kPitchB, int kPitchC>
__device__ __forceinline__ void multiply_blocks(const float* a, const float* b, float* c,
                                                float sign) {
  constexpr int kColumns = kSize / 16;  // tiles of eight columns of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int across = lane / 4, along = lane % 4 * 2;
  const int row = kSize == 32 ? warp / 2 * 16 + across : across;
  const int column = warp % 2 * kColumns * 8;
  float sums[kColumns][4] = {};
#pragma unroll
  for (int depth = 0; depth < kSize; depth += 16) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(
          &a[(row + i % 2 * 8) * kPitchA + depth + along + i / 2 * 8]);
      const DeltaPair parts(pair.x, pair.y);
      high[i] = parts.high, low[i] = parts.low;
    }
#pragma unroll
    for (int tile = 0; tile < kColumns; ++tile) {
      const float* const at = b + (depth + along) * kPitchB + column + tile * 8 + across;
      const DeltaPair first(at[0], at[kPitchB]), second(at[8 * kPitchB], at[9 * kPitchB]);
      float (&sum)[4] = sums[tile];
      warp_multiply_add<BFloat16>(sum, low[0], low[1], low[2], low[3], first.high, second.high);
      warp_multiply_add<BFloat16>(sum, high[0], high[1], high[2], high[3], first.low, second.low);
      warp_multiply_add<BFloat16>(sum, high[0], high[1], high[2], high[3], first.high, second.high);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kColumns; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(&c[(row + i * 8) * kPitchC + column + tile * 8 + along]) =
          make_float2(sign * sums[tile][2 * i], sign * sums[tile][2 * i + 1]);
    }
  }
}

// Makes the block below the diagonal that of the inverse, in a lower triangular
// matrix whose diagonal blocks are inverted. Each of the matrix's threads takes part;
// `between` has room for a block.
template <int kSize>
__device__ __forceinline__ void invert_below(float* matrix, float* between, int team) {
  float* const lower = matrix + kSize * kDeltaPitch;
  multiply_blocks<kSize, kDeltaPitch, kDeltaPitch, kDeltaHalfPitch>(lower, matrix, between, 1.0f);
  delta_chunk_sync(team);
  multiply_blocks<kSize, kDeltaPitch, kDeltaHalfPitch, kDeltaPitch>(lower + kSize, between, lower,
                                                                    -1.0f);
  delta_chunk_sync(team);
}

// The inverse of I plus the matrix, if kScaled times beta by columns, to a
// matrix of 16-bit elements; blocks of 16 x 16 above the diagonal are left out.
// Ends with all threads past their reads.
template <typename Format, bool kScaled = true>
__device__ __forceinline__ void solve_chunk(float* matrix, float* half, const float* beta,
                                            char* solved, int team = 0) {
  const int warp = threadIdx.x / 32, pair = threadIdx.x / 64;
  float* const block = matrix + warp * kDeltaBlock * (kDeltaPitch + 1);
  invert_block(block);
  if (warp % 2 == 0) {  // what is right of it in a half
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = lane / kDeltaBlock; i < kDeltaBlock; i += 2) {
      block[i * kDeltaPitch + kDeltaBlock + lane % kDeltaBlock] = 0.0f;
    }
  }
  delta_chunk_sync(team);
  invert_below<kDeltaBlock>(matrix + pair * kDeltaHalf * (kDeltaPitch + 1),
                            half + pair * kDeltaBlock * kDeltaHalfPitch, team);
  invert_below<kDeltaHalf>(matrix, half, team);
  const int row = threadIdx.x / 2;
#pragma unroll 1
  for (int column = threadIdx.x % 2 * 8; column < (row / 16 + 1) * 16; column += 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = column + 2 * i;
      // Above the diagonal a half is zero; right of the halves nothing is read.
      const float2 pair = *reinterpret_cast<const float2*>(&matrix[row * kDeltaPitch + at]);
      words[i] = kScaled ? pack_pair<Format>(pair.x * beta[at], pair.y * beta[at + 1])
                         : pack_pair<Format>(pair.x, pair.y);
    }
    store_vector(solved + (row * kDeltaChunk + column) * 2, words);
  }
  delta_chunk_sync(team);
}

// The norms of two threads' row of a tile; 0 for a row of zeros' product with
// anything. `thread` is below kDeltaChunkThreads.
template <typename Format, int kKeySize>
__device__ __forceinline__ float row_norm(const char* tile, int thread) {
  const int row = thread / 2;
  const char* at = tile + row * (kKeySize * 2 + kDeltaPad) + thread % 2 * kKeySize;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeySize / 16; ++i) {
    uint32_t words[4];
    float values[8];
    load_vector(words, at + i * 16);
    unpack<Format>(words, values);
#pragma unroll
    for (float value : values) sum = fmaf(value, value, sum);
  }
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  return rsqrtf(sum + kDeltaNormEps);
}

// The beta of a token and head; tokens behind the end have no effect.
template <typename Format>
__device__ __forceinline__ float load_beta(const DeltaRuleArgs& args, int64_t place, bool real) {
  if (!real) return 0.0f;
  return args.beta_float ? load_element<Float32>(args.beta + place * 4)
                         : load_element<Format>(args.beta + place * 2);
}

// Sums of a head's gates, base 2, and its betas, by four warps; tokens behind
// the end have no effect.
template <typename Format>
__device__ __forceinline__ void load_numbers(const DeltaRuleArgs& args, int64_t first, int rows,
                                             int head, float* sums, float* beta) {
  const int thread = threadIdx.x;
  if (thread >= kDeltaChunk && thread < 2 * kDeltaChunk) {
    const int token = thread - kDeltaChunk;
    const int64_t place = (first + token) * args.v_heads + head;
    beta[token] = load_beta<Format>(args, place, token < rows);
  } else if (thread < 32) {
    float gates[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * thread + i;
      gates[i] = 0.0f;
      if (token < rows) {
        const float gate = args.g[(first + token) * args.v_heads + head];
        gates[i] = kLog2E * (gate < kDeltaLeastGate ? kDeltaLeastGate : gate);
      }
    }
    float sum = gates[0] + gates[1];
    const float own = sum;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(kFullWarp, sum, lanes);
      if (thread >= lanes) sum += other;
    }
    sums[2 * thread] = sum - own + gates[0];
    sums[2 * thread + 1] = sum;
  }
}

// The chunk of a block; without rows if there is none.
struct DeltaChunk {
  int64_t first;  // token
  int rows;
};

__device__ __forceinline__ DeltaChunk delta_chunk(const DeltaRuleArgs& args, int64_t place) {
  if (args.count == 0) return {0, 0};
  const DeltaSequence sequence = delta_sequence(args, delta_owner(args, place));
  const int64_t chunk = place - sequence.place;
  const int64_t first = sequence.begin + chunk * kDeltaChunk;
  if (chunk < 0 || first >= sequence.end) return {0, 0};
  return {first, static_cast<int>(min(int64_t{kDeltaChunk}, sequence.end - first))};
}

// Sums of the gates of a channel, by a thread each.
template <int kKeySize>
__device__ __forceinline__ void sum_gates(const DeltaRuleArgs& args, const DeltaChunk& chunk,
                                          int head, float* sums) {
  const int channel = threadIdx.x;
  if (channel >= kKeySize) return;
  const int64_t stride = static_cast<int64_t>(args.v_heads) * kKeySize;
  const float* const from = args.g + chunk.first * stride + head * kKeySize + channel;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < kDeltaChunk; first += kDeltaAhead) {
    float gates[kDeltaAhead];
#pragma unroll
    for (int i = 0; i < kDeltaAhead; ++i) {
      gates[i] = first + i < chunk.rows ? from[(first + i) * stride] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kDeltaAhead; ++i) {
      sum += kLog2E * (gates[i] < kDeltaLeastGate ? kDeltaLeastGate : gates[i]);
      sums[(first + i) * (kKeySize + 4) + channel] = sum;
    }
  }
}

// Zeros for tokens of no sequence among a place's 64 tokens, in some heads of `size` elements.
template <int kThreads>
__device__ __forceinline__ void clear_strays(const DeltaRuleArgs& args, int64_t place,
                                             const DeltaHeads& of, int first_head, int heads,
                                             int size) {
  const int64_t first = place * kDeltaChunk;
  const int64_t begin = delta_start(args, 0), end = delta_start(args, args.count);
  const int64_t last = min(first + kDeltaChunk, args.tokens);
  if (first >= begin && last <= end) return;
  const int vectors = size / 8;
  const uint32_t none[4] = {0, 0, 0, 0};
  for (int64_t token = first; token < last; ++token) {
    if (token >= begin && token < end) continue;
    for (int i = threadIdx.x; i < heads * vectors; i += kThreads) {
      char* to =
          of.data + token * of.token + (first_head + i / vectors) * of.head + i % vectors * 16;
      store_vector(to, none);
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_DELTA_SOLVE_CUH_
