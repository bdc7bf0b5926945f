// SPDX-License-Identifier: Apache-2.0
// A state goes through the chunks of a sequence. A warp has 16 columns of a head's state in
// registers, transposed: [16, K]. All products keep that form, so that the result of one is the
// operand of the next where it is, and a warp waits for no other but for the tiles.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kPairs = kTokens / 16;  // of tiles of eight tokens
constexpr int kMatrixPitch = kTokens * 2 + kDeltaPad;
constexpr int kFactorVectors = kDeltaFactors / 4;

template <int kKeySize>
struct Stage {
  static constexpr int kPitch = kKeySize * 2 + kDeltaPad;
  uint32_t q, k, solved, scores, v, factors;

  __device__ __forceinline__ Stage(uint32_t begin, int value_pitch) {
    q = begin;
    k = q + kTokens * kPitch;
    solved = k + kTokens * kPitch;
    scores = solved + kTokens * kMatrixPitch;
    v = scores + kTokens * kMatrixPitch;
    factors = v + kTokens * value_pitch;
  }
};

__device__ __forceinline__ float2 load_two(uint32_t place) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(place));
  return pair;
}

// The number of a thread among those that load.
__device__ __forceinline__ int loader_thread() {
  return static_cast<int>(threadIdx.x) - static_cast<int>(blockDim.x) + kDeltaLoaders;
}

// Rows of a triangular matrix, up to the end of the block of 16 that has the diagonal.
__device__ __forceinline__ void copy_triangle(uint32_t tile, const char* from) {
  for (int i = loader_thread(); i < kTokens * 8; i += kDeltaLoaders) {
    const int row = i / 8, vector = i % 8;
    if (vector > row / 16 * 2 + 1) continue;
    async_copy_16(tile + row * kMatrixPitch + vector * 16, from + i * 16, true);
  }
}

template <int kKeySize>
__device__ __forceinline__ void copy_stage(const DeltaRuleArgs& args, const Stage<kKeySize>& stage,
                                           const DeltaSequence& sequence, int64_t chunk, int head,
                                           int column, int value_pitch) {
  const int64_t first = sequence.begin + chunk * kTokens;
  const int rows = static_cast<int>(min(int64_t{kTokens}, sequence.end - first));
  const int key_head = head / (args.v_heads / args.k_heads);
  copy_rows<kKeySize * 2>(stage.k, delta_row(args, args.k, first, key_head), args.k.token, rows,
                          loader_thread(), kDeltaLoaders);
  const int vectors = (value_pitch - kDeltaPad) / 16;
  const char* v = delta_row(args, args.v, first, head) + column * 2;
  for (int i = loader_thread(); i < kTokens * vectors; i += kDeltaLoaders) {
    const int row = i / vectors, vector = i % vectors;
    async_copy_16(stage.v + row * value_pitch + vector * 16,
                  v + (row < rows ? row : 0) * args.v.token + vector * 16, row < rows);
  }
  copy_rows<kKeySize * 2>(stage.q, delta_row(args, args.q, first, key_head), args.q.token, rows,
                          loader_thread(), kDeltaLoaders);
  const int64_t place = (sequence.place + chunk) * args.v_heads + head;
  const char* matrices = args.matrices + place * 2 * kDeltaMatrixBytes;
  copy_triangle(stage.solved, matrices);
  copy_triangle(stage.scores, matrices + kDeltaMatrixBytes);
  const float* factors = args.factors + place * kDeltaFactors;
  for (int i = loader_thread(); i < kFactorVectors; i += kDeltaLoaders) {
    async_copy_16(stage.factors + i * 16, factors + 4 * i, true);
  }
}

template <int kKeySize>
__global__ void __launch_bounds__(32 * kDeltaMostWarps + kDeltaLoaders, 1)
    gated_delta_rule(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTiles = kKeySize / 8;
  constexpr int kDepths = kKeySize / 16;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int across = lane / 4, along = lane % 4 * 2;  // of a fragment: its row and first column
  const int warps = (static_cast<int>(blockDim.x) - kDeltaLoaders) / 32;  // that compute
  const int width = warps * kDeltaWarpColumns;
  const int value_pitch = width * 2 + kDeltaPad;
  const int slices = args.value_size / width;
  const int column = static_cast<int>(blockIdx.x % slices) * width;
  const int head = blockIdx.x / slices % args.v_heads;
  const int index = blockIdx.x / slices / args.v_heads;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int stage_bytes = delta_rule_stage(kKeySize, warps);
  grid_dependency_wait();
  grid_dependency_launch();

  const DeltaSequence sequence = delta_sequence(args, index);
  const int64_t chunks = (sequence.end - sequence.begin + kTokens - 1) / kTokens;
  const auto stage_of = [&](int64_t chunk) {
    return Stage<kKeySize>(base + static_cast<int>(chunk % kDeltaStages) * stage_bytes,
                           value_pitch);
  };
  if (warp >= warps) {
    // Chunk c is here, and nobody reads chunk c - 1 any more, once all have met for the c-th time.
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      copy_stage(args, stage_of(chunk), sequence, chunk, head, column, value_pitch);
      async_copy_commit();
      async_copy_wait<0>();
      __syncthreads();
    }
    return;
  }

  // Element e of tile n: row across + e / 2 * 8, a column of the state, and of the keys 8 n + along
  // + e % 2.
  float state[kTiles][4];
  const int64_t of_head = (static_cast<int64_t>(index) * args.v_heads + head) * kKeySize;
  const auto place_in_state = [&](int tile, int e) {
    return (of_head + tile * 8 + along + e % 2) * args.value_size + column +
           warp * kDeltaWarpColumns + across + e / 2 * 8;
  };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      state[tile][e] =
          args.initial_state == nullptr ? 0.0f : args.initial_state[place_in_state(tile, e)];
    }
  }

