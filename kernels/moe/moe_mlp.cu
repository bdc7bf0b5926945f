// SPDX-License-Identifier: Apache-2.0
// moe_up and moe_down for few tokens: each active expert's weights are streamed once.
//
// The plan. The weights' bytes bind it: at E = 64, k = 8, H = 2048, I = 1024 an expert has 12.6 MB,
// 8.4 of them for `up`; 4 tokens reach about 25 experts: 324 MB, 74 us at 4.4 TB/s (the best peer
// measured takes 102, benchmarks' anchors); 128 tokens reach all 64: 805 MB, 183 us (220). A
// multiprocessor has to receive 18 bytes a cycle, so some 64 KB must be on their way to it at all
// times. Products are no limit: 16 rows of weights times 8 tokens are one mma.m16n8k16.
//
// So nothing may ever make the stream of weights pause. A unit of work is 32 rows of one expert's
// weights and one block of the routing (8, 16 or 32 slots): for `up` 16 rows of each half, whose
// results meet in the activation; for `down` 32 neighbours. Each block has an even share of the
// units, and its eight warps take them one at a time by a counter. A warp has its own ring of
// stages, of 64 values of K: 4 KB of weights and the tokens' 1 to 4 KB (from the L2: a quarter to
// as much again, less than it would cost to stop for a barrier). It fills the ring past the end of
// its unit with the next one's, so only the kernel's first stages are waited for; no barrier of the
// block is in the loop.
//
// Weights are the A operand, so that tokens, the N of a product, come in eights. The order of K
// inside a product is free: a thread takes 16 bytes as they lie, of weights and of tokens alike,
// for two products. In shared memory a row is 128 bytes, its two halves swapped in odd rows: the
// eight lanes of a load then use all banks.
#include <cstdint>

#include "kernels/moe/moe_mlp_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

struct BFloat16 {
  static constexpr DType kType = DType::kBFloat16;
  static __device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t rounded(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct Float16 {
  static constexpr DType kType = DType::kFloat16;
  static __device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t rounded(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

__device__ __forceinline__ float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.70710678f)); }

__device__ __forceinline__ float activate(MoeActivation activation, float a, float b) {
  switch (activation) {
    case MoeActivation::kSilu:
      return a / (1.0f + __expf(-a)) * b;
    case MoeActivation::kGelu:
      return gelu(a) * b;
    case MoeActivation::kRelu:
      return (a < 0.0f ? 0.0f : a) * b;  // NaN stays
    default:
      return gelu(a) * (b + 1.0f);
  }
}

// Where 16 bytes of a row lie.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kMoeRowBytes + (piece ^ (row & 1) * 4) * 16;
}

// What a warp's copies need of a unit, by lane.
template <int kTokens>
struct Source {
  const char* weights = nullptr;    // this lane's piece of the unit's row lane / 8
  const char* x[kTokens / 4] = {};  // of token lane / 8 + 4 * i; null: padding
  int row = 0;                      // lane / 8's, of the output
  bool real = false;
};

struct Unit {
  int number = -1;
  int expert = -1;
  int block = 0;
  int tile = 0;
};

