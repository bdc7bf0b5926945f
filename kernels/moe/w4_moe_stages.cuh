// SPDX-License-Identifier: Apache-2.0
// The ring of stages of w4_moe's kernels and the warps that fill it: w4_moe.cu has the plan.
#ifndef KERNELS_MOE_W4_MOE_STAGES_CUH_
#define KERNELS_MOE_W4_MOE_STAGES_CUH_

#include <cstdint>

#include "kernels/gemv/w4_weights.cuh"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

inline constexpr int kRowBytes = kW4MoeStep / 2;  // of a row of the weight in a stage

// This thread's arrival, when all copies that it has started are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void tile_load(void* to, const CUtensorMap* map, int byte, int group,
                                          int expert, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(byte), "r"(0), "r"(group), "r"(expert), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tile_prefetch(const CUtensorMap* map, int byte, int group,
                                              int expert) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %2, %3, %4}];" ::"l"(map),
               "r"(byte), "r"(0), "r"(group), "r"(expert)
               : "memory");
}

template <int kTokens, int kRows>
struct Tile {
  // Few tokens: products of warps, and the two halves of the consumers take the steps of K in turn.
  // The number of stages is even then, so that each stage is of one half, which sees all phases.
  static constexpr bool kFew = kRows == 64;
  static constexpr int kConsumers = w4_moe_consumers(kRows);
  static constexpr int kLoaders = w4_moe_loaders(kRows);
  static constexpr int kXBytes = kTokens * kW4MoeStep * 2;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = w4_moe_stage_bytes(kTokens, kRows);
  static constexpr int kSumRow = kRows + 4;  // floats of a token's sums: all banks in use
};

// The row of the expert's weight that is row `row` of a tile which begins at `group`.
__device__ __forceinline__ int weight_row(const W4MoeArgs& args, int group, int row) {
  const W4MoeRows& rows = args.rows;
  return (group + row / 16) * rows.group + row / 8 % 2 * rows.half + row % 8 * rows.next;
}

// The scales of each `kStride`th step from `step` on; behind the end of K anything that is finite.
template <bool kFloats, int kStride, int kSteps>
__device__ __forceinline__ void load_step_scales(StepBits<kFloats> (&bits)[kSteps],
                                                 const W4MoeArgs& args, const char* scale,
                                                 const char* zero, int step) {
  if constexpr (!kFloats) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_scales<false>(bits[i], args.scales, scale, zero,
                         min(step + i * kStride, args.steps - 1) * kW4MoeStep, args.k);
    }
    return;
  }
  const int k = step * kW4MoeStep, rest = args.k - k;
  const auto load = [&](const auto* from) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int at = i / 2 * (2 * kStride) + i % 2;
      bits[i / 2].scale[i % 2] = at * 64 < rest ? from[at] : 0;
    }
  };
  if (args.scales.format == W4Format::kNvfp4) {
    load(reinterpret_cast<const uint32_t*>(scale + k / 16));
  } else {
    load(reinterpret_cast<const uint16_t*>(scale + k / 32));
  }
}

// A row's scales of a step, as they multiply.
template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void store_scales(char* to, const StepBits<kFloats>& bits,
                                             const W4Scales& format) {
  StepScales<kFloats> scales;
  unpack_scales<kFloats, kBFloat16>(scales, bits, format);
  uint4 words;
  if constexpr (kFloats) {
    words = {scales.scale[0], scales.scale[1], scales.scale[2], scales.scale[3]};
  } else {
    words = {scales.scale[0], scales.scale[1], scales.zero[0], scales.zero[1]};
  }
  *reinterpret_cast<uint4*>(to) = words;
}

// The scales of a row of a tile, and its zero points or null.
struct RowScales {
  const char *scale, *zero;

  __device__ __forceinline__ RowScales(const W4MoeArgs& args, int expert, int group, int place) {
    const int64_t row = static_cast<int64_t>(expert) * args.weight_rows +
                        min(weight_row(args, group, place), args.weight_rows - 1);
    scale = args.scales.scale + row * args.scales.scale_row;
    zero = args.scales.zero == nullptr ? nullptr : args.scales.zero + row * args.scales.zero_row;
  }
};