#pragma unroll 1
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Stage<kKeySize> stage = stage_of(chunk);
    __syncthreads();

    uint32_t rounded[kDepths][4];
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      const float (&low)[4] = state[2 * depth];
      const float (&high)[4] = state[2 * depth + 1];
      rounded[depth][0] = pack_pair(low[0], low[1]);
      rounded[depth][1] = pack_pair(low[2], low[3]);
      rounded[depth][2] = pack_pair(high[0], high[1]);
      rounded[depth][3] = pack_pair(high[2], high[3]);
    }

    // The state's products with keys and queries, and the values less what the keys find.
    float out[2 * kPairs][4];
    uint32_t news[kPairs][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float found[2][4] = {};
      float (&first)[4] = out[2 * pair];
      float (&second)[4] = out[2 * pair + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) first[e] = second[e] = 0.0f;
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        const uint32_t (&a)[4] = rounded[depth];
        uint32_t b[4], c[4];
        load_matrices<false>(b, block_by_rows(stage.k, stage.kPitch, pair * 16, depth * 16));
        load_matrices<false>(c, block_by_rows(stage.q, stage.kPitch, pair * 16, depth * 16));
        warp_multiply_add<BFloat16>(found[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        warp_multiply_add<BFloat16>(found[1], a[0], a[1], a[2], a[3], b[2], b[3]);
        warp_multiply_add<BFloat16>(first, a[0], a[1], a[2], a[3], c[0], c[1]);
        warp_multiply_add<BFloat16>(second, a[0], a[1], a[2], a[3], c[2], c[3]);
      }
      uint32_t values[4];
      load_matrices<true>(values,
                          block_by_rows(stage.v, value_pitch, pair * 16, warp * kDeltaWarpColumns));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int token = (pair * 2 + tile) * 8 + along;
        const float2 of_k = load_two(stage.factors + token * 4);
        const float2 of_q = load_two(stage.factors + (kTokens + token) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value[2];
          BFloat16::unpack(values[2 * tile + i], value);
          news[pair][2 * tile + i] = pack_pair(fmaf(-of_k.x, found[tile][2 * i], value[0]),
                                               fmaf(-of_k.y, found[tile][2 * i + 1], value[1]));
          out[2 * pair + tile][2 * i] *= of_q.x;
          out[2 * pair + tile][2 * i + 1] *= of_q.y;
        }
      }
    }

    // The value that each token writes, after those before it in the chunk have written.
    uint32_t written[kPairs][4], decayed[kPairs][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float sums[2][4] = {};
#pragma unroll
      for (int depth = 0; depth <= pair; ++depth) {
        const uint32_t (&a)[4] = news[depth];
        uint32_t b[4];
        load_matrices<false>(b, block_by_rows(stage.solved, kMatrixPitch, pair * 16, depth * 16));
        warp_multiply_add<BFloat16>(sums[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        warp_multiply_add<BFloat16>(sums[1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int token = (pair * 2 + tile) * 8 + along;
        const float2 rest = load_two(stage.factors + (2 * kTokens + token) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float a = sums[tile][2 * i], b = sums[tile][2 * i + 1];
          written[pair][2 * tile + i] = pack_pair(a, b);
          decayed[pair][2 * tile + i] = pack_pair(a * rest.x, b * rest.y);
        }
      }
    }

    const float decay = load_two(stage.factors + 3 * kTokens * 4).x;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[tile][e] *= decay;
    }
#pragma unroll
    for (int depth = 0; depth < kPairs; ++depth) {
      const uint32_t (&a)[4] = decayed[depth];
#pragma unroll
      for (int pair = 0; pair < kDepths; ++pair) {
        uint32_t b[4];
        load_matrices<true>(b, block_by_columns(stage.k, stage.kPitch, depth * 16, pair * 16));
        warp_multiply_add<BFloat16>(state[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
        warp_multiply_add<BFloat16>(state[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }

    const int64_t begin = sequence.begin + chunk * kTokens;
    const int rows = static_cast<int>(min(int64_t{kTokens}, sequence.end - begin));
    char* const results = const_cast<char*>(delta_row(args, args.out, begin, head)) +
                          (column + warp * kDeltaWarpColumns + along) * 2;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int depth = 0; depth <= pair; ++depth) {
        const uint32_t (&a)[4] = written[depth];
        uint32_t b[4];
        load_matrices<false>(b, block_by_rows(stage.scores, kMatrixPitch, pair * 16, depth * 16));
        warp_multiply_add<BFloat16>(out[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
        warp_multiply_add<BFloat16>(out[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float (&sums)[4] = out[2 * pair + tile];
        const int token = (2 * pair + tile) * 8 + across;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = warp_transpose(pack_pair(sums[2 * i], sums[2 * i + 1]));
          if (token < rows) {
            *reinterpret_cast<uint32_t*>(results + token * args.out.token + i * 16) = word;
          }
        }
      }
    }
  }

  if (args.final_state == nullptr) return;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) args.final_state[place_in_state(tile, e)] = state[tile][e];
  }
}

#define TIERCEL_RULE(size)                                                                        \
  {size,                                                                                          \
   Kernel("gated_delta_rule<K=" #size ">", reinterpret_cast<const void*>(gated_delta_rule<size>), \
          kDeltaStages * delta_rule_stage(size, kDeltaMostWarps))}

const DeltaRuleKernel kKernels[] = {TIERCEL_RULE(64), TIERCEL_RULE(128)};

}  // namespace

const DeltaRuleKernel* delta_rule_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
