// SPDX-License-Identifier: Apache-2.0
// mla_decode: attention of absorbed queries over one latent cache, whose rows are keys and, without
// their last 64 columns, values.
//
// A block has 64 rows, queries times heads of one sequence, and goes through the keys in steps of
// 64. Of its three warpgroups
//   the first multiplies queries and keys (64 x 64, along 576), makes probabilities of the scores,
//     and multiplies these by the first 256 columns of the values;
//   the second multiplies the same probabilities by the other 256 columns;
//   the third loads: one warp what the first warpgroup frees, one what the second does. Float8 goes
//     through its registers and becomes 16 bits there.
// A step's rows are loaded once, 72 KiB, and both products read them from shared memory: values are
// the same tile, turned by wgmma. Two steps are in flight. The fragments of probabilities are those
// of scores, so that a thread of the second warpgroup takes over what its counterpart has.
//
// Blocks share all sequences' steps evenly, as lengths on the GPU say (share.cuh); mla_combine puts
// sequences together that several lanes have.
#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load.cuh"
#include "kernels/mla/load_float8.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

// The rows of the queries, zeros behind the last, by the threads of both warpgroups.
__device__ __forceinline__ void load_queries(const MlaDecodeArgs& args, int b, int row_block,
                                             const Memory& memory) {
  constexpr int kChunks = kMlaKey * 2 / 16;  // of a row
  const int thread = threadIdx.x % 32;
  named_sync<kConsumers>(kQueries);  // the first warpgroup has multiplied those before
  for (int row = threadIdx.x / 32; row < kMlaRows; row += kConsumers / 32) {
    const int at = row_block * kMlaRows + row;
    const bool real = at < args.rows;
    const int query = at / args.heads, head = at % args.heads;
    const char* from = args.q;
    if (real) {
      from += b * args.q_strides[0] + query * args.q_strides[1] + head * args.q_strides[2];
    }
#pragma unroll
    for (int i = 0; i < (kChunks + 31) / 32; ++i) {
      const int chunk = thread + 32 * i;
      if (chunk >= kChunks) continue;
      const uint32_t to = memory.queries() + chunk / 8 * kMlaBlock + row * kMlaColumns +
                          ((chunk % 8 ^ row % 8) * 16);
      async_copy_16(to, from + chunk * 16, real);
    }
  }
  async_copy_commit();
  async_copy_wait<0>();
  proxy_fence();
  named_sync<kConsumers>(kQueries);
}

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

// o += probabilities * values, for 64 keys; returns when it is done.
template <bool kBFloat16>
__device__ __forceinline__ void multiply_values(float (&o)[128], const uint32_t (&p)[4][4],
                                                uint32_t values) {
  wgmma_settle(o);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kMlaStep / 16; ++k) {
    wgmma_turned_256<kBFloat16>(o, p[k],
                                turned_descriptor(values + k * 16 * kMlaColumns, kMlaBlock));
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(o);
}

__device__ __forceinline__ void scale_rows(float (&o)[128], float2 factors) {
  if (__all_sync(kFullWarp, factors.x == 1.0f && factors.y == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    o[i] *= factors.x, o[i + 1] *= factors.x;
    o[i + 2] *= factors.y, o[i + 3] *= factors.y;
  }
}

// The thread's rows of the tile, and where it stands in them.
struct Place {
  int row;  // the other is 8 further
  int column;

  __device__ __forceinline__ Place() {
    const int thread = threadIdx.x % 128;
    row = thread / 32 * 16 + thread % 32 / 4;
    column = thread % 4 * 2;
  }
};

// 256 columns of the block's rows, times `factors`: to `out`, or to the workspace.
template <typename Format>
__device__ __forceinline__ void store_rows(const MlaDecodeArgs& args, const Share& share, int lane,
                                           int row_block, int half, const float (&o)[128],
                                           float2 factors) {
  const Place place;
  const int column = half * 256 + place.column;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int row = place.row + 8 * second, at = row_block * kMlaRows + row;
    if (at >= args.rows) continue;
    const float factor = second ? factors.y : factors.x;
    if (share.shared()) {
      float* to = args.partial +
                  (part_line(args, lane, share.first == 0, row_block) + row) * kMlaLatent + column;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) =
            make_float2(o[4 * j + 2 * second] * factor, o[4 * j + 2 * second + 1] * factor);
      }
    } else {
      char* to = out_row(args, share.b, at) + column * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const float pair[2] = {o[4 * j + 2 * second] * factor, o[4 * j + 2 * second + 1] * factor};
        *reinterpret_cast<uint32_t*>(to + 16 * j) = Format::pack(pair);
      }
    }
  }
}

