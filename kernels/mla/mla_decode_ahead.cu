// SPDX-License-Identifier: Apache-2.0
// mla_decode_ahead: mla_decode over a cache of 16 bits whose pages have 64 keys or more. It
// computes the scores of a step before it multiplies the values of the previous step.
//
// A block has 64 rows, queries times heads of one sequence, and goes through the keys in steps of
// 64. Of its three warpgroups
//   the first multiplies queries and keys (64 x 64, along 576) and makes probabilities of the
//     scores. It has 496 of its queries' columns in registers, so that most of these products read
//     keys alone from shared memory;
//   the second and the third multiply probabilities by 256 columns of the values each. A warp of
//     the second loads keys, between its products: one box of 64 keys for each half of the latents.
// Three steps of 72 KiB are in flight. Probabilities overwrite a step's rotary columns, which are
// not values. Results have the bits of mla_decode's: each sum has the same order.
//
// The tensor cores always have work if the scores of step j + 1 come before the products with the
// values of step j, which overlap with the softmax of step j + 1. So the second and the third
// warpgroup wait until most of the scores are computed, unless their keys have not arrived. The
// first warpgroup never waits for the others, except for keys: its instructions between two steps
// bound the kernel as much as the products do.
//
// Two blocks with different rows of the same sequences form a cluster and read the same keys at the
// same time: each loads half of their columns, into the shared memory of both.
#include <cstdint>

#include "kernels/mla/ahead.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/rows.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

// Together they have the registers that the block was launched with.
constexpr int kScoresRegisters = 184;
constexpr int kValuesRegisters = 160;
static_assert(kScoresRegisters + 2 * kValuesRegisters <= 3 * (65536 / kMlaThreads / 8 * 8));

// Steps of wgmma along the columns of the queries that are in registers: with one more the compiler
// has no room beside them.
constexpr int kHeldSteps = kMlaLatent / 16 - 1;

// Turns 4 x 4 words of 4 adjacent lanes: word j of a lane becomes the lane's word of lane j.
__device__ __forceinline__ void turn_words(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool odd = lane & bit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& low = w[bit == 1 ? 2 * i : i];
      uint32_t& high = w[bit == 1 ? 2 * i + 1 : i + 2];
      const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? low : high, bit);
      if (odd) {
        low = other;
      } else {
        high = other;
      }
    }
  }
}

// Queries: most columns become fragments, the others go to shared memory. Zeros behind the last
// row.
__device__ __forceinline__ void load_queries_ahead(uint32_t (&q)[kHeldSteps][4],
                                                   const MlaDecodeArgs& args, int b,
                                                   const AheadMemory& memory) {
  constexpr int kGroups = kMlaKey / 32;  // of 32 columns: 16 bytes of each of 4 lanes
  const Place place;
  const int lane = threadIdx.x % 4;
  const int first = static_cast<int>(blockIdx.x) % args.row_blocks * kMlaRows + place.row;
  const char* from[2];
  bool real[2];
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int at = first + 8 * second;
    real[second] = at < args.rows;
    const int query = at / args.heads, head = at - query * args.heads;
    from[second] = args.q + b * args.q_strides[0] + query * args.q_strides[1] +
                   head * args.q_strides[2] + lane * 16;
  }
  const auto load = [&](int group, int second) {
    return real[second] ? __ldg(reinterpret_cast<const uint4*>(from[second] + group * 64))
                        : make_uint4(0, 0, 0, 0);
  };
  const auto store = [](uint32_t to, uint4 four) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x), "r"(four.y),
                 "r"(four.z), "r"(four.w)
                 : "memory");
  };
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int row = place.row + 8 * second;
#pragma unroll
    for (int group = kMlaLatent / 32; group < kGroups; ++group) {
      const int chunk = (group - kMlaLatent / 32) * 4 + lane;
      store(memory.base + kAheadRotary + row * kMlaColumns + (chunk ^ row % 8) * 16,
            load(group, second));
    }
    // The last group of latents: 16 columns are held, 16 are not.
    const uint4 last = load(kMlaLatent / 32 - 1, second);
    if (lane >= 2) {
      store(memory.base + kAheadLatent + row / 8 * 256 + (lane - 2) * 128 + row % 8 * 16, last);
    }
    uint32_t turned[4] = {last.x, last.y, last.z, last.w};
    turn_words(turned, lane);
    q[kHeldSteps - 1][second] = turned[0], q[kHeldSteps - 1][2 + second] = turned[1];
  }
