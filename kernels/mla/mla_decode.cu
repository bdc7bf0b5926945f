// SPDX-License-Identifier: Apache-2.0
// mla_decode: attention of absorbed queries over a latent cache, whose rows are keys and, without
// their last 64 columns, values. 16-bit caches with pages of 64 keys or more use mla_decode_ahead.
//
// A block has 64 rows, queries times heads of one sequence, and goes through the keys in steps of
// 64. Of its three warpgroups
//   the first multiplies queries and keys (64 x 64, along 576), makes probabilities of the scores,
//     and multiplies these by the first 256 columns of the values;
//   the second multiplies the same probabilities by the other 256 columns;
//   the third loads: one warp what the first warpgroup frees, one what the second does. Float8 goes
//     through its registers and becomes 16 bits there.
// A step's rows are loaded once, 72 KiB, and both products read them from shared memory: values are
// the same tile, transposed by wgmma. Two steps are in flight. Probabilities have the fragments of
// scores, so a thread of the second warpgroup takes over those of its counterpart.
//
// Two blocks with different rows of the same sequences form a cluster and read the same keys at the
// same time: each loads half of them, into the shared memory of both.
//
// Blocks share the steps of all sequences evenly, by the lengths on the GPU (share.cuh);
// mla_combine combines the parts of sequences that several lanes share.
#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load.cuh"
#include "kernels/mla/load_float8.cuh"
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

// The first warpgroup: scores, probabilities, the first half of the values.
template <typename Format, bool kBFloat16, MlaLayout kLayout>
__device__ __forceinline__ void first_group(const MlaDecodeArgs& args, Share share, int lane,
                                            int row_block, const Memory& memory,
                                            unsigned char* pointer) {
  const int thread = threadIdx.x % 128;
  const float scale = args.scale * value_scale_of<kLayout>(args);
  uint4* const fragments = reinterpret_cast<uint4*>(pointer + kMlaShares) + thread;
  float2* const factors = reinterpret_cast<float2*>(pointer + kMlaFactors) + thread;
  float o[128];
  Ring ring;
  constexpr bool kNext = kLayout == MlaLayout::kSame;
  if (kNext) start_queries(args, share.b, row_block, memory);
  do {
    if (kNext) {
      wait_queries();
    } else {
      load_queries(args, share.b, row_block, memory);
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    RowState upper, lower;
    // Query i sees the keys before length - queries + i + 1.
    const int seen = share.length - args.queries + 1, at = row_block * kMlaRows;
    const int all_see = seen + at / args.heads;
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep;
      float s[32] = {};
      multiply_keys<kBFloat16>(s, memory, ring);
      if (key + kMlaStep > all_see) {
        const Place place;
        const int end = seen + (at + place.row) / args.heads;
        const int other_end = seen + (at + place.row + 8) / args.heads;
        mask_scores(s, key + place.column, min(end, share.length), min(other_end, share.length));
      }
      const float2 factor = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
      Shares shares;
      shares.pack<Format>(s);
      named_sync<kConsumers>(kTaken);
      *factors = factor;
      shares.write(fragments);
      named_arrive<kConsumers>(kProbabilities);
      if (kNext && step + 1 == share.last && share.more()) {
        start_queries(args, share.b + 1, row_block, memory);
      }
      const uint32_t values = memory.keys(ring.stage());
      if (key + kMlaStep > share.length) clear_tail(values, share.length - key, kFirstTail);
      scale_rows(o, factor);
      multiply_values<kBFloat16>(o, shares.words, values);
      release(memory.empty(0, ring.stage()), kLayout == MlaLayout::kSame && args.pair);
    }
    upper.sum = lanes_reduce<4>(upper.sum, Sum());
    lower.sum = lanes_reduce<4>(lower.sum, Sum());
    // Parts stay sums; mla_combine divides.
    const bool whole = !share.shared();
    const float2 inverse = {row_factor<kLayout>(args, upper.sum, whole),
                            row_factor<kLayout>(args, lower.sum, whole)};
    named_sync<kConsumers>(kTaken);
    *factors = inverse;
    named_arrive<kConsumers>(kProbabilities);
    store_rows<Format>(args, share, lane, row_block, 0, o, inverse);
    const Place place;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = place.row + 8 * second;
      const RowState& state = second ? lower : upper;
      if (thread % 4 != 0 || at + row >= args.rows) continue;
      if (share.shared()) {
        args.partial_sums[part_line(args, lane, share.first == 0, row_block) + row] =
            make_float2(state.largest, state.sum);
      } else {
        store_lse(args, share.b, at + row, state.largest, state.sum);
      }
    }
    __syncwarp();
  } while (share.next(args));
  named_sync<kConsumers>(kTaken);
}

