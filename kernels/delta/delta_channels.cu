// SPDX-License-Identifier: Apache-2.0
// Prepares a chunk whose keys have a gate for each channel: what delta_chunks.cu makes, where the
// decay is inside of the products, and the keys and queries with their decays. A block has a chunk
// and a head of values. Warps 0 to 3 multiply the keys, 16 rows each, and warps 4 to 7 the queries.
//
// In bfloat16 exp(G[i] - G[j]) is a product of two numbers, exp(G[i] - M) and exp(M - G[j]) with M
// in the middle of a half chunk, if no channel decays by more than 2^-kRange in 16 tokens. Products
// are those of a plain matrix then; where rows are earlier than columns they may overflow, and are
// dropped.
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
constexpr int kThreads = kDeltaPrepareThreads;
constexpr int kParts = 4;  // of a chunk, each with its sums of the gates
constexpr int kRows = kTokens / kParts;
constexpr int kStep = 4;  // rows that are decayed together
constexpr float kRange = 96.0f;  // so that keys below 2^31 and their decays fit

template <int kKeySize>
struct Numbers {
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
  float parts[kParts][kKeySize];
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
      load_matrices<false>(b, block_by_rows(pair < 2 && block >= 2 ? across : columns, kPitch,
                                            pair * 16, depth));
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
  Numbers<kKeySize>& numbers =
      *reinterpret_cast<Numbers<kKeySize>*>(rest + kRest);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (!kBackward && args.starts != nullptr) {
    clear_strays<kThreads>(args, args.out, head, 1, args.value_size);
  }
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;
  const int key_head = head / (args.v_heads / args.k_heads);
  copy_rows<kKeySize * 2>(shared_address(q_tile), delta_row(args, args.q, chunk.first, key_head),
                          args.q.token, chunk.rows, thread, kThreads);
  copy_rows<kKeySize * 2>(shared_address(k_tile), delta_row(args, args.k, chunk.first, key_head),
                          args.k.token, chunk.rows, thread, kThreads);
  async_copy_commit();

  // A thread has two channels of a part: sums of their gates within it.
  const int part = thread / (kKeySize / 2), channel = thread % (kKeySize / 2) * 2;
  const bool busy = part < kParts;
  float2 own[kRows];
  bool fits = kFits;
  if (busy) {
    const int64_t stride = static_cast<int64_t>(args.v_heads) * kKeySize;
    const float* const from = args.g + chunk.first * stride + head * kKeySize + channel;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = part * kRows + i;
      own[i] = {0.0f, 0.0f};
      if (row < chunk.rows) own[i] = {from[row * stride], from[row * stride + 1]};
    }
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum.x += kLog2E * (own[i].x < kDeltaLeastGate ? kDeltaLeastGate : own[i].x);
      sum.y += kLog2E * (own[i].y < kDeltaLeastGate ? kDeltaLeastGate : own[i].y);
      own[i] = sum;
    }
    *reinterpret_cast<float2*>(&numbers.parts[part][channel]) = sum;
    fits = fits && fabsf(sum.x) <= kRange && fabsf(sum.y) <= kRange;
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
    const float norm =
        args.l2norm ? row_norm<Format, kKeySize>(of_k ? k_tile : q_tile, at) : 1.0f;
    if (at % 2 == 0) {
      (of_k ? numbers.norm_k : numbers.norm_q)[at / 2] = of_k ? norm : norm * args.scale;
    }
  }
  float2 before[kParts + 1];  // sums up to each part
  before[0] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float2 of = *reinterpret_cast<const float2*>(&numbers.parts[i][channel]);
    before[i + 1] = {before[i].x + of.x, before[i].y + of.y};
  }
  const float2 last = before[kParts];
  const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
  char* const to = args.tiles + place * 3 * kTileBytes;
  float* const factors = args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
  if (part == 0) {
    *reinterpret_cast<float2*>(&factors[channel]) = {exp2_approx(last.x), exp2_approx(last.y)};
  }
  if (kBackward && thread < kTokens) factors[kDeltaFactors + thread] = numbers.beta[thread];
  __syncthreads();

  // Elements of both tiles with their decays, to the workspace.
  const auto store = [&](int row, const float (&k)[2], const float (&q)[2], float2 sum) {
    const float of_k = numbers.norm_k[row], of_q = numbers.norm_q[row];
    const float2 decay = {exp2_approx(sum.x), exp2_approx(sum.y)};
    const float2 left = {exp2_approx(last.x - sum.x), exp2_approx(last.y - sum.y)};
    const uint32_t words[3] = {
        pack_pair<Format>(k[0] * (decay.x * of_k), k[1] * (decay.y * of_k)),
        pack_pair<Format>(q[0] * (decay.x * of_q), q[1] * (decay.y * of_q)),
        pack_pair<Format>(k[0] * (left.x * of_k), k[1] * (left.y * of_k))};
    char* const at = to + delta_tile_place<kKeySize, !kBackward>(row, channel);
#pragma unroll
    for (int j = 0; j < 3; ++j) *reinterpret_cast<uint32_t*>(at + j * kTileBytes) = words[j];
  };
  const auto word = [&](char* tile, int row) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(tile + row * kTilePitch + channel * 2);
  };
  if (busy) {
    const float2 begin = part == 0   ? before[0]
                         : part == 1 ? before[1]
                         : part == 2 ? before[2]
                                     : before[3];
    const float2 middle = part < 2 ? before[1] : before[3];
#pragma unroll 1
    for (int first = part * kRows; first < (part + 1) * kRows; first += kStep) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int row = first + i;
        float k[2], q[2];
        Format::unpack(word(k_tile, row), k);
        Format::unpack(word(q_tile, row), q);
        const float2 sum = {begin.x + own[i].x, begin.y + own[i].y};
        store(row, k, q, sum);
        if (kFits && fits) {
          const float2 up = {sum.x - middle.x, sum.y - middle.y};
          const float2 decay = {exp2_approx(up.x), exp2_approx(up.y)};
          const float2 back = {exp2_approx(-up.x), exp2_approx(-up.y)};
          word(k_tile, row) = pack_pair<Format>(k[0] * decay.x, k[1] * decay.y);
          word(q_tile, row) = pack_pair<Format>(q[0] * decay.x, q[1] * decay.y);
          word(back_tile, row) = pack_pair<Format>(k[0] * back.x, k[1] * back.y);
          if (part < 2) {
            const float2 later = before[3];
            word(across_tile, row) = pack_pair<Format>(k[0] * exp2_approx(later.x - sum.x),
                                                       k[1] * exp2_approx(later.y - sum.y));
          }
        } else {
          *reinterpret_cast<float2*>(&sums[row * kSumPitch + channel]) = sum;
        }
      }
      // The next rows' sums move to registers that the loop's instructions name.