#pragma unroll
  for (int group = 0; group < kHeldSteps / 2; ++group) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const uint4 four = load(group, second);
      q[2 * group][second] = four.x, q[2 * group][2 + second] = four.y;
      q[2 * group + 1][second] = four.z, q[2 * group + 1][2 + second] = four.w;
    }
  }
#pragma unroll
  for (int group = 0; group < kHeldSteps / 2; ++group) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      uint32_t turned[4] = {q[2 * group][second], q[2 * group][2 + second],
                            q[2 * group + 1][second], q[2 * group + 1][2 + second]};
      turn_words(turned, lane);
      q[2 * group][second] = turned[0], q[2 * group][2 + second] = turned[1];
      q[2 * group + 1][second] = turned[2], q[2 * group + 1][2 + second] = turned[3];
    }
  }
  proxy_fence();
  named_sync<128>(kScores);
}

// Rows of 16 columns along the sum, in blocks of 8 rows and 8 columns.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address) {
  return uint64_t{256 >> 4} << 32 | uint64_t{128 >> 4} << 16 | (address >> 4 & 0x3fff);
}

// Starts the products of one part of a step's scores, 64 x 64, along its columns. The last block of
// the last part is a group of its own. `there`: the part's keys are, so that nothing has to wait.
template <bool kBFloat16, int kPart>
__device__ __forceinline__ void start_scores(float (&s)[32], const uint32_t (&q)[kHeldSteps][4],
                                             const AheadMemory& memory, const AheadRing& ring,
                                             bool there) {
  const uint32_t tile = memory.tile(ring.stage);
  if (!there) mbarrier_wait(memory.full(kPart, ring.stage), ring.parity);
  wgmma_fence();
#pragma unroll
  for (int at = 0; at < part_blocks(kPart); ++at) {
    const int block = part_block(kPart) + at;
    if (kPart == kAheadParts - 1 && at == part_blocks(kPart) - 1) wgmma_commit();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t keys = rows_descriptor(tile) + ((block * kMlaBlock + k * 32) >> 4);
      if (block == kMlaBlocks - 1) {
        wgmma_64<kBFloat16>(s, rows_descriptor(memory.base + kAheadRotary) + (k * 32 >> 4), keys,
                            true);
      } else if (block * 4 + k == kHeldSteps) {
        wgmma_64<kBFloat16>(s, plain_descriptor(memory.base + kAheadLatent), keys, true);
      } else {
        wgmma_from_registers<kBFloat16, false>(s, q[block * 4 + k], keys, block > 0 || k > 0);
      }
    }
  }
  if (kPart == kAheadParts - 1) wgmma_commit();
}

// True if all keys of a step are there.
__device__ __forceinline__ bool keys_arrived(const AheadMemory& memory, const AheadRing& ring) {
  bool all = true;
#pragma unroll
  for (int part = 0; part < kAheadParts; ++part) {
    all &= mbarrier_test(memory.full(part, ring.stage), ring.parity);
  }
  return all;
}

// The place of the lane's row of a 16 x 16 matrix of probabilities in their tile.
__device__ __forceinline__ uint32_t shares_place() {
  const int thread = opaque(threadIdx.x % 128), lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;
  return row * kMlaColumns + (lane / 16 ^ row % 8) * 16;
}

// Probabilities, where the rotary columns of the keys were, as wgmma's first operand. `to` is the
// tile's address and shares_place().
template <typename Format>
__device__ __forceinline__ void store_shares(const float (&s)[32], uint32_t to) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float* from = s + 8 * k;
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to ^ (k * 32)),
        "r"(Format::pack(from)), "r"(Format::pack(from + 2)), "r"(Format::pack(from + 4)),
        "r"(Format::pack(from + 6))
        : "memory");
  }
}