template <typename T, bool kUp, int kTokens>
__global__ void __launch_bounds__(kMoeWarps * 32, 1)
    moe_mlp(const __grid_constant__ MoeMlpArgs args) {
  constexpr int kStages = moe_stages(kTokens);
  constexpr int kBytes = moe_stage_bytes(kTokens);
  constexpr int kTiles = kTokens / 8;
  extern __shared__ uint4 shared[];
  __shared__ int counter;
  const int lane = threadIdx.x % 32;
  const int quad = lane / 4;
  const int in_quad = lane % 4;
  const int piece = lane % 8;  // of a row, that this lane copies
  char* ring = reinterpret_cast<char*>(shared) + threadIdx.x / 32 * kStages * kBytes;
  const uint32_t ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));

  grid_dependency_wait();
  grid_dependency_launch();
  const int units = *args.used / kTokens * args.tiles;
  const int begin = static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(units) * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x == 0) counter = begin;
  __syncthreads();

  // The next unit with weights; the others' rows of the output are zeros.
  const auto take = [&]() {
    Unit unit;
    for (;;) {
      int number = 0;
      if (lane == 0) number = atomicAdd(&counter, 1);
      number = __shfl_sync(0xffffffffu, number, 0);
      if (number >= end) return Unit{};
      unit.number = number;
      unit.block = number / args.tiles;
      unit.tile = number - unit.block * args.tiles;
      unit.expert = args.expert_ids[unit.block];
      if (unit.expert >= 0) return unit;
      if (kUp) continue;
      const int row = unit.tile * 2 * kMoeTile + lane;
      for (int token = 0; token < kTokens; ++token) {
        const int id = args.sorted_ids[unit.block * kTokens + token];
        if (id < args.elements && row < args.rows) {
          args.out[static_cast<int64_t>(id) * args.rows + row] = 0;
        }
      }
    }
  };
  constexpr int kRows = kUp ? kMoeTile : 2 * kMoeTile;  // of the output, a unit
  const auto open = [&](const Unit& unit, Source<kTokens>* source) {
    source->real = unit.number >= 0;
    if (!source->real) return;
    source->row = unit.tile * kRows + lane / 8;
    source->weights = args.w + unit.expert * args.w_expert + source->row * args.w_row + piece * 16;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      const int id = args.sorted_ids[unit.block * kTokens + lane / 8 + i * 4];
      source->x[i] =
          id < args.elements ? args.x + id / args.divide * args.x_row + piece * 16 : nullptr;
    }
  };

  const int steps = (args.k + kMoeStep - 1) / kMoeStep;
  Unit current = take();
  Unit next;
  Source<kTokens> source;
  open(current, &source);
  int ahead = 0;  // steps of `source` that were asked for
  int fill = 0;   // the slot that comes next
  const auto copy = [&]() {
    if (ahead == steps) {  // the ring is shorter than a unit: `current` is the one before
      next = take();
      open(next, &source);
      ahead = 0;
    }
    if (source.real) {
      const int offset = ahead * kMoeRowBytes;
      const bool in = ahead * kMoeStep + piece * 8 < args.k;
      const uint32_t to = ring_address + fill * kBytes;
#pragma unroll
      for (int i = 0; i < 2 * kMoeTile / 4; ++i) {
        const int within = i % (kMoeTile / 4) * 4;
        const char* from =
            source.weights + within * args.w_row + offset + (i < kMoeTile / 4 ? 0 : args.w_second);
        const bool real =
            in && source.row + within + (i < kMoeTile / 4 || kUp ? 0 : kMoeTile) < args.rows;
        async_copy_16(to + place(i * 4 + lane / 8, piece), real ? from : args.w, real);
      }
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const bool real = in && source.x[i] != nullptr;
        async_copy_16(to + place(2 * kMoeTile + i * 4 + lane / 8, piece),
                      real ? source.x[i] + offset : args.x, real);
      }
    }
    ++ahead;
    async_copy_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
  };

#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy();
  int slot = 0;
  while (current.number >= 0) {
    float sums[2][kTiles][4] = {};
    for (int step = 0; step < steps; ++step) {
      copy();
      async_copy_wait<kStages - 1>();
      __syncwarp();
      const char* from = ring + slot * kBytes;
      slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int mine = half * 4 + in_quad;
        uint4 a[2][2];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r / 2][r % 2] = *reinterpret_cast<const uint4*>(from + place(r * 8 + quad, mine));
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 b =
              *reinterpret_cast<const uint4*>(from + place(2 * kMoeTile + t * 8 + quad, mine));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            T::multiply(sums[m][t], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b.x, b.y);
            T::multiply(sums[m][t], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b.z, b.w);
          }
        }
      }
      __syncwarp();  // before the slot is filled again
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int token = t * 8 + in_quad * 2 + column;
        const int id = args.sorted_ids[current.block * kTokens + token];
        if (id >= args.elements) continue;
        uint16_t* out = args.out + static_cast<int64_t>(id) * args.rows;
        const float weight = !kUp && args.weights != nullptr ? args.weights[id] : 1.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = current.tile * kRows + i * 8 + quad;
          const float first = sums[0][t][i * 2 + column];
          const float second = sums[1][t][i * 2 + column];
          if constexpr (kUp) {
            if (row < args.rows) out[row] = T::rounded(activate(args.activation, first, second));
          } else {
            if (row < args.rows) out[row] = T::rounded(first * weight);
            if (row + kMoeTile < args.rows) out[row + kMoeTile] = T::rounded(second * weight);
          }
        }
      }
    }
    current = next;
    next = Unit{};
  }
  async_copy_wait<0>();
}

struct Entry {
  bool up;
  DType dtype;
  int tokens;
  Kernel kernel;
};

#define TIERCEL_KERNEL(type, up, tokens)                        \
  {up, type::kType, tokens,                                     \
   Kernel("moe_mlp<" #type ", up=" #up ", tokens=" #tokens ">", \
          reinterpret_cast<const void*>(moe_mlp<type, up, tokens>), moe_shared(tokens))}
#define TIERCEL_KERNELS(type, up) \
  TIERCEL_KERNEL(type, up, 8), TIERCEL_KERNEL(type, up, 16), TIERCEL_KERNEL(type, up, 32)

const Entry kKernels[] = {TIERCEL_KERNELS(BFloat16, true), TIERCEL_KERNELS(BFloat16, false),
                          TIERCEL_KERNELS(Float16, true), TIERCEL_KERNELS(Float16, false)};

}  // namespace

const Kernel* moe_mlp_kernel(bool up, DType dtype, int tokens) {
  for (const Entry& entry : kKernels) {
    if (entry.up == up && entry.dtype == dtype && entry.tokens == tokens) return &entry.kernel;
  }
  return nullptr;
}

}  // namespace tiercel
