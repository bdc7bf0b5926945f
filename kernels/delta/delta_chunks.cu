// SPDX-License-Identifier: Apache-2.0
// Prepares the matrices of a chunk from its queries, keys and gates: for each value head the
// inverse of I + A, where A[i][j] = beta[i] (k[i] . k[j]) decay(j to i) below the diagonal, with
// columns times beta; and scale (q[i] . k[j]) decay(j to i) up to the diagonal. Four warps have a
// chunk and a key head.
//
// A block has four such warps and one chunk; or, if args.ready is given, three times four in a
// persistent block, which process the chunks of all sequences, the first chunks first, and signal
// the next kernel, which runs at the same time, when a chunk is done. That kernel starts once all
// blocks of this one have started, so no block here waits for it.
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
// Blocks of one team per multiprocessor: registers allow no more.
template <int kKeySize, bool kBackward>
constexpr int kBlocks = kKeySize == 128 && !kBackward ? 4 : 3;
template <int kKeySize>
constexpr int kTeamBytes = delta_chunks_smem(kKeySize, true);

struct Numbers {
  float gate[kTokens];  // sums of the gates' logarithms, base 2
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
};

// A chunk and a head of keys, in the order in which four warps after the other take them.
struct Item {
  int place;
  int key_head;
  DeltaChunk chunk;
};

// Chunks with the same number in sequences of equal length follow each other.
struct Items {
  uint32_t heads, sequences, each, count;

  __device__ __forceinline__ explicit Items(const DeltaRuleArgs& args)
      : heads(args.k_heads), sequences(max(args.count, 1)) {
    each = (static_cast<uint32_t>(args.places) + sequences - 1) / sequences;
    count = each * sequences * heads;
  }

  // A place at or behind args.places has no chunk.
  __device__ __forceinline__ Item find(const DeltaRuleArgs& args, uint32_t number) const {
    const uint32_t chunk = number / heads;
    Item item;
    item.place = static_cast<int>(chunk % sequences * each + chunk / sequences);
    item.key_head = static_cast<int>(number % heads);
    item.chunk = {0, 0};
    if (item.place < args.places) item.chunk = delta_chunk(args, item.place);
    return item;
  }
};

// With kBackward for gradients: the inverse is left without the betas, which go to the factors.
// With kStays a block stays, otherwise it has a chunk.
template <typename Format, int kKeySize, bool kBackward, bool kStays>
__global__ void __launch_bounds__(kDeltaChunkThreads*(kStays ? kDeltaChunkTeams : 1),
                                  kStays ? 1 : kBlocks<kKeySize, kBackward>)
    gated_delta_rule_chunks(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = kKeySize * 2 + kDeltaPad;
  extern __shared__ __align__(16) char all_shared[];
  const int team = kStays ? threadIdx.y : 0;
  char* const shared = all_shared + team * kTeamBytes<kKeySize>;
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  // The next chunk is copied while the matrix is in use. Without one, it overwrites the tiles.
  char* const rest = k_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(kStays ? rest : shared);
  float* const half = kStays ? matrix + kTokens * kDeltaPitch : reinterpret_cast<float*>(rest);
  Numbers& numbers = *reinterpret_cast<Numbers*>(half + kDeltaHalf * kDeltaHalfPitch);

  const int warp = threadIdx.x / 32;
  const Items items(args);
  const uint32_t teams = gridDim.x * kDeltaChunkTeams;
  uint32_t number = blockIdx.x * kDeltaChunkTeams + team;
  grid_dependency_wait();
  if constexpr (kStays) {
    for (uint32_t i = number + threadIdx.x * teams; i < items.count;
         i += kDeltaChunkThreads * teams) {
      const Item item = items.find(args, i);
      if (item.place < args.places) args.ready[item.key_head * args.places + item.place] = 0;
    }
    __threadfence();
    __syncthreads();
  }
  grid_dependency_launch();

  const uint32_t q_at = static_cast<uint32_t>(__cvta_generic_to_shared(q_tile));
  const uint32_t k_at = static_cast<uint32_t>(__cvta_generic_to_shared(k_tile));
  // The heads of values that a block has, of those that share keys: all, or as many as blocks do.
  const int sharing = kStays ? 1 : gridDim.y / args.k_heads;
  const int group = args.v_heads / args.k_heads / sharing;
  const auto copy = [&](const Item& item) {
    const auto [first, rows] = item.chunk;
    if (rows > 0) {
      copy_rows<kKeySize * 2>(q_at, delta_row(args, args.q, first, item.key_head), args.q.token,
                              rows, threadIdx.x, kDeltaChunkThreads);
      copy_rows<kKeySize * 2>(k_at, delta_row(args, args.k, first, item.key_head), args.k.token,
                              rows, threadIdx.x, kDeltaChunkThreads);
    }
    async_copy_commit();
  };
  const auto find = [&] {
    if (kStays) return items.find(args, number);
    return Item{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y) / sharing,
                delta_chunk(args, blockIdx.x)};
  };
  if (kStays && number >= items.count) return;
  copy(find());
