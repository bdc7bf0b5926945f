// SPDX-License-Identifier: Apache-2.0
// The 64 rows of a block of mla_decode and of mla_sparse: queries, scores, sums of values, results.
#ifndef KERNELS_MLA_ROWS_CUH_
#define KERNELS_MLA_ROWS_CUH_

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {

// Starts copies of the rows of the queries, zeros behind the last, by the threads of both
// warpgroups. Those before have been multiplied.
__device__ __forceinline__ void start_queries(const MlaDecodeArgs& args, int b, int row_block,
                                              const Memory& memory) {
  constexpr int kChunks = kMlaKey * 2 / 16;  // of a row
  const int thread = threadIdx.x % 32;
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
}

// Returns when the copies of both warpgroups are there.
__device__ __forceinline__ void wait_queries() {
  async_copy_wait<0>();
  proxy_fence();
  named_sync<kConsumers>(kQueries);
}

__device__ __forceinline__ void load_queries(const MlaDecodeArgs& args, int b, int row_block,
                                             const Memory& memory) {
  named_sync<kConsumers>(kQueries);  // the first warpgroup has multiplied those before
  start_queries(args, b, row_block, memory);
  wait_queries();
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

// Starts o += probabilities * values, for 64 keys.
template <bool kBFloat16>
__device__ __forceinline__ void start_values(float (&o)[128], const uint32_t (&p)[4][4],
                                             uint32_t values) {
  wgmma_settle(o);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kMlaStep / 16; ++k) {
    wgmma_from_registers<kBFloat16, true>(
        o, p[k], turned_descriptor(values + k * 16 * kMlaColumns, kMlaBlock), true);
  }
  wgmma_commit();
}

// Returns when o += probabilities * values is done.
template <bool kBFloat16>
__device__ __forceinline__ void multiply_values(float (&o)[128], const uint32_t (&p)[4][4],
                                                uint32_t values) {
  start_values<kBFloat16>(o, p, values);
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
    const int thread = opaque(threadIdx.x % 128);
    row = thread / 32 * 16 + thread % 32 / 4;
    column = thread % 4 * 2;
  }
};

// 256 columns of the block's rows, times `factors`: to `out`, or to the workspace.
template <typename Format, typename Steps>
__device__ __forceinline__ void store_rows(const MlaDecodeArgs& args, const Steps& share, int lane,
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
  const uint64_t queries = rows_descriptor(memory.queries());
  const uint64_t keys = rows_descriptor(memory.keys(stage));
  const auto multiply = [&](int block, bool add) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t offset = (block * kMlaBlock + k * 32) >> 4;
      wgmma_64<kBFloat16>(s, queries + offset, keys + offset, add || k > 0);
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

// The score that a row's sums are relative to, the largest so far, and the sum of its exponentials,
// of which a thread has a part.
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
    // A row that has seen no key has no score; anything finite makes its exponentials 0.
    const float reference = grown == -INFINITY ? 0.0f : grown;
    const float factor = exp2_approx(largest - reference);
    largest = grown;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = kAt; i < kAt + 2; ++i) {
        s[4 * j + i] = exp2_approx(fmaf(s[4 * j + i], scale, -reference));
        sum += s[4 * j + i];
      }
    }
    return factor;
  }
};

// Float8 rows alone have a scale for all of them.
template <MlaLayout kLayout>
__device__ __forceinline__ float value_scale_of(const MlaDecodeArgs& args) {
  if (kLayout != MlaLayout::kFloat8 || args.kv_scale == nullptr) return 1.0f;
  return *args.kv_scale;
}

// The factor of a row's sum of weighted values; 0 for a row that sees no key.
template <MlaLayout kLayout>
__device__ __forceinline__ float row_factor(const MlaDecodeArgs& args, float sum, bool whole) {
  if (!whole) return value_scale_of<kLayout>(args);
  return sum == 0.0f ? 0.0f : value_scale_of<kLayout>(args) / sum;
}

// A step's probabilities as fragments of wgmma's first operand.
struct Shares {
  uint32_t words[4][4];

  template <typename Format>
  __device__ __forceinline__ void pack(const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i / 4][i % 4] = Format::pack(s + 2 * i);
  }

  __device__ __forceinline__ void write(uint4* to) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[k * 128] = make_uint4(words[k][0], words[k][1], words[k][2], words[k][3]);
    }
  }

  __device__ __forceinline__ void read(const uint4* from) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 four = from[k * 128];
      words[k][0] = four.x, words[k][1] = four.y, words[k][2] = four.z, words[k][3] = four.w;
    }
  }
};

// Tells mla_combine of the sequences that lanes share. There is an entry for each sequence or,
// where lanes are fewer, for each lane but the first: the sequence that this is the second lane of.
template <typename Steps>
__device__ __forceinline__ void list_shared(const MlaDecodeArgs& args, Steps share, bool any,
                                            int lane) {
  if (args.by_sequence) {
    if (!any) return;
    do {
      if (share.first > 0) continue;
      const int parts = share.shared() ? share.lane_of(share.steps() - 1) - lane + 1 : 0;
      args.shared[share.b] = make_int4(share.b, lane, parts, 0);
    } while (share.next(args));
    return;
  }
  if (lane == 0) return;
  int4 found = make_int4(0, 0, 0, 0);
  if (any && share.first > 0 && share.lane_of(0) == lane - 1) {
    found = make_int4(share.b, lane - 1, share.lane_of(share.steps() - 1) - lane + 2, 0);
  }
  args.shared[lane - 1] = found;
}

// Registers of a thread of the two multiplying warpgroups, and of the loading one. Together they
// may have what the block was launched with, 168 a thread: with more, setmaxnreg waits forever.
template <MlaLayout kLayout>
struct Registers {
  static constexpr bool kSame = kLayout == MlaLayout::kSame;
  static constexpr int kMultiply = kSame ? 216 : 200;
  static constexpr int kLoad = kSame ? 72 : 104;
  static_assert(2 * kMultiply + kLoad <= 3 * (65536 / kMlaThreads / 8 * 8));
};

}  // namespace tiercel

#endif  // KERNELS_MLA_ROWS_CUH_
