// SPDX-License-Identifier: Apache-2.0
// mla_sparse: attention of absorbed queries, each over its own list of rows of a latent cache.
//
// A block has 64 rows, heads of one query, and goes through the list in pairs of steps of 64 keys.
// Of its three warpgroups
//   the first makes the probabilities of each pair's first step, and sums the first 256 columns of
//     the values of both;
//   the second makes those of the second step, and sums the other 256 columns of both;
//   the third loads the rows, as mla_decode's does, with zeros where an entry is none.
// So one warpgroup's products run while the other computes probabilities. The running maximum
// passes from step to step in order, as if one warpgroup computed all probabilities: a step's
// fragments, maxima and factors pass through one buffer in shared memory, since a thread writes
// where it has just read.
//
// Blocks share the steps of all queries evenly; mla_combine combines the parts of queries that
// several lanes share.
#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load_float8.cuh"
#include "kernels/mla/load_sparse.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/rows.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/mla/sparse.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

// Barriers of the probabilities of a pair's first and second step, and of the sums.
enum SparseBarrier { kFirstReady = kFirstFree, kSecondReady, kSums };

// Scores of keys that are none become minus infinity.
__device__ __forceinline__ void mask_invalid(float (&s)[32], const unsigned char* pointer,
                                             int stage, int column) {
  const uint2 valid = reinterpret_cast<const uint2*>(pointer + kSparseValid)[stage];
  if ((valid.x & valid.y) == ~0u) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const unsigned bits = (j < 4 ? valid.x : valid.y) >> (8 * (j % 4) + column);
    if ((bits & 1) == 0) s[4 * j] = s[4 * j + 2] = -INFINITY;
    if ((bits & 2) == 0) s[4 * j + 1] = s[4 * j + 3] = -INFINITY;
  }
}

// A thread's part of its two rows.
struct Rows {
  RowState upper, lower;

  // Goes on from a step of the other warpgroup: its factors and largest scores.
  __device__ __forceinline__ float2 follow(const float2* exchange, int row) {
    const float2 above = exchange[row], below = exchange[row + 8];
    upper.largest = above.y, lower.largest = below.y;
    upper.sum *= above.x, lower.sum *= below.x;
    return make_float2(above.x, below.x);
  }
};

// One of the two multiplying warpgroups.
template <typename Format, bool kBFloat16, MlaLayout kLayout, int kGroup>
__device__ __forceinline__ void multiply_group(const MlaDecodeArgs& args, SparseShare share,
                                               int lane, int row_block, const Memory& memory,
                                               unsigned char* pointer) {
  constexpr int kReady = kGroup == 0 ? kFirstReady : kSecondReady;
  constexpr int kOthersReady = kGroup == 0 ? kSecondReady : kFirstReady;
  const int thread = threadIdx.x % 128;
  const float scale = args.scale * value_scale_of<kLayout>(args);
  const auto fragments = [&] {
    return reinterpret_cast<uint4*>(pointer + kMlaShares) + opaque(threadIdx.x % 128);
  };
  float2* const exchange = reinterpret_cast<float2*>(pointer + kSparseExchange);
  float* const sums = reinterpret_cast<float*>(pointer + kSparseSums);
  const uint32_t offset = kGroup * kHalfBlocks * kMlaBlock;  // of the own half of values
  float o[128], s[32];
  uint32_t p[4][4];
  Rows state;
  Ring ring;

  // Starts the product of the other warpgroup's step, which `of` stands at.
  const auto follow = [&](const Ring& of) {
    named_sync<kConsumers>(kOthersReady);
    const float2 factor = state.follow(exchange, Place().row);
    const uint4* const from = fragments();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 words = from[k * 128];
      p[k][0] = words.x, p[k][1] = words.y, p[k][2] = words.z, p[k][3] = words.w;
    }
    scale_rows(o, factor);
    mbarrier_wait(memory.full(kGroup, of.stage()), of.parity());
    start_values<kBFloat16>(o, p, memory.keys(of.stage()) + offset);
  };
  // When the product of the step that `of` stands at is done, and nothing else is in flight.
  const auto finish = [&](const Ring& of) {
    wgmma_wait<0>();
    wgmma_settle(o);
    release(memory.empty(kGroup, of.stage()));
  };
  // Makes probabilities of the scores.
  const auto soften = [&] {
    mask_invalid(s, pointer, kGroup, Place().column);
    return make_float2(state.upper.add<0>(s, scale), state.lower.add<2>(s, scale));
  };
  const auto publish = [&](float2 factor) {
    uint4* const to = fragments();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[k][i] = Format::pack(s + 8 * k + 2 * i);
      to[k * 128] = make_uint4(p[k][0], p[k][1], p[k][2], p[k][3]);
    }
    __syncwarp();
    if (thread % 4 == 0) {
      const Place place;
      exchange[place.row] = make_float2(factor.x, state.upper.largest);
      exchange[place.row + 8] = make_float2(factor.y, state.lower.largest);
    }
    named_arrive<kConsumers>(kReady);
  };

  do {
    load_queries(args, share.b, row_block, memory);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    state = Rows();
    for (int step = share.first; step < share.last; step += 2, ring.count += 2) {
      Ring second = ring;
      ++second.count;
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = 0.0f;  // so that they have no registers between steps
      if constexpr (kGroup == 0) {
        multiply_keys<kBFloat16>(s, memory, ring);
        const float2 factor = soften();
        publish(factor);
        scale_rows(o, factor);
        start_values<kBFloat16>(o, p, memory.keys(ring.stage()) + offset);
        finish(ring);
        follow(second);
        finish(second);
      } else {
        multiply_keys<kBFloat16>(s, memory, second);
        follow(ring);
        const float2 factor = soften();
        finish(ring);
        publish(factor);
        scale_rows(o, factor);
        start_values<kBFloat16>(o, p, memory.keys(second.stage()) + offset);
        finish(second);
      }
    }
    const Place place;
    float upper = lanes_reduce<4>(state.upper.sum, Sum());
    float lower = lanes_reduce<4>(state.lower.sum, Sum());
    if (thread % 4 == 0) {
      sums[kGroup * kMlaRows + place.row] = upper;
      sums[kGroup * kMlaRows + place.row + 8] = lower;
    }
    named_sync<kConsumers>(kSums);
    // In the same order in both warpgroups.
    upper = sums[place.row] + sums[kMlaRows + place.row];
    lower = sums[place.row + 8] + sums[kMlaRows + place.row + 8];
    // Parts stay sums; mla_combine divides.
    const bool whole = !share.shared();
    const float2 inverse = {row_factor<kLayout>(args, upper, whole),
                            row_factor<kLayout>(args, lower, whole)};
    store_rows<Format>(args, share, lane, row_block, kGroup, o, inverse);
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int row = place.row + 8 * other, at = row_block * kMlaRows + row;
        const float largest = other ? state.lower.largest : state.upper.largest;
        const float sum = other ? lower : upper;
        if (thread % 4 != 0 || at >= args.rows) continue;
        if (share.shared()) {
          args.partial_sums[part_line(args, lane, share.first == 0, row_block) + row] =
              make_float2(largest, sum);
        } else {
          store_lse(args, share.b, at, largest, sum);
        }
      }
    }
    __syncwarp();
  } while (share.next(args));
}

