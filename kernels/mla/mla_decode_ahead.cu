// SPDX-License-Identifier: Apache-2.0
// mla_decode_ahead: mla_decode over a cache of 16 bits whose pages have 64 keys or more. It makes
// the scores of a step before it multiplies the values of the step before.
//
// A block has 64 rows, queries times heads of one sequence, and goes through the keys in steps of
// 64. Of its three warpgroups
//   the first multiplies queries and keys (64 x 64, along 576) and makes probabilities of the
//     scores. It has 496 of its queries' columns in registers, so that most of these products read
//     keys alone from shared memory;
//   the second and the third multiply probabilities by 256 columns of the values each. A warp of
//     the second loads keys, between its products: one box of 64 keys for each half of the latents.
// Three steps of 72 KiB are in flight. Probabilities take the place of a step's rotary columns,
// which are no values. They have the bits of mla_decode's: each sum has the same order.
//
// The tensor cores have work all the time if the scores of step j + 1 are made before the values of
// step j are multiplied: while these are, probabilities of step j + 1 are made. So the second and
// the third warpgroup wait for their turn, which comes when most of the scores are made, or at once
// if their keys are not there yet. The first warpgroup never waits for the others, except for keys:
// its instructions between two steps bound the kernel as much as the products do.
//
// Two blocks with other rows of the same sequences are a cluster and read the same keys at the same
// time: each loads half of their columns, into the shared memory of both.
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
__device__ __forceinline__ void turn_words(uint32_t (&w)[4]) {
  const int lane = threadIdx.x;
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
    turn_words(turned);
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
      turn_words(turned);
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

// Starts the scores of a step, 64 x 64, along all columns: two groups of products, of which the
// second is the last block's.
template <bool kBFloat16>
__device__ __forceinline__ void start_scores(float (&s)[32], const uint32_t (&q)[kHeldSteps][4],
                                             const AheadMemory& memory, const AheadRing& ring) {
  const uint32_t tile = memory.tile(ring.stage);
  wgmma_settle(s);
#pragma unroll
  for (int part = 0; part < kAheadParts; ++part) {
    mbarrier_wait(memory.full(part, ring.stage), ring.parity);
    wgmma_fence();
#pragma unroll
    for (int at = 0; at < part_blocks(part); ++at) {
      const int block = part_block(part) + at;
      const bool last = part == kAheadParts - 1 && at == part_blocks(part) - 1;
      if (last) wgmma_commit();
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
  }
  wgmma_commit();
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

  while (true) {
    uint32_t q[kHeldSteps][4];
    load_queries_ahead(q, args, b, memory);
    RowState upper, lower;
    int before = -1;
    bool begins = true;
    int flags;
    do {
      const int stage = ring.stage;
      // Values need not wait for scores whose keys are not there.
      if (before >= 0 &&
          !__all_sync(kFullWarp, mbarrier_test(memory.full(kAheadParts - 1, stage), ring.parity))) {
        release(memory.turn(before));
        before = -1;
      }
      float s[32] = {};
      start_scores<kBFloat16>(s, q, memory, ring);
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
      const float2 factor = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
      named_sync<128>(kScores);  // all have multiplied the rotary columns
      store_shares<Format>(s, memory.rotary(stage) + shares_place());
      // There is nothing to scale at a sequence's first step, so that its place has the inverses of
      // the sequence before.
      if (leads && !begins) {
        float* const factors = ahead_factors(pointer, stage) + place.row;
        factors[0] = factor.x, factors[8] = factor.y;
      }
      begins = false;
      ring.next();
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
      proxy_fence();
      release(memory.ready(stage));
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

// The second and the third warpgroup: probabilities times a half of the values. A warp of the
// second loads the stages that both have freed. It looks for that while it waits for its turn, and
// finds where the next keys are while products run.
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void values_group(const MlaDecodeArgs& args, const CUtensorMap* map,
                                             const CUtensorMap* halves, const AheadMemory& memory,
                                             unsigned char* pointer, int half) {
  const bool loads = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) == 4;
  if (loads) {
#pragma unroll 1
    for (int stage = 0; stage < kAheadStages; ++stage) {
      load_ahead(args, map, halves, memory, pointer, stage, ahead_row(args, pointer));
    }
  }
  __syncwarp();
  AheadRing ring;
  float o[128];
  AheadSteps steps;
  int row = -1;
  bool pending = false;  // the stage before is to be loaded
  do {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    bool begins = true;
    do {
      const uint32_t values = memory.tile(ring.stage) + half * kHalfBlocks * kMlaBlock;
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
      if (loads) {
        while (true) {
          const bool mine =
              __all_sync(kFullWarp, mbarrier_test(memory.turn(ring.stage), ring.parity));
          if (pending) {
            const AheadRing before = ring.before();
            if (__all_sync(kFullWarp,
                           mbarrier_test(memory.empty(0, before.stage), before.parity) &&
                               mbarrier_test(memory.empty(1, before.stage), before.parity))) {
              load_ahead(args, map, halves, memory, pointer, before.stage, row);
              pending = false;
            }
          }
          if (mine) break;
        }
      }
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
        if (pending) {
          const AheadRing before = ring.before();
          mbarrier_wait(memory.empty(0, before.stage), before.parity);
          mbarrier_wait(memory.empty(1, before.stage), before.parity);
          load_ahead(args, map, halves, memory, pointer, before.stage, row);
        }
        row = ahead_row(args, pointer);
        pending = true;
      }
      __syncwarp();
      wgmma_wait<0>();
      wgmma_settle(o);
      release(memory.empty(half, ring.stage), args.pair);
      ring.next();
    } while (!(steps.flags & AheadNote::kEnds));
    const Place place;
    const float* const inverses = ahead_factors(pointer, ring.stage) + place.row;
    store_rows<Format>(args, steps, blockIdx.x / args.row_blocks, blockIdx.x % args.row_blocks,
                       half, o, make_float2(inverses[0], inverses[8]));
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
    cluster_arrive();
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