// The place of a chunk of 8 values of a token's row of x, in bytes from the stage's beginning.
template <int kTokens, int kRows>
__device__ __forceinline__ int x_place(int token, int chunk) {
  using Shape = Tile<kTokens, kRows>;
  if constexpr (Shape::kFew) {
    // A lane's four chunks lie 64 bytes apart, and two tokens' in different banks.
    return token * (kW4MoeStep * 2) + (chunk % 4 ^ token % 2) * 64 + chunk / 4 * 16;
  }
  return chunk / 8 * (Shape::kXBytes / 2) + token * 128 + (chunk % 8 ^ token % 8) * 16;
}

// Fills the stages of few tokens, of each second step from `begin` + `first` to `end`: one warp, a
// lane for two rows of the tile. Weights are requested before all else.
template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages>
__device__ __forceinline__ void load_few(const W4MoeArgs& args, char* shared, const int* sources,
                                         const char* const* x_rows, uint64_t* filled,
                                         uint64_t* freed, int expert, int group, int begin, int end,
                                         int first) {
  using Shape = Tile<kTokens, kRows>;
  constexpr int kAhead = kFloats ? 2 : 1;  // steps of this warp
  static_assert(kTokens == 32 && kRows == 64);
  const int lane = threadIdx.x % 32;
  const auto load_weights = [&](int step, int stage) {
    if (lane != 0) return;
    mbarrier_expect(filled + stage, Shape::kWeightBytes);
    tile_load(shared + stage * Shape::kStageBytes + Shape::kXBytes, &args.weight_map,
              step * kRowBytes, group, expert, filled + stage);
  };
#pragma unroll 1
  for (int i = 0; i < kStages; i += 2) {
    if (begin + first + i < end) load_weights(begin + first + i, first + i);
  }
  const RowScales rows[2] = {{args, expert, group, lane}, {args, expert, group, lane + 32}};
  StepBits<kFloats> ahead[2][kAhead], bits[2][kAhead];
  const auto load_ahead = [&](int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_step_scales<kFloats, 2>(ahead[i], args, rows[i].scale, rows[i].zero, step);
    }
  };
  load_ahead(begin + first);
  if (args.down) {
    // Without lists, all weights of the second product fit into the L2 cache.
    if (args.slots == nullptr && lane == 0) {
      for (int i = begin + first + kStages; i < end; i += 2) {
        tile_prefetch(&args.weight_map, i * kRowBytes, group, expert);
      }
    }
    grid_dependency_wait();
  }
  const int passes = (33 - __clz(__ballot_sync(0xffffffffu, sources[lane] >= 0))) / 2;
  const int chunk = lane % 16, token = lane / 16;
  const uint32_t place =
      shared_address(shared) + static_cast<uint32_t>(x_place<kTokens, kRows>(token, chunk));
  int stage = first;
  uint32_t parity = 1;
#pragma unroll 1
  for (int base = begin + first; base < end; base += 2 * kAhead) {
#pragma unroll 1
    for (int step = base; step < min(base + 2 * kAhead, end); step += 2) {
      mbarrier_wait(freed + stage, parity);
      if (step >= begin + kStages) load_weights(step, stage);
      const int at = step * kW4MoeStep + chunk * 8;
      const uint32_t to = place + stage * Shape::kStageBytes;
#pragma unroll 1
      for (int pass = 0; pass < passes; pass += 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* const row = x_rows[token + (pass + i) * 2];
          // Zeros behind the end of K; columns of padding hold anything.
          if (row == nullptr) continue;
          async_copy_16(to + (pass + i) * (2 * kW4MoeStep * 2), row + at * 2, at < args.k);
        }
      }
      if (step == base) {
        // All of them, before the next are requested: a wait for one is a wait for the others.
#pragma unroll
        for (int i = 0; i < 2 * kAhead; ++i) bits[i % 2][i / 2] = ahead[i % 2][i / 2];
        load_ahead(base + 2 * kAhead);
      }
      char* const scales =
          shared + stage * Shape::kStageBytes + Shape::kXBytes + Shape::kWeightBytes + lane * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store_scales<kFloats, kBFloat16>(scales + i * 512, bits[i][0], args.scales);
#pragma unroll
        for (int j = 1; j < kAhead; ++j) bits[i][j - 1] = bits[i][j];
      }
      arrive_with_copies(filled + stage);
      mbarrier_arrive(filled + stage);
      stage += 2;
      if (stage >= kStages) stage -= kStages, parity ^= 1;
    }
  }
}