// The second warpgroup: the other half of the values.
template <typename Format, bool kBFloat16, MlaLayout kLayout>
__device__ __forceinline__ void second_group(const MlaDecodeArgs& args, Share share, int lane,
                                             int row_block, const Memory& memory,
                                             const unsigned char* pointer) {
  const int thread = threadIdx.x % 128;
  const uint4* const fragments = reinterpret_cast<const uint4*>(pointer + kMlaShares) + thread;
  const float2* const factors = reinterpret_cast<const float2*>(pointer + kMlaFactors) + thread;
  float o[128];
  Ring ring;
  named_arrive<kConsumers>(kTaken);
  constexpr bool kNext = kLayout == MlaLayout::kSame;
  if (kNext) start_queries(args, share.b, row_block, memory);
  do {
    if (kNext) {
      wait_queries();
    } else {
      load_queries(args, share.b, row_block, memory);
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep, stage = ring.stage();
      named_sync<kConsumers>(kProbabilities);
      const float2 factor = *factors;
      Shares shares;
      shares.read(fragments);
      named_arrive<kConsumers>(kTaken);
      if (kNext && step + 1 == share.last && share.more()) {
        start_queries(args, share.b + 1, row_block, memory);
      }
      mbarrier_wait(memory.full(1, stage), ring.parity());
      const uint32_t values = memory.keys(stage) + kHalfBlocks * kMlaBlock;
      if (key + kMlaStep > share.length) clear_tail(values, share.length - key, kSecondTail);
      scale_rows(o, factor);
      multiply_values<kBFloat16>(o, shares.words, values);
      release(memory.empty(1, stage), kLayout == MlaLayout::kSame && args.pair);
    }
    named_sync<kConsumers>(kProbabilities);
    const float2 inverse = *factors;
    named_arrive<kConsumers>(kTaken);
    store_rows<Format>(args, share, lane, row_block, 1, o, inverse);
    __syncwarp();
  } while (share.next(args));
}

template <typename Format, bool kBFloat16, MlaLayout kLayout>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_decode(const __grid_constant__ MlaDecodeArgs args,
               const __grid_constant__ CUtensorMap map) {
  constexpr bool kFloat8 = kLayout != MlaLayout::kSame;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{shared_address(shared)};
  const bool by_row = args.copy_rows < kMlaLeastBox;
  const bool pair = !kFloat8 && args.pair;
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + kMlaBarriers);
    const int loaders = kFloat8 || by_row ? 4 : 1;
    for (int i = 0; i < 2 * kMlaStages; ++i) mbarrier_init(barriers + i, loaders);
    const int readers = pair ? 8 : 4;
    for (int i = 2 * kMlaStages; i < 4 * kMlaStages; ++i) mbarrier_init(barriers + i, readers);
    mbarrier_init_fence();
    if (!kFloat8) map_prefetch(&map);
  }
  __syncthreads();
  if (pair) {
    cluster_arrive();
    cluster_wait();
  }
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
    first_group<Format, kBFloat16, kLayout>(args, share, lane, row_block, memory, shared);
  } else {
    set_registers<Registers<kLayout>::kMultiply, true>();
    if (!share.begin(args, lane)) return;
    second_group<Format, kBFloat16, kLayout>(args, share, lane, row_block, memory, shared);
  }
  if (pair) {  // neither ends while the other still loads into it, or tells it of a free half
    __syncwarp();
    cluster_arrive();
    cluster_wait();
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
