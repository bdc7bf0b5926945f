// SPDX-License-Identifier: Apache-2.0
// The ring of stages of w4_moe's kernels and the warps that fill it: w4_moe.cu has the plan.
#ifndef KERNELS_MOE_W4_MOE_STAGES_CUH_
#define KERNELS_MOE_W4_MOE_STAGES_CUH_

#include <cstdint>

#include "kernels/gemv/w4_weights.cuh"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/copy_arrival.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

inline constexpr int kRowBytes = kW4MoeStep / 2;  // of a row of the weight in a stage

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
  // The number of stages is even then, so that each stage is of one half, which sees all phases. A
  // stage's sizes are those of W4MoeArgs.
  static constexpr bool kFew = kRows == 64;
  static constexpr int kConsumers = w4_moe_consumers(kRows);
  static constexpr int kLoaders = w4_moe_loaders(kRows);
  static constexpr int kXBytes = kTokens * kW4MoeStep * 2;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = w4_moe_stage_bytes(kTokens, kRows);
};

// The row of the expert's weight that is row `row` of a tile which begins at `group`.
__device__ __forceinline__ int weight_row(const W4MoeArgs& args, int group, int row) {
  const W4MoeRows& rows = args.rows;
  return (group + row / 16) * rows.group + row / 8 % 2 * rows.half + row % 8 * rows.next;
}

// The scales of the steps from `step` on; behind the end of K anything that is finite.
template <bool kFloats, int kSteps>
__device__ __forceinline__ void load_step_scales(StepBits<kFloats> (&bits)[kSteps],
                                                 const W4MoeArgs& args, const char* scale,
                                                 const char* zero, int step) {
  if constexpr (!kFloats) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_scales<false>(bits[i], args.scales, scale, zero, 0, 0,
                         min(step + i, args.steps - 1) * kW4MoeStep, args.k);
    }
    return;
  }
  const int k = step * kW4MoeStep, rest = args.k - k;
  const auto load = [&](const auto* from) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      bits[i / 2].scale[i % 2] = i * 64 < rest ? from[i] : 0;
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
  StepBits<kFloats> each = bits;
  if constexpr (kFloats) each.exponents[0] = each.scale[0], each.exponents[1] = each.scale[1];
  unpack_scales<kFloats, kBFloat16>(scales, each, format);
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
template <int kXBytes>
__device__ __forceinline__ int x_place(int token, int chunk) {
  return chunk / 8 * (kXBytes / 2) + token * 128 + (chunk % 8 ^ token % 8) * 16;
}

// x_place() for few tokens: a lane's four chunks lie 64 bytes apart, and two tokens' in different
// banks.
__device__ __forceinline__ int few_x_place(int token, int chunk) {
  return token * (kW4MoeStep * 2) + (chunk % 4 ^ token % 2) * 64 + chunk / 4 * 16;
}

// The place in the scales of few tokens of a tile's row: they lie as in memory, in one run of rows,
// or those of the gates and then those of what they are for.
__device__ __forceinline__ int scale_place(const W4MoeArgs& args, int row) {
  const W4MoeRows& rows = args.rows;
  const int half = rows.group == 8 ? 32 : rows.half;
  return row / 16 * rows.group + row / 8 % 2 * half + row % 8 * rows.next;
}

// The ring of few tokens: the stages' rows of x and of weights, then the scales of the tile.
struct FewRing {
  char* shared;
  uint64_t* barriers;
  int group, expert;
  int begin, end;  // of the steps

  __device__ __forceinline__ uint64_t* filled(int stage) const { return barriers + stage; }
  __device__ __forceinline__ uint64_t* freed(int stage) const {
    return filled(kW4MoeFewStages + stage);
  }
  __device__ __forceinline__ uint64_t* scaled() const { return filled(2 * kW4MoeFewStages); }