// Scores of a step, 64 x 64, along all columns.
template <bool kBFloat16>
__device__ __forceinline__ void multiply_keys(float (&s)[32], const Memory& memory,
                                              const Ring& ring) {
  const int stage = ring.stage();
  const auto multiply = [&](int block, bool add) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = block * kMlaBlock + k * 32;
      wgmma_64<kBFloat16>(s, rows_descriptor(memory.queries() + offset),
                          rows_descriptor(memory.keys(stage) + offset), add || k > 0);
    }
  };
  mbarrier_wait(memory.full(0, stage), ring.parity());
  wgmma_settle(s);
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < kHalfBlocks; ++block) multiply(block, block > 0);
  multiply(kMlaBlocks - 1, true);
  mbarrier_wait(memory.full(1, stage), ring.parity());
  wgmma_fence();
#pragma unroll
  for (int block = kHalfBlocks; block < 2 * kHalfBlocks; ++block) multiply(block, true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(s);
}

// The largest score so far and the sum of a row's exponentials, of which a thread has a part.
struct RowState {
  float largest = -INFINITY;
  float sum = 0.0f;

  // Makes probabilities of the row's raw scores, those at 4j + kAt and 4j + kAt + 1; returns the
  // factor of what was summed before.
  template <int kAt>
  __device__ __forceinline__ float add(float (&s)[32], float scale) {
    float most = s[kAt];
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(s[4 * j + kAt], s[4 * j + kAt + 1]));
    most = lanes_reduce<4>(most, [](float a, float b) { return fmaxf(a, b); });
    const float grown = fmaxf(largest, most * scale);
    const float reference = grown == -INFINITY ? 0.0f : grown;
    const float factor = exp2_approx(largest - reference);
    largest = grown;
    float added = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = kAt; i < kAt + 2; ++i) {
        s[4 * j + i] = exp2_approx(fmaf(s[4 * j + i], scale, -reference));
        added += s[4 * j + i];
      }
    }
    sum = sum * factor + added;
    return factor;
  }
};

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

// The factor of a row's sum of weighted values; 0 for a row that sees no key.
__device__ __forceinline__ float row_factor(float sum, bool whole, float value_scale) {
  if (!whole) return value_scale;
  return sum == 0.0f ? 0.0f : value_scale / sum;
}

// The first warpgroup: scores, probabilities, the first half of the values.
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void first_group(const MlaDecodeArgs& args, Share share, int lane,
                                            int row_block, const Memory& memory,
                                            unsigned char* pointer) {
  const int thread = threadIdx.x % 128;
  const float value_scale = args.kv_scale == nullptr ? 1.0f : *args.kv_scale;
  const float scale = args.scale * value_scale;
  uint4* const fragments = reinterpret_cast<uint4*>(pointer + kMlaShares);
  float2* const factors = reinterpret_cast<float2*>(pointer + kMlaFactors);
  const Place place;
  float o[128], s[32];
  Ring ring;
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = 0.0f;
  do {
    load_queries(args, share.b, row_block, memory);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    RowState upper, lower;
    // Query i sees the keys before length - queries + i + 1.
    const int seen = share.length - args.queries + 1, at = row_block * kMlaRows;
    const int all_see = seen + at / args.heads;
    const int end = seen + (at + place.row) / args.heads;
    const int other_end = seen + (at + place.row + 8) / args.heads;
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep;
      multiply_keys<kBFloat16>(s, memory, ring);
      if (key + kMlaStep > all_see) {
        mask_scores(s, key + place.column, min(end, share.length), min(other_end, share.length));
      }
      const float2 factor = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
      uint32_t p[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[k][i] = Format::pack(s + 8 * k + 2 * i);
      }
      named_sync<kConsumers>(kTaken);
      factors[thread] = factor;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        fragments[k * 128 + thread] = make_uint4(p[k][0], p[k][1], p[k][2], p[k][3]);
      }
      named_arrive<kConsumers>(kProbabilities);
      const uint32_t values = memory.keys(ring.stage());
      if (key + kMlaStep > share.length) clear_tail(values, share.length - key, kFirstTail);
      scale_rows(o, factor);
      multiply_values<kBFloat16>(o, p, values);
      release(memory.empty(0, ring.stage()));
    }
    upper.sum = lanes_reduce<4>(upper.sum, Sum());
    lower.sum = lanes_reduce<4>(lower.sum, Sum());
    // Parts stay sums; mla_combine divides.
    const bool whole = !share.shared();
    const float2 inverse = {row_factor(upper.sum, whole, value_scale),
                            row_factor(lower.sum, whole, value_scale)};
    named_sync<kConsumers>(kTaken);
    factors[thread] = inverse;
    named_arrive<kConsumers>(kProbabilities);
    store_rows<Format>(args, share, lane, row_block, 0, o, inverse);
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
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void second_group(const MlaDecodeArgs& args, Share share, int lane,
                                             int row_block, const Memory& memory,
                                             const unsigned char* pointer) {
  const int thread = threadIdx.x % 128;
  const uint4* const fragments = reinterpret_cast<const uint4*>(pointer + kMlaShares);
  const float2* const factors = reinterpret_cast<const float2*>(pointer + kMlaFactors);
  float o[128];
  Ring ring;
  named_arrive<kConsumers>(kTaken);
  do {
    load_queries(args, share.b, row_block, memory);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep, stage = ring.stage();
      named_sync<kConsumers>(kProbabilities);
      const float2 factor = factors[thread];
      uint32_t p[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 words = fragments[k * 128 + thread];
        p[k][0] = words.x, p[k][1] = words.y, p[k][2] = words.z, p[k][3] = words.w;
      }
      named_arrive<kConsumers>(kTaken);
      mbarrier_wait(memory.full(1, stage), ring.parity());
      const uint32_t values = memory.keys(stage) + kHalfBlocks * kMlaBlock;
      if (key + kMlaStep > share.length) clear_tail(values, share.length - key, kSecondTail);
      scale_rows(o, factor);
      multiply_values<kBFloat16>(o, p, values);
      release(memory.empty(1, stage));
    }
    named_sync<kConsumers>(kProbabilities);
    const float2 inverse = factors[thread];
    named_arrive<kConsumers>(kTaken);
    store_rows<Format>(args, share, lane, row_block, 1, o, inverse);
    __syncwarp();
  } while (share.next(args));
}