// Fills the stages of many tokens: four warps.
template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages>
__device__ __forceinline__ void load_many(const W4MoeArgs& args, char* shared, const int* sources,
                                          uint64_t* filled, uint64_t* freed, int expert,
                                          int group) {
  using Shape = Tile<kTokens, kRows>;
  constexpr int kAtOnce = Shape::kLoaders / 16;  // rows of x: 16 threads each
  constexpr int kPasses = kTokens / kAtOnce;
  constexpr int kTestEach = kTokens / 32;  // passes
  constexpr int kAhead = kFloats ? 4 : 2;  // steps whose scales are loaded together
  constexpr int kTurns = (kRows + Shape::kLoaders - 1) / Shape::kLoaders;
  const int thread = threadIdx.x - Shape::kConsumers;
  const auto load_weights = [&](int step, int stage) {
    if (thread != Shape::kLoaders - 32) return;  // of a warp with few scales
    mbarrier_expect(filled + stage, Shape::kWeightBytes);
    tile_load(shared + stage * Shape::kStageBytes + Shape::kXBytes, &args.weight_map,
              step * kRowBytes, group, expert, filled + stage);
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    if (i < args.steps) load_weights(i, i);
  }
  // This thread loads the scales of these rows of the tile.
  const auto mine = [&](int turn) { return thread + turn * Shape::kLoaders < kRows; };
  const char *scale[kTurns], *zero[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const RowScales row(args, expert, group, thread + turn * Shape::kLoaders);
    scale[turn] = row.scale, zero[turn] = row.zero;
  }
  StepBits<kFloats> ahead[kTurns][kAhead], bits[kTurns][kAhead];
  const auto load_ahead = [&](int step) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!mine(turn)) continue;
      load_step_scales<kFloats, 1>(ahead[turn], args, scale[turn], zero[turn], step);
    }
  };
  load_ahead(0);
  if (args.down) grid_dependency_wait();
  const int chunk = thread % 16, token = thread / 16;
  const uint32_t place =
      shared_address(shared) + static_cast<uint32_t>(x_place<kTokens, kRows>(token, chunk));
  const char* from[kPasses];
  int passes = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int source = sources[token + i * kAtOnce];
    if (source >= 0) passes = i + 1;
    // Columns of padding hold anything, here a row that exists.
    from[i] = args.x + (source >= 0 ? source : max(sources[0], 0)) * args.x_row + chunk * 16;
  }
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int base = 0; base < args.steps; base += kAhead) {
#pragma unroll 1
    for (int step = base; step < min(base + kAhead, args.steps); ++step) {
      mbarrier_wait(freed + stage, parity);
      if (step >= kStages) load_weights(step, stage);
      const bool real = step * kW4MoeStep + chunk * 8 < args.k;  // zeros behind the end of K
      const uint32_t to = place + stage * Shape::kStageBytes;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (pass % kTestEach == 0 && pass >= passes) break;
        async_copy_16(to + pass * (kAtOnce * 128), from[pass] + step * (kW4MoeStep * 2), real);
      }
      if (step == base) {
        // All of them, before the next are requested: a wait for one is a wait for the others.
#pragma unroll
        for (int i = 0; i < kTurns * kAhead; ++i) {
          bits[i / kAhead][i % kAhead] = ahead[i / kAhead][i % kAhead];
        }
        load_ahead(base + kAhead);
      }
      char* const scales =
          shared + stage * Shape::kStageBytes + Shape::kXBytes + Shape::kWeightBytes + thread * 16;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (!mine(turn)) continue;
        store_scales<kFloats, kBFloat16>(scales + turn * (Shape::kLoaders * 16), bits[turn][0],
                                         args.scales);
#pragma unroll
        for (int i = 1; i < kAhead; ++i) bits[turn][i - 1] = bits[turn][i];
      }
      arrive_with_copies(filled + stage);
      mbarrier_arrive(filled + stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_MOE_W4_MOE_STAGES_CUH_