#pragma unroll
      for (int i = 0; i + kStep < kRows; ++i) own[i] = own[i + kStep];
    }
  }
  __syncthreads();

  const Tiles<Format, kKeySize> tiles{q_tile, k_tile, sums};
  const int block = warp % kParts;
  const bool of_q = warp >= kParts;
  char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
  char* const scores = solved + kDeltaMatrixBytes;
  char* const keys = kBackward ? args.products + place * kDeltaMatrixBytes : nullptr;
  float products[kTiles][4] = {};
  // On the diagonal: 28 pairs of rows of each block of 8, and each row with itself.
  int row_of = 0, other_of = 0;
  float2 pair_of = {0.0f, 0.0f};
  float self = 0.0f;
  const int low_half = warp / kParts;  // the lower one of the block's two has warps 4 to 7
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
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile / 2 > block) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = block * 16 + lane / 4 + 8 * i, column = tile * 8 + lane % 4 * 2;
      const float2 norm = *reinterpret_cast<const float2*>(&numbers.norm_k[column]);
      const float own_norm = (of_q ? numbers.norm_q : numbers.norm_k)[row];
      const bool first = of_q ? column <= row : column < row;
      const bool second = of_q ? column + 1 <= row : column + 1 < row;
      const float2 pair = {first ? own_norm * norm.x * products[tile][2 * i] : 0.0f,
                           second ? own_norm * norm.y * products[tile][2 * i + 1] : 0.0f};
      const int at = row * kTokens + column;
      if (of_q) {
        *reinterpret_cast<uint32_t*>(scores + at * 2) = pack_pair<Format>(pair.x, pair.y);
        continue;
      }
      const float beta = numbers.beta[row];
      *reinterpret_cast<float2*>(&matrix[row * kDeltaPitch + column]) = {beta * pair.x,
                                                                         beta * pair.y};
      if constexpr (kBackward) {
        *reinterpret_cast<uint32_t*>(keys + at * 2) = pack_pair<Format>(pair.x, pair.y);
      }
    }
  }
  if (!kFits || !fits) {
    __syncthreads();
    const auto put = [&](char* matrix_of, int row, int column, float value) {
      *reinterpret_cast<uint16_t*>(matrix_of + (row * kTokens + column) * 2) =
          static_cast<uint16_t>(pack_pair<Format>(value, 0.0f));
    };
    if (lane < 28) {
      const float norm = numbers.norm_k[other_of];
      const float of_keys = numbers.norm_k[row_of] * norm * pair_of.x;
      matrix[row_of * kDeltaPitch + other_of] = numbers.beta[row_of] * of_keys;
      if constexpr (kBackward) put(keys, row_of, other_of, of_keys);
      put(scores, row_of, other_of, numbers.norm_q[row_of] * norm * pair_of.y);
    }
    if (lane < 8) {
      const int row = block * 16 + low_half * 8 + lane;
      put(scores, row, row, numbers.norm_q[row] * numbers.norm_k[row] * self);
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