// The first warpgroup: scores and probabilities. `b` is the lane's first sequence.
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void scores_group(const MlaDecodeArgs& args, int b,
                                             const AheadMemory& memory, unsigned char* pointer) {
  AheadRing ring;
  // If products bound the kernel, those of a step start before the probabilities of the step before
  // are announced. If memory does, nothing may keep a stage from being free.
  const bool late = args.row_blocks > 1;
  const auto announce = [&](int stage) {
    proxy_fence();
    release(memory.ready(stage));
  };

  while (true) {
    uint32_t q[kHeldSteps][4];
    load_queries_ahead(q, args, b, memory);
    RowState upper, lower;
    int before = -1;  // the stage whose values wait for their turn
    bool begins = true, there = false;
    int flags;
    do {
      const int stage = ring.stage;
      if (!there) there = __all_sync(kFullWarp, keys_arrived(memory, ring));
      // Values need not wait for scores whose keys are not there.
      if (before >= 0 && !there) {
        if (late) announce(before);
        release(memory.turn(before));
        before = -1;
      }
      float s[32] = {};
      wgmma_settle(s);
      start_scores<kBFloat16, 0>(s, q, memory, ring, there);
      if (late && before >= 0) announce(before);
      start_scores<kBFloat16, 1>(s, q, memory, ring, there);
      start_scores<kBFloat16, 2>(s, q, memory, ring, there);
      const AheadNote note = *ahead_note(pointer, stage);
      wgmma_wait<1>();
      if (before >= 0) release(memory.turn(before));
      wgmma_wait<0>();
      wgmma_settle(s);
      before = stage;
      flags = note.flags;
      const auto row_block_of = [&] {  // where it is needed: a division a step is long
        return static_cast<int>(opaque(blockIdx.x)) % args.row_blocks;
      };
      // Query i sees the keys before length - queries + i + 1.
      const int seen = note.length - args.queries + 1;
      const Place place;
      if (__builtin_expect(note.key + kMlaStep > seen, 0)) {
        const int at = row_block_of() * kMlaRows;
        const int end = seen + (at + place.row) / args.heads;
        const int other_end = seen + (at + place.row + 8) / args.heads;
        mask_scores(s, note.key + place.column, min(end, note.length), min(other_end, note.length));
      }
      const bool leads = place.column == 0;
      float scale = args.scale;
      asm volatile("" : "+f"(scale));  // in a register: a constant operand costs an issue slot
      ring.next();
      const float2 factor = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
      const bool arrived = late && keys_arrived(memory, ring);
      named_sync<128>(kScores);  // all have multiplied the rotary columns
      store_shares<Format>(s, memory.rotary(stage) + shares_place());
      // There is nothing to scale at a sequence's first step, so that its place has the inverses of
      // the sequence before.
      if (leads && !begins) {
        float* const factors = ahead_factors(pointer, stage) + place.row;
        factors[0] = factor.x, factors[8] = factor.y;
      }
      begins = false;
      there = __all_sync(kFullWarp, arrived);
      if (__builtin_expect(flags & AheadNote::kEnds, 0)) {
        upper.sum = lanes_reduce<4>(upper.sum, Sum());
        lower.sum = lanes_reduce<4>(lower.sum, Sum());
        // Parts stay sums; mla_combine divides.
        const bool parts = flags & AheadNote::kShared;
        // The values have read the factors that are there.
        mbarrier_wait(memory.empty(0, ring.stage), ring.parity ^ 1);
        mbarrier_wait(memory.empty(1, ring.stage), ring.parity ^ 1);
        if (leads) {
          float* const inverses = ahead_factors(pointer, ring.stage) + place.row;
          inverses[0] = row_factor<MlaLayout::kSame>(args, upper.sum, !parts);
          inverses[8] = row_factor<MlaLayout::kSame>(args, lower.sum, !parts);
        }
        b = note.b;
      }
      if (!late || (flags & AheadNote::kEnds)) announce(stage);
      if (__builtin_expect(flags & AheadNote::kEnds, 0)) {
        release(memory.turn(stage));
        const bool parts = flags & AheadNote::kShared;
        const int row_block = row_block_of(), at = row_block * kMlaRows;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int row = place.row + 8 * second;
          const RowState& state = second ? lower : upper;
          if (!leads || at + row >= args.rows) continue;
          if (parts) {
            const int lane = blockIdx.x / args.row_blocks;
            args.partial_sums[part_line(args, lane, flags & AheadNote::kBegins, row_block) + row] =
                make_float2(state.largest, state.sum);
          } else {
            store_lse(args, b, at + row, state.largest, state.sum);
          }
        }
        __syncwarp();
      }
    } while (!(flags & AheadNote::kEnds));
    if (flags & AheadNote::kLast) return;
    mbarrier_wait(memory.full(0, ring.stage), ring.parity);
    b = ahead_note(pointer, ring.stage)->b;
  }
}

