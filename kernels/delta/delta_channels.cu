// SPDX-License-Identifier: Apache-2.0
// Prepares a chunk whose keys have a gate for each channel: what delta_chunks.cu makes, where the
// decay is inside of the products, and the keys and queries with their decays. A block has a chunk
// and a head of values.
//
// exp(G[i] - G[j]) is no product of a number of i and one of j that fits a float, whatever the
// gates. A product of rows and earlier columns decays both to the first of the rows instead, so
// that no exponent is positive; on the diagonal, blocks of 8 x 8 are summed element by element.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kTiles = kTokens / 8;

struct Numbers {
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
};

// The tiles of a block, and sums of its gates' logarithms, base 2.
template <typename Format, int kKeySize>
struct Tiles {
  static constexpr int kPitch = kKeySize * 2 + kDeltaPad;
  static constexpr int kSumPitch = kKeySize + 4;
  const char* q;
  const char* k;
  const float* sums;

  __device__ __forceinline__ const float* sum(int row, int column) const {
    return sums + row * kSumPitch + column;
  }
  // Two elements of a row of q or k, with the decay of `row` against that of `reference`.
  __device__ __forceinline__ uint32_t decayed(const char* tile, int row, int column,
                                              float2 factors) const {
    float pair[2];
    Format::unpack(*reinterpret_cast<const uint32_t*>(tile + row * kPitch + column * 2), pair);
    return pack_pair<Format>(pair[0] * factors.x, pair[1] * factors.y);
  }
  // exp of what the gates sum to from `first` to `last`, of two channels.
  __device__ __forceinline__ float2 decay(int first, int last, int column) const {
    const float2 a = *reinterpret_cast<const float2*>(sum(first, column));
    const float2 b = *reinterpret_cast<const float2*>(sum(last, column));
    return {exp2_approx(b.x - a.x), exp2_approx(b.y - a.y)};
  }
  // Four elements of a row.
  __device__ __forceinline__ void load_four(const char* tile, int row, int column,
                                            float (&values)[4]) const {
    uint32_t words[2];
    load_vector(words, tile + row * kPitch + column * 2);
    unpack<Format>(words, values);
  }
};

// Adds the products of the warp's rows with the earlier blocks of 16 columns, and of the lower half
// of its rows with the upper half's columns.
template <typename Format, int kKeySize>
__device__ __forceinline__ void multiply_earlier(const Tiles<Format, kKeySize>& tiles,
                                                 float (&kk)[kTiles][4], float (&qk)[kTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int across = lane / 4, along = lane % 4 * 2, begin = warp * 16;
  float own_k[4] = {}, own_q[4] = {};  // of the tile that has the warp's first rows
#pragma unroll 1
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t k_rows[4], q_rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = begin + across + i % 2 * 8, column = depth + along + i / 2 * 8;
      const float2 factors = tiles.decay(begin, row, column);
      k_rows[i] = tiles.decayed(tiles.k, row, column, factors);
      q_rows[i] = tiles.decayed(tiles.q, row, column, factors);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles - 2; ++tile) {
      if (tile >= 2 * warp) continue;
      uint32_t b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile * 8 + across, column = depth + along + i * 8;
        b[i] = tiles.decayed(tiles.k, row, column, tiles.decay(row, begin, column));
      }
      warp_multiply_add<Format>(kk[tile], k_rows[0], k_rows[1], k_rows[2], k_rows[3], b[0], b[1]);
      warp_multiply_add<Format>(qk[tile], q_rows[0], q_rows[1], q_rows[2], q_rows[3], b[0], b[1]);
    }
    uint32_t b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = begin + 8 + across, column = depth + along + i * 8;
      const float2 factors = tiles.decay(begin + 8, row, column);
      k_rows[2 * i + 1] = tiles.decayed(tiles.k, row, column, factors);
      q_rows[2 * i + 1] = tiles.decayed(tiles.q, row, column, factors);
      b[i] = tiles.decayed(tiles.k, row - 8, column, tiles.decay(row - 8, begin + 8, column));
    }
    warp_multiply_add<Format>(own_k, 0, k_rows[1], 0, k_rows[3], b[0], b[1]);
    warp_multiply_add<Format>(own_q, 0, q_rows[1], 0, q_rows[3], b[0], b[1]);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      kk[tile][e] += tile == 2 * warp ? own_k[e] : 0.0f;
      qk[tile][e] += tile == 2 * warp ? own_q[e] : 0.0f;
    }
  }
}

