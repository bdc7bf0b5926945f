// SPDX-License-Identifier: Apache-2.0
// mla_decode: attention of absorbed queries over one latent cache, whose rows are keys and, without
// their last 64 columns, values.
//
// A block has 64 rows, queries times heads of one sequence, and goes through the keys in steps of
// 64. Of its three warpgroups the first two take turns: the first has the even steps, the second
// the odd ones. The owner of a step multiplies queries and keys (64 x 64, along 576), makes
// probabilities of the scores and gives them to the other. Both then multiply them by values, the
// first by columns 0 to 255, the second by columns 256 to 511. So one multiplies while the other
// makes probabilities. The third loads: one warp what the first warpgroup frees, one what the
// second does. Float8 goes through its registers and becomes 16 bits there.
//
// A warpgroup's sums are relative to the largest score that it has seen or been told of, row by
// row. Probabilities come with the score that they are relative to; whichever of the two is the
// smaller is scaled. So neither waits for the other's scores before it makes probabilities. The
// method is FlashMLA's "seesaw", but for that.
//
// A step's rows are loaded once, 72 KiB, and both products read them from shared memory: values are
// the same tile, turned by wgmma. Two steps are in flight. The fragments of probabilities are those
// of scores, so that a thread takes over what its counterpart of the other warpgroup has. Those of
// even steps have a place of their own, those of odd ones lie where the step's rotary columns were.
//
// Blocks share all sequences' steps evenly, as lengths on the GPU say (share.cuh); mla_combine puts
// sequences together that several lanes have.
#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load.cuh"
#include "kernels/mla/load_float8.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/rows.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

// Zeros in the values behind the sequence's end, which may be NaN in memory: their probabilities
// are 0. By the threads of one warpgroup, in its half.
__device__ __forceinline__ void clear_tail(uint32_t values, int first, int barrier) {
  constexpr int kChunks = kHalfBlocks * 8;  // of 16 bytes, of a row
  for (int at = threadIdx.x % 128; at < (kMlaStep - first) * kChunks; at += 128) {
    const int row = first + at / kChunks, chunk = at % kChunks;
    const uint32_t to = values + chunk / 8 * kMlaBlock + row * kMlaColumns + chunk % 8 * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  proxy_fence();
  named_sync<128>(barrier);
}

// Scores of keys that a row does not see become minus infinity.
__device__ __forceinline__ void mask_scores(float (&s)[32], int first, int end, int other_end) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 8 * j + i % 2;
      if (key >= (i < 2 ? end : other_end)) s[4 * j + i] = -INFINITY;
    }
  }
}