  // One thread of the loading warp `first` sets up the barriers of its stages.
  __device__ __forceinline__ void set_up(const W4MoeArgs& args, int first) const {
    for (int s = first; s < args.stages; s += 2) {
      mbarrier_init(filled(s), 1 + 32);
      mbarrier_init(freed(s), 4);
    }
    if (first == 1) mbarrier_init(scaled(), 1);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ void load_weights(const W4MoeArgs& args, int step, int stage) const {
    constexpr int kBytes = 64 * kRowBytes;
    mbarrier_expect(filled(stage), kBytes);
    tile_load(shared + (stage + 1) * args.stage_bytes - kBytes, &args.weight_map, step * kRowBytes,
              group, expert, filled(stage));
  }

  __device__ __forceinline__ void load_tile_scales(const W4MoeArgs& args) const {
    const int runs = args.rows.group == 8 ? 2 : 1;
    const uint32_t bytes = 64 / runs * static_cast<uint32_t>(args.scales.scale_row);
    const bool zeros = args.scales.zero != nullptr;
    char* to = shared + args.stages * args.stage_bytes;
    mbarrier_expect(scaled(), bytes * runs * (zeros ? 2 : 1));
    for (int i = 0; i < (zeros ? 2 * runs : runs); ++i, to += bytes) {
      const int64_t row =
          static_cast<int64_t>(expert) * args.weight_rows + weight_row(args, group, i % runs * 8);
      const char* const from = i < runs ? args.scales.scale : args.scales.zero;
      bulk_load(to, from + row * args.scales.scale_row, bytes, scaled());
    }
  }

  // Starts the copies that need no rows of x; called by the thread that set_up().
  __device__ __forceinline__ void start(const W4MoeArgs& args, int first) const {
    if (first == 1) load_tile_scales(args);
    for (int s = first; s < args.stages && begin + s < end; s += 2) {
      load_weights(args, begin + s, s);
    }
  }
};

// Puts 8 values in the order of decode_word(): 0 4, 2 6, 1 5, 3 7.
__device__ __forceinline__ void reorder_values(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(__byte_perm(v.x, v.z, 0x5410)), "r"(__byte_perm(v.y, v.w, 0x5410)),
               "r"(__byte_perm(v.x, v.z, 0x7632)), "r"(__byte_perm(v.y, v.w, 0x7632))
               : "memory");
}

// Fills the stages of each second step from `begin` + `first` to `end`: one warp. Tokens' rows of x
// are at `rows`, of which `present` are not all padding. Each lane reorders what it copied, one
// step later, so that four warps need not.
__device__ __forceinline__ void load_few(const W4MoeArgs& args, const FewRing& ring,
                                         const char* const* rows, int present, int first) {
  constexpr int kKept = 4;                        // row pointers in registers: 8 tokens
  constexpr int kPassBytes = 2 * kW4MoeStep * 2;  // two tokens
  const int lane = threadIdx.x % 32;
  const int chunk = lane % 16, token = lane / 16;
  const int passes = (present + 1) / 2;
  const char* kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i] = rows[token + i * 2];
  const uint32_t place =
      shared_address(ring.shared) + static_cast<uint32_t>(few_x_place(token, chunk));
  const auto finish = [&](int stage) {
    const uint32_t at = place + stage * args.stage_bytes;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i < passes) reorder_values(at + i * kPassBytes);
    }
#pragma unroll 1
    for (int i = kKept; i < passes; ++i) reorder_values(at + i * kPassBytes);
    mbarrier_arrive(ring.filled(stage));
  };
  int stage = first, last_stage = -1;
  uint32_t parity = 1;
#pragma unroll 1
  for (int step = ring.begin + first; step < ring.end; step += 2) {
    mbarrier_wait(ring.freed(stage), parity);
    if (step >= ring.begin + args.stages && lane == 0) ring.load_weights(args, step, stage);
    const int64_t at = step * kW4MoeStep + chunk * 8;
    const bool real = at < args.k;  // zeros behind the end of K
    const uint32_t to = place + stage * args.stage_bytes;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i < passes) async_copy_16(to + i * kPassBytes, kept[i] + at * 2, real);
    }
