// SPDX-License-Identifier: Apache-2.0
// Prepares a chunk whose keys have a gate per channel: the matrices of delta_chunks.cu, with the
// decay inside of the products, and the decayed keys and queries. A block has a chunk and a value
// head. Warps 0 to 3 multiply the keys, 16 rows each, and warps 4 to 7 the queries.
//
// In bfloat16 exp(G[i] - G[j]) is a product of two numbers, exp(G[i] - M) and exp(M - G[j]) with M
// in the middle of a half chunk, if no channel decays by more than 2^-kRange in 8 tokens. The
// products are then those of plain matrices; above the diagonal they may overflow, and are dropped.
// The other decays are products of these with a factor per channel, which is flushed to zero below
// 2^-126: the loss is below 2^-30 of a key or query.
//
// Otherwise, and in float16, rows and earlier columns are both decayed to the first of the rows, so
// that no exponent is positive; on the diagonal, blocks of 8 x 8 are summed element by element.
#include <cstdint>
#include <type_traits>

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
constexpr int kThreads = kDeltaChannelThreads;
constexpr int kBlocks = kTokens / 16;
constexpr int kStep = 4;         // rows that a thread decays together
constexpr float kRange = 48.0f;  // of 8 tokens, so that keys below 2^31 and their decays fit

template <int kKeySize>
struct Numbers {
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
  // Sums of a channel's gates, of the rows that each group of threads has.
  static constexpr int kGroups = kThreads / (kKeySize / 4);
  float parts[kGroups][kKeySize];
};

// The tiles of a block, and sums of its gates' logarithms, base 2.
template <typename Format, int kKeySize>
struct Tiles {
  static constexpr int kPitch = kKeySize * 2 + kDeltaPad;
  static constexpr int kSumPitch = kKeySize + 4;
  static constexpr int kRest = delta_channels_rest(kKeySize);
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

// Adds the products of a warp's rows, of q or k, with the earlier blocks of 16 columns, and of the
// lower half of its rows with the upper half's columns.
template <typename Format, int kKeySize>
__device__ __forceinline__ void multiply_earlier(const Tiles<Format, kKeySize>& tiles,
                                                 const char* rows, int block,
                                                 float (&products)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int across = lane / 4, along = lane % 4 * 2, begin = block * 16;
  float own[4] = {};  // of the tile that has the warp's first rows
#pragma unroll 1
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = begin + across + i % 2 * 8, column = depth + along + i / 2 * 8;
      a[i] = tiles.decayed(rows, row, column, tiles.decay(begin, row, column));
    }
#pragma unroll
    for (int tile = 0; tile < kTiles - 2; ++tile) {
      if (tile >= 2 * block) continue;
      uint32_t b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile * 8 + across, column = depth + along + i * 8;
        b[i] = tiles.decayed(tiles.k, row, column, tiles.decay(row, begin, column));
      }
      warp_multiply_add<Format>(products[tile], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    uint32_t b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = begin + 8 + across, column = depth + along + i * 8;
      a[2 * i + 1] = tiles.decayed(rows, row, column, tiles.decay(begin + 8, row, column));
      b[i] = tiles.decayed(tiles.k, row - 8, column, tiles.decay(row - 8, begin + 8, column));
    }
    warp_multiply_add<Format>(own, 0, a[1], 0, a[3], b[0], b[1]);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) products[tile][e] += tile == 2 * block ? own[e] : 0.0f;
  }
}