// store_rows() in whole lines: a warp's 16 rows lie in shared memory in between, in its 8 KiB of
// the half that its warpgroup has multiplied.
template <typename Format>
__device__ __forceinline__ void store_lines(const MlaDecodeArgs& args, const AheadSteps& share,
                                            int half, const float (&o)[128], float2 factors,
                                            uint32_t values) {
  named_sync<128>(half == 0 ? kFirstTail : kSecondTail);  // all have multiplied the values
  const int own = opaque(threadIdx.x % 128), thread = own % 32, warp = own / 32;
  const int row_block = blockIdx.x % args.row_blocks;
  const uint32_t lines = values + warp * kMlaBlock;
  const int first = row_block * kMlaRows + warp * 16;
  if (share.shared()) {
    float* to =
        args.partial + half * 256 +
        (part_line(args, blockIdx.x / args.row_blocks, share.first == 0, row_block) + warp * 16) *
            kMlaLatent +
        thread * 4;
    const int row = thread / 4;
    const uint32_t from = lines + row * 512 + (thread % 4 / 2 ^ row) * 16 + thread % 2 * 8;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float* const four = o + 64 * pass + 4 * j;
        // 32 bytes of a row's 512 are one group of 8 columns.
        const uint32_t at = from ^ (j * 32);
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(four[0] * factors.x),
                     "f"(four[1] * factors.x)
                     : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 4096), "f"(four[2] * factors.y),
                     "f"(four[3] * factors.y)
                     : "memory");
      }
      __syncwarp();
#pragma unroll 4
      for (int i = 0; i < 16; ++i) {
        float4 four;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "r"(lines + i * 512 + (thread ^ i % 8) * 16)
                     : "memory");
        if (first + i < args.rows) {
          *reinterpret_cast<float4*>(to + i * kMlaLatent + pass * 128) = four;
        }
      }
      __syncwarp();
    }
    return;
  }
  const uint32_t into = lines + thread % 16 * 128 + (thread / 16 ^ thread % 8) * 16;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float* const from = o + 8 * j;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = i % 2 ? factors.y : factors.x;
      const float pair[2] = {from[2 * i] * factor, from[2 * i + 1] * factor};
      words[i] = Format::pack(pair);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (into ^ (j % 4 * 32)) + j / 4 * 2048),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
  __syncwarp();
  const int64_t offset = out_row(args, share.b, min(first + thread % 16, args.rows - 1)) - args.out;
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    char* const to = args.out + __shfl_sync(kFullWarp, offset, i) + half * 512 + thread * 8;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint2 two;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(two.x), "=r"(two.y)
                   : "r"(lines + part * 4096 + thread / 16 * 2048 + i * 128 +
                         (thread / 2 % 8 ^ i % 8) * 16 + thread % 2 * 8)
                   : "memory");
      if (first + i < args.rows) *reinterpret_cast<uint2*>(to + part * 256) = two;
    }
  }
  __syncwarp();
}

// The second and the third warpgroup: probabilities times a half of the values. A warp of the
// second loads the stages that both have freed. It looks for that whenever it waits, and finds
// where the next keys are while products run.
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void values_group(const MlaDecodeArgs& args, const CUtensorMap* map,
                                             const CUtensorMap* halves, const AheadMemory& memory,
                                             unsigned char* pointer, int half) {
  const bool loads = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) == 4;
  if (loads) {
#pragma unroll 1
    for (int stage = 0; stage < kAheadStages; ++stage) {
      if (ahead_cursor(pointer)->step < 0) break;
      load_ahead(args, map, halves, memory, pointer, stage, ahead_row(args, pointer));
    }
  }
  __syncwarp();
  AheadRing ring;
  float o[128];
  AheadSteps steps;
  constexpr int kNothing = -2;
  int row = kNothing;  // of the step that the stage before is to be loaded with
  // Until the phase is over, loads the stage before as soon as it is free.
  const auto load_until = [&](uint32_t barrier) {
    while (!__all_sync(kFullWarp, mbarrier_test(barrier, ring.parity))) {
      if (row == kNothing) continue;
      const AheadRing before = ring.before();
      if (__all_sync(kFullWarp, mbarrier_test(memory.empty(0, before.stage), before.parity) &&
                                    mbarrier_test(memory.empty(1, before.stage), before.parity))) {
        load_ahead(args, map, halves, memory, pointer, before.stage, row);
        row = kNothing;
      }
    }
  };
  do {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    bool begins = true;
    do {
      const uint32_t values = memory.tile(ring.stage) + half * kHalfBlocks * kMlaBlock;
      if (loads) load_until(memory.ready(ring.stage));
      __syncwarp();
      mbarrier_wait(memory.ready(ring.stage), ring.parity);
      {
        const AheadNote note = *ahead_note(pointer, ring.stage);
        steps = {note.b, note.flags, !(note.flags & AheadNote::kBegins)};
        const int keys = note.length - note.key;
        if (keys < kMlaStep) clear_tail(values, keys, half == 0 ? kFirstTail : kSecondTail);
        if (!begins) {
          const Place place;
          const float* const factors = ahead_factors(pointer, ring.stage) + place.row;
          scale_rows(o, make_float2(factors[0], factors[8]));
        }
        begins = false;
      }
      if (loads) load_until(memory.turn(ring.stage));
      __syncwarp();
      mbarrier_wait(memory.turn(ring.stage), ring.parity);
      wgmma_settle(o);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kMlaStep / 16; ++k) {
        wgmma_turned_256<kBFloat16>(o, rows_descriptor(memory.rotary(ring.stage) + k * 32),
                                    turned_descriptor(values + k * 16 * kMlaColumns, kMlaBlock),
                                    true);
      }
      wgmma_commit();
      if (loads) {
        if (row != kNothing) {
          const AheadRing before = ring.before();
          mbarrier_wait(memory.empty(0, before.stage), before.parity);
          mbarrier_wait(memory.empty(1, before.stage), before.parity);
          load_ahead(args, map, halves, memory, pointer, before.stage, row);
        }
        row = ahead_row(args, pointer);
      }
      __syncwarp();
      wgmma_wait<0>();
      wgmma_settle(o);
      if (steps.flags & AheadNote::kEnds) break;
      release(memory.empty(half, ring.stage), args.pair);
      ring.next();
    } while (true);
    const AheadRing last = ring;
    ring.next();
    const Place place;
    const float* const inverses = ahead_factors(pointer, ring.stage) + place.row;
    const float2 factors = make_float2(inverses[0], inverses[8]);
    // Parts of few rows, or of sequences in many lanes, are little to write, and waited for.
    if (steps.shared() && (args.row_groups > 1 || args.part_rows < kMlaRows)) {
      release(memory.empty(half, last.stage), args.pair);
      store_rows<Format>(args, steps, blockIdx.x / args.row_blocks, blockIdx.x % args.row_blocks,
                         half, o, factors);
    } else {
      store_lines<Format>(args, steps, half, o, factors,
                          memory.tile(last.stage) + half * kHalfBlocks * kMlaBlock);
      proxy_fence();
      release(memory.empty(half, last.stage), args.pair);
    }
    __syncwarp();
  } while (!(steps.flags & AheadNote::kLast));
}