#pragma unroll 1
    for (int i = kKept; i < passes; ++i) {
      async_copy_16(to + i * kPassBytes, rows[token + i * 2] + at * 2, real);
    }
    async_copy_commit();
    if (last_stage >= 0) {
      async_copy_wait<1>();
      finish(last_stage);
    }
    last_stage = stage;
    stage += 2;
    if (stage >= args.stages) stage = first, parity ^= 1;
  }
  if (last_stage >= 0) {
    async_copy_wait<0>();
    finish(last_stage);
  }
}

// The rows of x of a block of many tokens, which kLoaders threads copy: kChunks of them copy the 16
// bytes each that a row has in a stage.
template <int kTokens, int kLoaders, int kChunks>
struct GatheredRows {
  static constexpr int kXBytes = kTokens * kChunks * 16;
  static constexpr int kAtOnce = kLoaders / kChunks;  // rows
  static constexpr int kPasses = kTokens / kAtOnce;
  static constexpr int kTestEach = kTokens / 32;  // passes
  int chunk, passes;
  uint32_t place;
  uint32_t from[kPasses];  // in 16 bytes

  // `sources` has rows of x, or -1 for padding, whose last passes are left out.
  __device__ __forceinline__ GatheredRows(const W4MoeArgs& args, const char* shared,
                                          const int* sources, int thread)
      : chunk(thread % kChunks), passes(0) {
    const int token = thread / kChunks;
    place = shared_address(shared) + static_cast<uint32_t>(x_place<kXBytes>(token, chunk));
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int source = sources[token + i * kAtOnce];
      if (source >= 0) passes = i + 1;
      // Columns of padding hold anything, here a row that exists.
      from[i] = static_cast<uint32_t>(source >= 0 ? source : max(sources[0], 0)) *
                    static_cast<uint32_t>(args.x_row / 16) +
                chunk;
    }
  }

  // Requests a step's values for the stage that begins so many bytes behind the first.
  __device__ __forceinline__ void copy(const W4MoeArgs& args, int stage_begin, int step) const {
    constexpr int kValues = kW4MoeStep / kChunks;                    // of a chunk
    const bool real = step * kW4MoeStep + chunk * kValues < args.k;  // zeros behind the end of K
    const uint32_t to = place + stage_begin;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass % kTestEach == 0 && pass >= passes) break;
      // The swizzle repeats after 8 tokens.
      const uint32_t swizzled = to ^ pass * kAtOnce % 8 * 16;
      async_copy_16(swizzled + pass * (kAtOnce * 128),
                    args.x + static_cast<uint64_t>(from[pass]) * 16 + step * (kChunks * 16), real);
    }
  }
};

// Fills the stages of many tokens, by all loading warps.
template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages>
__device__ __forceinline__ void load_many(const W4MoeArgs& args, char* shared, const int* sources,
                                          uint64_t* filled, uint64_t* freed, int expert,
                                          int group) {
  using Shape = Tile<kTokens, kRows>;
  constexpr int kAhead = kFloats ? 4 : 2;  // steps whose scales are loaded together
  constexpr int kTurns = (kRows + Shape::kLoaders - 1) / Shape::kLoaders;
  const int thread = threadIdx.x - Shape::kConsumers;
  const auto load_weights = [&](int step, int stage) {
    if (thread != Shape::kLoaders - 32)
      return;  // of the last warp, which has no more scales than others
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
      load_step_scales<kFloats>(ahead[turn], args, scale[turn], zero[turn], step);
    }
  };
  load_ahead(0);
  if (args.down) grid_dependency_wait();
  const GatheredRows<kTokens, Shape::kLoaders, 16> x(args, shared, sources, thread);
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int base = 0; base < args.steps; base += kAhead) {
    // All of them, before the next are requested: a wait for one is a wait for the others. Not
    // within the inner loop, whose end would move, and so wait for, what was just requested.
#pragma unroll
    for (int i = 0; i < kTurns * kAhead; ++i) {
      bits[i / kAhead][i % kAhead] = ahead[i / kAhead][i % kAhead];
    }
    load_ahead(base + kAhead);
#pragma unroll 1
    for (int step = base; step < min(base + kAhead, args.steps); ++step) {
      mbarrier_wait(freed + stage, parity);
      if (step >= kStages) load_weights(step, stage);
      x.copy(args, stage * Shape::kStageBytes, step);
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