// The products of a row of k and of q with a row of k that is not later.
template <typename Format, int kKeySize>
__device__ __forceinline__ float2 multiply_rows_of(const Tiles<Format, kKeySize>& tiles, int row,
                                                   int other) {
  float2 sums = {0.0f, 0.0f};
#pragma unroll 2
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

// Adds the products of a warp's rows with the columns up to its last row. Columns of an earlier
// half chunk are those of `across`, decayed to the middle of the later half.
template <typename Format, int kKeySize>
__device__ __forceinline__ void multiply_decayed(uint32_t rows, uint32_t columns, uint32_t across,
                                                 int block, float (&products)[kTiles][4]) {
  constexpr int kPitch = Tiles<Format, kKeySize>::kPitch;
#pragma unroll 2
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t a[4];
    load_matrices<false>(a, block_by_columns(rows, kPitch, block * 16, depth));
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (pair > block) continue;
      uint32_t b[4];
      load_matrices<false>(
          b, block_by_rows(pair < 2 && block >= 2 ? across : columns, kPitch, pair * 16, depth));
      warp_multiply_add<Format>(products[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
      warp_multiply_add<Format>(products[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// With kBackward for gradients: the inverse is left without the betas, which go to the factors, and
// the keys' products go to the workspace too.
template <typename Format, int kKeySize, bool kBackward>
__global__ void __launch_bounds__(kThreads, 3)
    gated_delta_rule_channels(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = Tiles<Format, kKeySize>::kPitch;
  constexpr int kSumPitch = Tiles<Format, kKeySize>::kSumPitch;
  constexpr int kTileBytes = kTokens * kKeySize * 2;
  constexpr int kRest = Tiles<Format, kKeySize>::kRest;
  constexpr bool kFits = std::is_same_v<Format, BFloat16> && kKeySize == 128;
  extern __shared__ __align__(16) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  // Sums of the gates, or keys decayed the other way; later the matrix.
  char* const rest = k_tile + kTokens * kTilePitch;
  auto* const sums = reinterpret_cast<float*>(rest);
  char* const back_tile = rest;
  char* const across_tile = back_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(rest);
  float* const half = matrix + kTokens * kDeltaPitch;
  Numbers<kKeySize>& numbers = *reinterpret_cast<Numbers<kKeySize>*>(rest + kRest);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (!kBackward && args.starts != nullptr) {
    clear_strays<kThreads>(args, blockIdx.x, args.out, head, 1, args.value_size);
  }
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;
  const int key_head = head / (args.v_heads / args.k_heads);
  copy_rows<kKeySize * 2>(shared_address(q_tile), delta_row(args, args.q, chunk.first, key_head),
                          args.q.token, chunk.rows, thread, kThreads);
  copy_rows<kKeySize * 2>(shared_address(k_tile), delta_row(args, args.k, chunk.first, key_head),
                          args.k.token, chunk.rows, thread, kThreads);
  async_copy_commit();

  // A thread has four channels of some rows: sums of their gates within these.
  constexpr int kGroups = Numbers<kKeySize>::kGroups, kRows = kTokens / kGroups;
  static_assert(kRows % kStep == 0 && (!kFits || kRows == 8));
  const int group = thread / (kKeySize / 4), channel = thread % (kKeySize / 4) * 4;
  const bool aligned = reinterpret_cast<uintptr_t>(args.g) % 16 == 0;
  float own[kRows][4];
  bool fits = kFits;
  {
    const int64_t stride = static_cast<int64_t>(args.v_heads) * kKeySize;
    const float* from = args.g + (chunk.first + group * kRows) * stride + head * kKeySize + channel;
    const int rows = chunk.rows - group * kRows;
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += stride) {
      uint32_t words[4] = {0, 0, 0, 0};
      if (i < rows && aligned) {
        load_vector(words, from);
      } else if (i < rows) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(from[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i][j] = __uint_as_float(words[j]);
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[j] += kLog2E * (own[i][j] < kDeltaLeastGate ? kDeltaLeastGate : own[i][j]);
        own[i][j] = sum[j];
      }
    }
    *reinterpret_cast<float4*>(&numbers.parts[group][channel]) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) fits = fits && fabsf(sum[j]) <= kRange;
  }
  if (thread < kTokens) {
    const int64_t place = (chunk.first + thread) * args.v_heads + head;
    numbers.beta[thread] = load_beta<Format>(args, place, thread < chunk.rows);
  }
  async_copy_wait<0>();
  fits = __syncthreads_and(kFits && fits);
  {
    const bool of_k = thread >= kDeltaChunkThreads;
    const int at = thread % kDeltaChunkThreads;
    const float norm = args.l2norm ? row_norm<Format, kKeySize>(of_k ? k_tile : q_tile, at) : 1.0f;
    if (at % 2 == 0) {
      (of_k ? numbers.norm_k : numbers.norm_q)[at / 2] = of_k ? norm : norm * args.scale;
    }
  }
  // Sums up to the thread's rows, to the middles of both half chunks, and to the end.
  float begin[4] = {}, early[4] = {}, late[4] = {}, last[4] = {};
#pragma unroll 2
  for (int i = 0; i < kGroups; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(&numbers.parts[i][channel]);
    const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      last[j] += of[j];
      if (i + 1 == group) begin[j] = last[j];
      if (i == kGroups / 4 - 1) early[j] = last[j];
      if (i == kGroups / 4 * 3 - 1) late[j] = last[j];
    }
  }
  const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
  char* const to = args.tiles + place * 3 * kTileBytes;
  float* const factors = args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
  if (group == 0) {
    *reinterpret_cast<float4*>(&factors[channel]) = make_float4(
        exp2_approx(last[0]), exp2_approx(last[1]), exp2_approx(last[2]), exp2_approx(last[3]));
  }
  if (kBackward && thread < kTokens) factors[kDeltaFactors + thread] = numbers.beta[thread];
  __syncthreads();

  // Rows with their decays, to the workspace and for the products.
  const auto put = [](char* at, const float (&values)[4]) {
    const uint32_t words[2] = {pack_pair<Format>(values[0], values[1]),
                               pack_pair<Format>(values[2], values[3])};
    store_vector(at, words);
  };
  const auto decay_rows = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    const bool lower = group >= kGroups / 2;
    // From the middle of the half chunk to the chunk's begin and its end; half of what is between
    // both middles; and to the rows.
    float to_state[4], to_end[4], between[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float middle = kPlain ? (lower ? late[j] : early[j]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) own[i][j] += begin[j] - middle;
      to_state[j] = exp2_approx(middle), to_end[j] = exp2_approx(last[j] - middle);
      between[j] = exp2_approx(0.5f * (late[j] - early[j]));
    }
#pragma unroll 1
    for (int first = group * kRows; first < (group + 1) * kRows; first += kStep) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int row = first + i, at = row * kTilePitch + channel * 2;
        float k[4], q[4], left[4], sum[4];
        {
          const float of_k = numbers.norm_k[row], of_q = numbers.norm_q[row];
          uint32_t words[2];
          load_vector(words, k_tile + at);
          unpack<Format>(words, k);
          load_vector(words, q_tile + at);
          unpack<Format>(words, q);
#pragma unroll
          for (int j = 0; j < 4; ++j) k[j] *= of_k, q[j] *= of_q;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[j] = own[i][j];
          const float decay = exp2_approx(sum[j]);
          left[j] = k[j] * exp2_approx(kPlain ? -sum[j] : last[j] - sum[j]);
          k[j] *= decay, q[j] *= decay;
        }
        if constexpr (kPlain) {
          put(k_tile + at, k);
          put(q_tile + at, q);
          put(back_tile + at, left);
          if (!lower) {
            float across[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) across[j] = left[j] * between[j] * between[j];
            put(across_tile + at, across);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            k[j] *= to_state[j], q[j] *= to_state[j], left[j] *= to_end[j];
          }
        } else {
          *reinterpret_cast<float4*>(&sums[row * kSumPitch + channel]) =
              make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        char* const out = to + delta_tile_place<kKeySize, !kBackward>(row, channel);
        put(out, k);
        put(out + kTileBytes, q);
        put(out + 2 * kTileBytes, left);
      }
      // The next rows' sums move to registers that the loop's instructions name.
#pragma unroll
      for (int i = 0; i + kStep < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) own[i][j] = own[i + kStep][j];
      }
    }
  };
  if (kFits && fits) {
    decay_rows(std::bool_constant<kFits>());
  } else {
    decay_rows(std::false_type());
  }
  __syncthreads();
  // Elements have been divided by their rows' lengths then.
  if (kFits && fits && thread < kTokens) numbers.norm_q[thread] = numbers.norm_k[thread] = 1.0f;

  const Tiles<Format, kKeySize> tiles{q_tile, k_tile, sums};
  const int block = warp % kBlocks;
  const bool of_q = warp >= kBlocks;
  float products[kTiles][4] = {};
  // On the diagonal: 28 pairs of rows of each block of 8, and each row with itself.
  int row_of = 0, other_of = 0;
  float2 pair_of = {0.0f, 0.0f};
  float self = 0.0f;
  const int low_half = warp / kBlocks;  // the lower one of the block's two has warps 4 to 7
  if (kFits && fits) {
    multiply_decayed<Format, kKeySize>(shared_address(of_q ? q_tile : k_tile),
                                       shared_address(back_tile), shared_address(across_tile),
                                       block, products);
  } else {
    multiply_earlier(tiles, of_q ? q_tile : k_tile, block, products);
    if (lane < 28) {
      const int upper = lane / 7, at = lane % 7;
      const bool low = at < 7 - upper;
      row_of = block * 16 + low_half * 8 + (low ? 7 - upper : upper);
      other_of = block * 16 + low_half * 8 + (low ? at : at - (7 - upper));
      pair_of = multiply_rows_of(tiles, row_of, other_of);
    }
    if (lane < 8) {
      const int row = block * 16 + low_half * 8 + lane;
      self = multiply_rows_of(tiles, row, row).y;
    }
  }
  __syncthreads();
  char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
  char* const scores = solved + kDeltaMatrixBytes;
  char* const keys = kBackward ? args.products + place * kDeltaMatrixBytes : nullptr;
  {
    const int first_row = block * 16 + lane / 4, first_column = lane % 4 * 2;
    float of_row[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_row[i] = (of_q ? numbers.norm_q : numbers.norm_k)[first_row + 8 * i];
      beta[i] = numbers.beta[first_row + 8 * i];
    }
    // A lane's first elements; the others are at constant distances.
    const int first = first_row * kTokens + first_column;
    char* const score = scores + first * 2;
    float* const element = matrix + first_row * kDeltaPitch + first_column;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 > block) continue;
      const float2 norm =
          *reinterpret_cast<const float2*>(&numbers.norm_k[tile * 8 + first_column]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 8 * i + (of_q ? 1 : 0), column = tile * 8 + first_column;
        const float2 pair = {
            column < row ? of_row[i] * (norm.x * products[tile][2 * i]) : 0.0f,
            column + 1 < row ? of_row[i] * (norm.y * products[tile][2 * i + 1]) : 0.0f};
        const int at = 8 * i * kTokens + tile * 8;
        if (of_q) {
          *reinterpret_cast<uint32_t*>(score + at * 2) = pack_pair<Format>(pair.x, pair.y);
          continue;
        }
        *reinterpret_cast<float2*>(element + 8 * i * kDeltaPitch + tile * 8) = {beta[i] * pair.x,
                                                                                beta[i] * pair.y};
        if constexpr (kBackward) {
          *reinterpret_cast<uint32_t*>(keys + (first + at) * 2) = pack_pair<Format>(pair.x, pair.y);
        }
      }
    }
  }
  if (!kFits || !fits) {
    __syncthreads();
    const auto put_one = [&](char* matrix_of, int row, int column, float value) {
      *reinterpret_cast<uint16_t*>(matrix_of + (row * kTokens + column) * 2) =
          static_cast<uint16_t>(pack_pair<Format>(value, 0.0f));
    };
    if (lane < 28) {
      const float norm = numbers.norm_k[other_of];
      const float of_keys = numbers.norm_k[row_of] * norm * pair_of.x;
      matrix[row_of * kDeltaPitch + other_of] = numbers.beta[row_of] * of_keys;
      if constexpr (kBackward) put_one(keys, row_of, other_of, of_keys);
      put_one(scores, row_of, other_of, numbers.norm_q[row_of] * norm * pair_of.y);
    }
    if (lane < 8) {
      const int row = block * 16 + low_half * 8 + lane;
      put_one(scores, row, row, numbers.norm_q[row] * numbers.norm_k[row] * self);
    }
    __syncthreads();
  }
  if (of_q) return;
  delta_chunk_sync();
  solve_chunk<Format, !kBackward>(matrix, half, numbers.beta, solved);
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