#pragma unroll 1
  while (true) {
    const Item item = find();
    const int key_head = item.key_head;
    const int first_head = (kStays ? key_head : blockIdx.y) * group;
    const int place_of_chunk = item.place;
    const auto [first, rows] = item.chunk;
    if (!kBackward && args.starts != nullptr && place_of_chunk < args.places) {
      clear_strays<kDeltaChunkThreads>(args, place_of_chunk, args.out, first_head, group,
                                       args.value_size);
    }
    async_copy_wait<0>();
    delta_chunk_sync(team);
    number += teams;
    const bool more = kStays && number < items.count;
    if (rows > 0) {
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
            warp_multiply_add<Format>(kk[tile], k_rows[0], k_rows[1], k_rows[2], k_rows[3],
                                      b[2 * i], b[2 * i + 1]);
            warp_multiply_add<Format>(qk[tile], q_rows[0], q_rows[1], q_rows[2], q_rows[3],
                                      b[2 * i], b[2 * i + 1]);
          }
        }
      }

      if (more) {
        delta_chunk_sync(team);  // the tiles have been read
        copy(find());
      }

#pragma unroll 1
      for (int member = 0; member < group; ++member) {
        const int head = first_head + member;
        // Opaque, so that addresses are not kept in registers over all heads, and some spilled.
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (!kStays) asm volatile("" : "+r"(lane), "+r"(warp));
        const int64_t place = int64_t{place_of_chunk} * args.v_heads + head;
        char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
        char* const scores = solved + kDeltaMatrixBytes;
        load_numbers<Format>(args, first, rows, head, numbers.gate, numbers.beta);
        delta_chunk_sync(team);
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
        delta_chunk_sync(team);
        solve_chunk<Format, !kBackward>(matrix, half, numbers.beta, solved, team);
        if (threadIdx.x < kTokens) {
          float* const factors =
              args.factors + place * (kBackward ? kDeltaBackFactors : kDeltaFactors);
          const int token = threadIdx.x;
          const float gate = numbers.gate[token], last = numbers.gate[kTokens - 1];
          const float decay = exp2_approx(gate);
          factors[token] = decay * numbers.norm_k[token];
          factors[kTokens + token] = decay * numbers.norm_q[token];
          factors[2 * kTokens + token] = exp2_approx(last - gate) * numbers.norm_k[token];
          // A token multiplies a state by at most its decay if its key is of length 1 at most, and
          // its beta from 0 to 2.
          const float beta = numbers.beta[token];
          const bool shrinks =
              __all_sync(kFullWarp, args.l2norm && beta >= 0.0f && beta <= 2.0f) != 0;
          if (token % 32 == 0) {
            factors[3 * kTokens + token / 32] = exp2_approx(last);
            factors[3 * kTokens + 2 + token / 32] = shrinks ? last : 0.0f;
          }
          if (kBackward) factors[kDeltaFactors + token] = numbers.beta[token];
        }
        delta_chunk_sync(team);
      }
    } else if (more) {
      copy(find());
    }
    if (kStays && threadIdx.x == 0 && place_of_chunk < args.places) {
      // The barrier behind the last head has the stores of all of these warps before it. Chunks
      // without tokens count too: where starts decrease, the next kernel may wait for one.
      delta_publish(args.ready + key_head * args.places + place_of_chunk);
    }
    if (!more) return;
  }
}

#define TIERCEL_CHUNKS(dtype, size, part, suffix, backward, stays)                              \
  {DeltaPart::part, size, DType::k##dtype, false,                                               \
   Kernel("gated_delta_rule_chunks<" #dtype ", K=" #size suffix ">",                            \
          reinterpret_cast<const void*>(gated_delta_rule_chunks<dtype, size, backward, stays>), \
          ((stays) ? kDeltaChunkTeams : 1) * delta_chunks_smem(size, stays))}

#define TIERCEL_CHUNKS_OF(dtype, size)                                     \
  TIERCEL_CHUNKS(dtype, size, kChunks, "", false, false),                  \
      TIERCEL_CHUNKS(dtype, size, kStayingChunks, ", stays", false, true), \
      TIERCEL_CHUNKS(dtype, size, kBackChunks, ", backward", true, false)

const DeltaRuleKernel kKernels[] = {
    TIERCEL_CHUNKS_OF(BFloat16, 64), TIERCEL_CHUNKS_OF(BFloat16, 128),
    TIERCEL_CHUNKS_OF(Float16, 64), TIERCEL_CHUNKS_OF(Float16, 128)};

}  // namespace

const DeltaRuleKernel* delta_chunks_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