// Registers of a thread, as mla_decode's.
struct SparseRegisters {
  static constexpr int kMultiply = 216;
  static constexpr int kLoad = 72;
  static_assert(2 * kMultiply + kLoad <= 3 * (65536 / kMlaThreads / 8 * 8));
};

template <typename Format, bool kBFloat16, MlaLayout kLayout>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_sparse(const __grid_constant__ MlaDecodeArgs args) {
  constexpr bool kFloat8 = kLayout != MlaLayout::kSame;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{shared_address(shared)};
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + kMlaBarriers);
    // Copies arrive by thread, what went through registers by warp.
    for (int i = 0; i < 2 * kMlaStages; ++i) mbarrier_init(barriers + i, kFloat8 ? 4 : 128);
    for (int i = 2 * kMlaStages; i < 4 * kMlaStages; ++i) mbarrier_init(barriers + i, 4);
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = blockIdx.x / args.row_blocks, row_block = blockIdx.x % args.row_blocks;
  // Each role finds its share by itself, as mla_decode's do.
  SparseShare share{};
  if (group == 2) {
    set_registers<SparseRegisters::kLoad, false>();
    if (!share.begin(args, lane)) return;
    if constexpr (kFloat8) {
      load_float8_keys<Format, kLayout == MlaLayout::kPacked, SlotRowsFinder>(args, share, memory,
                                                                              shared);
    } else {
      load_sparse_keys(args, share, memory, shared);
    }
  } else if (group == 0) {
    set_registers<SparseRegisters::kMultiply, true>();
    const bool any = share.begin(args, lane);
    if (args.shared != nullptr && row_block == 0 && threadIdx.x == 0) {
      list_shared(args, share, any, lane);
    }
    __syncwarp();
    if (!any) return;
    multiply_group<Format, kBFloat16, kLayout, 0>(args, share, lane, row_block, memory, shared);
  } else {
    set_registers<SparseRegisters::kMultiply, true>();
    if (!share.begin(args, lane)) return;
    multiply_group<Format, kBFloat16, kLayout, 1>(args, share, lane, row_block, memory, shared);
  }
}

#define TIERCEL_MLA_SPARSE(dtype, layout)                                                    \
  {DType::k##dtype, MlaLayout::k##layout,                                                    \
   Kernel("mla_sparse<" #dtype ", " #layout ">",                                             \
          reinterpret_cast<const void*>(                                                     \
              mla_sparse<dtype, DType::k##dtype == DType::kBFloat16, MlaLayout::k##layout>), \
          kSparseShared)}

const MlaDecodeKernel kKernels[] = {
    TIERCEL_MLA_SPARSE(BFloat16, Same),
    TIERCEL_MLA_SPARSE(BFloat16, Float8),
    TIERCEL_MLA_SPARSE(BFloat16, Packed),
};

}  // namespace

const MlaDecodeKernel* mla_sparse_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