// The products of two rows, the second of which is not later.
template <typename Format, int kKeySize>
__device__ __forceinline__ float2 multiply_rows_of(const Tiles<Format, kKeySize>& tiles, int row,
                                                   int other) {
  float2 sums = {0.0f, 0.0f};
#pragma unroll 4
  for (int column = 0; column < kKeySize; column += 4) {
    float k[4], q[4], keys[4], factors[4];
    tiles.load_four(tiles.k, row, column, k);
    tiles.load_four(tiles.q, row, column, q);
    tiles.load_four(tiles.k, other, column, keys);
    const float4 a = *reinterpret_cast<const float4*>(tiles.sum(row, column));
    const float4 b = *reinterpret_cast<const float4*>(tiles.sum(other, column));
    factors[0] = exp2_approx(a.x - b.x), factors[1] = exp2_approx(a.y - b.y);
    factors[2] = exp2_approx(a.z - b.z), factors[3] = exp2_approx(a.w - b.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float key = keys[i] * factors[i];
      sums.x = fmaf(k[i], key, sums.x), sums.y = fmaf(q[i], key, sums.y);
    }
  }
  return sums;
}

// With kBackward for gradients: the inverse is left without the betas, which go to the factors, and
// the keys' products go to the workspace too.
template <typename Format, int kKeySize, bool kBackward>
__global__ void __launch_bounds__(kDeltaChunkThreads, 2)
    gated_delta_rule_channels(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = Tiles<Format, kKeySize>::kPitch;
  constexpr int kTileBytes = kTokens * kKeySize * 2;
  extern __shared__ __align__(16) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(k_tile + kTokens * kTilePitch);
  float* const half = matrix + kTokens * kDeltaPitch;
  float* const sums = half + kDeltaHalf * kDeltaHalfPitch;
  Numbers& numbers = *reinterpret_cast<Numbers*>(sums + kTokens * (kKeySize + 4));

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (!kBackward && args.starts != nullptr) {
    clear_strays<kDeltaChunkThreads>(args, args.out, head, 1, args.value_size);
  }
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;
  const int key_head = head / (args.v_heads / args.k_heads);
  copy_rows<kKeySize * 2>(shared_address(q_tile), delta_row(args, args.q, chunk.first, key_head),
                          args.q.token, chunk.rows, thread, kDeltaChunkThreads);
  copy_rows<kKeySize * 2>(shared_address(k_tile), delta_row(args, args.k, chunk.first, key_head),
                          args.k.token, chunk.rows, thread, kDeltaChunkThreads);
  async_copy_commit();
  sum_gates<kKeySize>(args, chunk, head, sums);
  if (thread < kTokens) {
    const int64_t place = (chunk.first + thread) * args.v_heads + head;
    numbers.beta[thread] = load_beta<Format>(args, place, thread < chunk.rows);
  }
  async_copy_wait<0>();
  __syncthreads();
  const float norm_q = args.l2norm ? row_norm<Format, kKeySize>(q_tile, threadIdx.x) : 1.0f;
  const float norm_k = args.l2norm ? row_norm<Format, kKeySize>(k_tile, threadIdx.x) : 1.0f;
  if (thread % 2 == 0) {
    numbers.norm_q[thread / 2] = norm_q * args.scale;
    numbers.norm_k[thread / 2] = norm_k;
  }
  __syncthreads();

  const Tiles<Format, kKeySize> tiles{q_tile, k_tile, sums};
  const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
  char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
  char* const scores = solved + kDeltaMatrixBytes;
  char* const products = kBackward ? args.products + place * kDeltaMatrixBytes : nullptr;
  {
    float kk[kTiles][4] = {}, qk[kTiles][4] = {};
    multiply_earlier(tiles, kk, qk);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 > warp) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp * 16 + lane / 4 + 8 * i, column = tile * 8 + lane % 4 * 2;
        const float of_k = numbers.beta[row] * numbers.norm_k[row], of_q = numbers.norm_q[row];
        const float2 norm = *reinterpret_cast<const float2*>(&numbers.norm_k[column]);
        *reinterpret_cast<float2*>(&matrix[row * kDeltaPitch + column]) =
            make_float2(of_k * norm.x * kk[tile][2 * i], of_k * norm.y * kk[tile][2 * i + 1]);
        *reinterpret_cast<uint32_t*>(scores + (row * kTokens + column) * 2) =
            pack_pair<Format>(of_q * norm.x * qk[tile][2 * i], of_q * norm.y * qk[tile][2 * i + 1]);
        if constexpr (kBackward) {
          const float own = numbers.norm_k[row];
          *reinterpret_cast<uint32_t*>(products + (row * kTokens + column) * 2) =
              pack_pair<Format>(own * norm.x * kk[tile][2 * i], own * norm.y * kk[tile][2 * i + 1]);
        }
      }
    }
  }
  __syncwarp();
  // On the diagonal: 28 pairs of rows of each block of 8, then each row with itself.
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
    int row, other;
    if (round < 2) {
      if (lane >= 28) continue;
      const int upper = lane / 7, at = lane % 7;
      const bool low = at < 7 - upper;
      row = warp * 16 + round * 8 + (low ? 7 - upper : upper);
      other = warp * 16 + round * 8 + (low ? at : at - (7 - upper));
    } else {
      if (lane >= 16) continue;
      row = other = warp * 16 + lane;
    }
    const float2 sums_of = multiply_rows_of(tiles, row, other);
    const float norm = numbers.norm_k[other];
    if (round < 2) {
      matrix[row * kDeltaPitch + other] =
          numbers.beta[row] * numbers.norm_k[row] * norm * sums_of.x;
      if constexpr (kBackward) {
        const uint32_t word = pack_pair<Format>(numbers.norm_k[row] * norm * sums_of.x, 0.0f);
        *reinterpret_cast<uint16_t*>(products + (row * kTokens + other) * 2) =
            static_cast<uint16_t>(word);
      }
    }
    const uint32_t word = pack_pair<Format>(numbers.norm_q[row] * norm * sums_of.y, 0.0f);
    *reinterpret_cast<uint16_t*>(scores + (row * kTokens + other) * 2) =
        static_cast<uint16_t>(word);
  }
  __syncthreads();
  solve_chunk<Format, !kBackward>(matrix, half, numbers.beta, solved);

  char* const to = args.tiles + place * 3 * kTileBytes;
  constexpr int kVectors = kKeySize / 8;