// Tells mla_combine of the sequences that lanes share. There is an entry for each sequence or,
// where lanes are fewer, for each lane but the first: the sequence that this is the second lane of.
__device__ __forceinline__ void list_shared(const MlaDecodeArgs& args, Share share, bool any,
                                            int lane) {
  if (args.by_sequence) {
    if (!any) return;
    do {
      if (share.first > 0) continue;
      const int parts = share.shared() ? share.lane_of(share.steps - 1) - lane + 1 : 0;
      args.shared[share.b] = make_int4(share.b, lane, parts, 0);
    } while (share.next(args));
    return;
  }
  if (lane == 0) return;
  int4 found = make_int4(0, 0, 0, 0);
  if (any && share.first > 0 && share.lane_of(0) == lane - 1) {
    found = make_int4(share.b, lane - 1, share.lane_of(share.steps - 1) - lane + 2, 0);
  }
  args.shared[lane - 1] = found;
}

// Registers of a thread of the two multiplying warpgroups, and of the loading one. Together they
// may have what the block was launched with, 168 a thread: with more, setmaxnreg waits forever.
template <MlaLayout kLayout>
struct Registers {
  static constexpr bool kSame = kLayout == MlaLayout::kSame,
                        kPacked = kLayout == MlaLayout::kPacked;
  static constexpr int kMultiply = kSame ? 216 : kPacked ? 200 : 208;
  static constexpr int kLoad = kSame ? 72 : kPacked ? 104 : 88;
  static_assert(2 * kMultiply + kLoad <= 3 * (65536 / kMlaThreads / 8 * 8));
};

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
  Share share{};
  const bool any = share.begin(args, lane);
  if (group == 2) {
    set_registers<Registers<kLayout>::kLoad, false>();
    if (!any) return;
    const int warp = threadIdx.x % 128 / 32;
    if constexpr (kFloat8) {
      load_float8_keys<Format, kLayout == MlaLayout::kPacked>(args, share, memory, shared);
    } else if (by_row) {
      load_keys_by_row(args, share, memory, shared);
    } else if (warp < 2) {
      load_keys(args, &map, share, memory, warp, shared);
    }
  } else {
    set_registers<Registers<kLayout>::kMultiply, true>();
    if (args.shared != nullptr && row_block == 0 && threadIdx.x == 0) {
      list_shared(args, share, any, lane);
    }
    __syncwarp();
    if (!any) return;
    if (group == 0) {
      first_group<Format, kBFloat16>(args, share, lane, row_block, memory, shared);
    } else {
      second_group<Format, kBFloat16>(args, share, lane, row_block, memory, shared);
    }
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