// One of the two multiplying warpgroups.
template <typename Format, bool kBFloat16, MlaLayout kLayout, int kGroup>
__device__ __forceinline__ void multiply_group(const MlaDecodeArgs& args, Share share, int lane,
                                               int row_block, const Memory& memory,
                                               unsigned char* pointer) {
  constexpr int kOther = 1 - kGroup, kTail = kGroup == 0 ? kFirstTail : kSecondTail;
  // The second warpgroup multiplies an even step's values while it has its own scores made, and
  // makes probabilities of these meanwhile. Float8 leaves no registers for that.
  constexpr bool kBetween = kGroup == 1 && kLayout == MlaLayout::kSame;
  const int thread = threadIdx.x % 128;
  const float scale = args.scale * value_scale_of<kLayout>(args);
  // Where a warpgroup leaves the probabilities of its steps, and the scores they are relative to.
  const auto shares_of = [&](int group) {
    return reinterpret_cast<uint4*>(pointer + (group == 0 ? kMlaShares : kMlaOddShares)) +
           opaque(threadIdx.x % 128);
  };
  const auto scores_of = [&](int group) {
    return reinterpret_cast<float*>(pointer + kMlaScores) + group * kMlaRows + Place().row;
  };
  const auto values_of = [&](int stage) {
    return memory.keys(stage) + kGroup * kHalfBlocks * kMlaBlock;
  };
  float o[128];
  Ring ring;
  if (kGroup == 1) named_arrive<kConsumers>(kTaken);
  do {
    load_queries(args, share.b, row_block, memory);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    RowState upper, lower;
    // Query i sees the keys before length - queries + i + 1.
    const int at = row_block * kMlaRows;
    const int all_see = share.length - args.queries + 1 + at / args.heads;
    // Takes over the probabilities of the other warpgroup's last step.
    const auto take = [&](Shares& shares) {
      named_sync<kConsumers>(kEvenShares + kOther);
      const float2 scores = {scores_of(kOther)[0], scores_of(kOther)[8]};
      shares.read(shares_of(kOther));
      if (kGroup == 1) named_arrive<kConsumers>(kTaken);
      scale_rows(o, {upper.grow(scores.x), lower.grow(scores.y)});
      shares.scale<Format>({upper.factor_of(scores.x), lower.factor_of(scores.y)});
    };
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep, stage = ring.stage();
      Shares shares;
      if (stage == kOther) {
        if (kBetween && step + 1 < share.last) continue;  // between the next step's products
        take(shares);
        mbarrier_wait(memory.full(kGroup, stage), ring.parity());
      } else {
        float s[32] = {};  // in this scope, so that it has no registers in the other
        float2 factors;
        // Makes probabilities of the scores, and gives them to the other warpgroup.
        const auto give = [&] {
          wgmma_settle(s);
          if (key + kMlaStep > all_see) {
            const Place place;
            const int seen = share.length - args.queries + 1;
            const int end = seen + (at + place.row) / args.heads;
            const int other_end = seen + (at + place.row + 8) / args.heads;
            mask_scores(s, key + place.column, min(end, share.length),
                        min(other_end, share.length));
          }
          factors = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
          shares.pack<Format>(s);
          // Until then the place has the last even step's probabilities, or the rotary columns.
          if (kGroup == 0) {
            named_sync<kConsumers>(kTaken);
          } else {
            named_sync<128>(kSecondTail);
          }
          shares.write(shares_of(kGroup));
          if (thread % 4 == 0) {
            scores_of(kGroup)[0] = upper.largest;
            scores_of(kGroup)[8] = lower.largest;
          }
          if (kGroup == 1) proxy_fence();  // TMA writes there next
          named_arrive<kConsumers>(kEvenShares + kGroup);
        };
        start_keys<kBFloat16>(s, memory, ring);
        if (kBetween && step > share.first) {
          Shares taken;
          take(taken);
          mbarrier_wait(memory.full(kGroup, kOther), Ring{ring.count - 1}.parity());
          start_values<kBFloat16>(o, taken.words, values_of(kOther));
          wgmma_wait<1>();
          give();
          wgmma_wait<0>();
          wgmma_settle(o);
          release(memory.empty(kGroup, kOther));
        } else {
          wgmma_wait<0>();
          give();
        }
        scale_rows(o, factors);
      }
      if (key + kMlaStep > share.length) clear_tail(values_of(stage), share.length - key, kTail);
      multiply_values<kBFloat16>(o, shares.words, values_of(stage));
      release(memory.empty(kGroup, stage));
    }
    // Each has summed the exponentials of its own steps.
    upper.sum = lanes_reduce<4>(upper.sum, Sum());
    lower.sum = lanes_reduce<4>(lower.sum, Sum());
    float4* const ends = reinterpret_cast<float4*>(pointer + kMlaShares) + thread;
    named_sync<kConsumers>(kEnds);
    ends[kGroup * 128] = make_float4(upper.largest, lower.largest, upper.sum, lower.sum);
    named_sync<kConsumers>(kEnds);
    const float4 other = ends[kOther * 128];
    float2 factors = {upper.grow(other.x), lower.grow(other.y)};
    upper.sum += other.z * upper.factor_of(other.x);
    lower.sum += other.w * lower.factor_of(other.y);
    const Place place;
    // Parts stay sums; mla_combine divides.
    factors.x *= row_factor<kLayout>(args, upper.sum, !share.shared());
    factors.y *= row_factor<kLayout>(args, lower.sum, !share.shared());
    store_rows<Format>(args, share, lane, row_block, kGroup, o, factors);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = place.row + 8 * second;
      const RowState& state = second ? lower : upper;
      if (kGroup == 1 || thread % 4 != 0 || at + row >= args.rows) continue;
      if (share.shared()) {
        args.partial_sums[part_line(args, lane, share.first == 0, row_block) + row] =
            make_float2(state.largest, state.sum);
      } else {
        store_lse(args, share.b, at + row, state.largest, state.sum);
      }
    }
    __syncwarp();
  } while (share.next(args));
  if (kGroup == 0) named_sync<kConsumers>(kTaken);
}