template <typename Format, bool kBFloat16>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_decode_ahead(const __grid_constant__ MlaDecodeArgs args,
                     const __grid_constant__ CUtensorMap map,
                     const __grid_constant__ CUtensorMap halves) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const AheadMemory memory{shared_address(shared)};
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    const auto init = [&](uint32_t barrier, int arrivals) {
      mbarrier_init(reinterpret_cast<uint64_t*>(shared + (barrier - memory.base)), arrivals);
    };
    for (int stage = 0; stage < kAheadStages; ++stage) {
      for (int part = 0; part < kAheadParts; ++part) init(memory.full(part, stage), 1);
      for (int half = 0; half < 2; ++half) init(memory.empty(half, stage), args.pair ? 8 : 4);
      init(memory.ready(stage), 4);
      init(memory.turn(stage), 4);
    }
    mbarrier_init_fence();
    map_prefetch(&map);
    map_prefetch(&halves);
  }
  __syncthreads();
  if (args.pair) {
    cluster_arrive();
    cluster_wait();
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = blockIdx.x / args.row_blocks, row_block = blockIdx.x % args.row_blocks;
  Share share{};
  if (group == 0) {
    set_registers<kScoresRegisters, true>();
    const bool any = share.begin(args, lane);
    if (args.shared != nullptr && row_block == 0 && threadIdx.x == 0) {
      list_shared(args, share, any, lane);
    }
    __syncwarp();
    if (!any) return;
    scores_group<Format, kBFloat16>(args, share.b, memory, shared);
  } else {
    set_registers<kValuesRegisters, false>();
    if (!share.begin(args, lane)) return;
    if (threadIdx.x == 128) *ahead_cursor(shared) = {share, share.first};
    __syncwarp();
    values_group<Format, kBFloat16>(args, &map, &halves, memory, shared, group - 1);
  }
  if (args.pair) {  // neither ends while the other still loads into it, or tells it of a free half
    __syncwarp();
    cluster_arrive();  // not relaxed: arrivals at the other's barriers come before it ends
    cluster_wait();
  }
}

#define TIERCEL_MLA_DECODE_AHEAD(dtype)                                      \
  {DType::k##dtype, MlaLayout::kSame,                                        \
   Kernel("mla_decode_ahead<" #dtype ">",                                    \
          reinterpret_cast<const void*>(                                     \
              mla_decode_ahead<dtype, DType::k##dtype == DType::kBFloat16>), \
          kAheadShared)}

const MlaDecodeKernel kKernels[] = {TIERCEL_MLA_DECODE_AHEAD(BFloat16),
                                    TIERCEL_MLA_DECODE_AHEAD(Float16)};

}  // namespace

const MlaDecodeKernel* mla_ahead_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