#pragma unroll 1
  for (int i = thread; i < kTokens * kVectors; i += kDeltaChunkThreads) {
    const int row = i / kVectors, column = i % kVectors * 8;
    uint32_t words[3][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 sum = *reinterpret_cast<const float2*>(tiles.sum(row, column + 2 * j));
      const float2 decay = {exp2_approx(sum.x), exp2_approx(sum.y)};
      const float2 rest = tiles.decay(row, kTokens - 1, column + 2 * j);
      const float of_k = numbers.norm_k[row], of_q = numbers.norm_q[row];
      const int at = column + 2 * j;
      words[0][j] = tiles.decayed(k_tile, row, at, {decay.x * of_k, decay.y * of_k});
      words[1][j] = tiles.decayed(q_tile, row, at, {decay.x * of_q, decay.y * of_q});
      words[2][j] = tiles.decayed(k_tile, row, at, {rest.x * of_k, rest.y * of_k});
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) store_vector(to + j * kTileBytes + i * 16, words[j]);
  }
  float* const factors = args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
  if (thread < kKeySize) factors[thread] = exp2_approx(*tiles.sum(kTokens - 1, thread));
  if (kBackward && thread < kTokens) factors[kDeltaFactors + thread] = numbers.beta[thread];
}

#define TIERCEL_CHANNELS(dtype, size, backward)                                            \
  {backward ? DeltaPart::kBackChunks : DeltaPart::kChunks, size, DType::k##dtype, true,    \
   Kernel((backward) ? "gated_delta_rule_channels<" #dtype ", K=" #size ", backward>"      \
                     : "gated_delta_rule_channels<" #dtype ", K=" #size ">",               \
          reinterpret_cast<const void*>(gated_delta_rule_channels<dtype, size, backward>), \
          delta_channels_smem(size))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_CHANNELS(BFloat16, 64, false), TIERCEL_CHANNELS(BFloat16, 128, false),
    TIERCEL_CHANNELS(Float16, 64, false),  TIERCEL_CHANNELS(Float16, 128, false),
    TIERCEL_CHANNELS(BFloat16, 64, true),  TIERCEL_CHANNELS(BFloat16, 128, true),
    TIERCEL_CHANNELS(Float16, 64, true),   TIERCEL_CHANNELS(Float16, 128, true),
};

}  // namespace

const DeltaRuleKernel* delta_channels_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