template <typename Format, bool kBFloat16, MlaLayout kLayout>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_decode(const __grid_constant__ MlaDecodeArgs args,
               const __grid_constant__ CUtensorMap map) {
  constexpr bool kFloat8 = kLayout != MlaLayout::kSame;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{shared_address(shared)};
  const bool by_row = args.copy_rows < kMlaLeastBox;
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + kMlaBarriers);
    const int loaders = kFloat8 || by_row ? 4 : 1;
    for (int i = 0; i < 2 * kMlaStages; ++i) mbarrier_init(barriers + i, loaders);
    for (int i = 2 * kMlaStages; i < 4 * kMlaStages; ++i) mbarrier_init(barriers + i, 4);
    mbarrier_init_fence();
    if (!kFloat8) map_prefetch(&map);
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = blockIdx.x / args.row_blocks, row_block = blockIdx.x % args.row_blocks;
  // Each role finds its share by itself, so that no registers are kept for it across the roles.
  Share share{};
  if (group == 2) {
    set_registers<Registers<kLayout>::kLoad, false>();
    if (!share.begin(args, lane)) return;
    const int warp = threadIdx.x % 128 / 32;
    if constexpr (kFloat8) {
      load_float8_keys<Format, kLayout == MlaLayout::kPacked, PagedRowsFinder>(args, share, memory,
                                                                               shared);
    } else if (by_row) {
      load_keys_by_row(args, share, memory, shared);
    } else if (warp < 2) {
      load_keys(args, &map, share, memory, warp, shared);
    }
  } else if (group == 0) {
    set_registers<Registers<kLayout>::kMultiply, true>();
    const bool any = share.begin(args, lane);
    if (args.shared != nullptr && row_block == 0 && threadIdx.x == 0) {
      list_shared(args, share, any, lane);
    }
    __syncwarp();
    if (!any) return;
    multiply_group<Format, kBFloat16, kLayout, 0>(args, share, lane, row_block, memory, shared);
  } else {
    set_registers<Registers<kLayout>::kMultiply, true>();
    if (!share.begin(args, lane)) return;
    multiply_group<Format, kBFloat16, kLayout, 1>(args, share, lane, row_block, memory, shared);
  }
}

#define TIERCEL_MLA_DECODE(dtype, layout)                                                    \
  {DType::k##dtype, MlaLayout::k##layout,                                                    \
   Kernel("mla_decode<" #dtype ", " #layout ">",                                             \
          reinterpret_cast<const void*>(                                                     \
              mla_decode<dtype, DType::k##dtype == DType::kBFloat16, MlaLayout::k##layout>), \
          kMlaShared)}

const MlaDecodeKernel kKernels[] = {
    TIERCEL_MLA_DECODE(BFloat16, Same),   TIERCEL_MLA_DECODE(Float16, Same),
    TIERCEL_MLA_DECODE(BFloat16, Float8), TIERCEL_MLA_DECODE(Float16, Float8),
    TIERCEL_MLA_DECODE(BFloat16, Packed),
};

}  // namespace

const MlaDecodeKernel* mla_decode_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
