// SPDX-License-Identifier: Apache-2.0
// Tiles that several blocks share: each block leaves its part in a workspace, and the last one to
// arrive combines the parts, in their order.
//
// The workspace may have any initial contents. There is no counter: each part has a word that is
// kArrived from its arrival until a block combines the tile. That block clears all of the tile's
// words, so that a graph may run again. Two blocks that arrive at once may both find all parts;
// both then write the same bits. No block waits, so none needs another one to run.
#ifndef KERNELS_ATTENTION_DECODE_PARTS_CUH_
#define KERNELS_ATTENTION_DECODE_PARTS_CUH_

#include <cstdint>

#include "kernels/attention/decode/arithmetic.cuh"
#include "kernels/attention/decode/sequence.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// No memory holds it by chance.
inline constexpr uint64_t kArrived = 0x7d1f'a3c5'9b64'e28bu;

// Where part `at` of a tile is: its first block has it as its last tile, the others as their first.
__device__ __forceinline__ int64_t part_slot(int first_block, int columns, int at) {
  return 2 * (first_block + static_cast<int64_t>(at) * columns) + (at == 0);
}

__device__ __forceinline__ void store_arrived(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_arrived(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// True if all parts have arrived; they may be read then. A whole warp calls it after all writes of
// a part, its own or those that a barrier has ordered before. `slots` is a tile's word of slot 0,
// `stride` the words of a slot.
__device__ __forceinline__ bool arrive_last(uint64_t* slots, int stride, int64_t own,
                                            int first_block, int columns, int parts) {
  const int lane = threadIdx.x % 32;
  __threadfence();
  __syncwarp();
  if (lane == 0) store_arrived(slots + own * stride, kArrived);
  __syncwarp();
  __threadfence();  // of two blocks that arrive, at least one sees the other
  bool all = true;
#pragma unroll 1
  for (int at = lane; at < parts; at += 32) {
    all &= load_arrived(slots + part_slot(first_block, columns, at) * stride) == kArrived;
  }
  if (!__all_sync(kFullWarp, all)) return false;
  __threadfence();
#pragma unroll 1
  for (int at = lane; at < parts; at += 32) {
    store_arrived(slots + part_slot(first_block, columns, at) * stride, 0);
  }
  return true;
}

// Four dimensions of a row, from parts that are relative to different largest scores.
struct Part {
  float largest = -INFINITY;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float2 sums, float4 other) {
    if (sums.x == -INFINITY) return;
    const float grown = fmaxf(largest, sums.x);
    const float mine = exp2_approx(largest - grown), theirs = exp2_approx(sums.x - grown);
    largest = grown;
    sum = sum * mine + sums.y * theirs;
    out.x = out.x * mine + other.x * theirs;
    out.y = out.y * mine + other.y * theirs;
    out.z = out.z * mine + other.z * theirs;
    out.w = out.w * mine + other.w * theirs;
  }
};

// A finished row: its sum with the sink of its head, and the factor of its weighted values.
struct Total {
  float largest, sum, factor;
};

__device__ __forceinline__ Total total_of(const DecodeArgs& args, const Tile& tile, int head,
                                          float largest, float sum) {
  float factor = scale_of(args.v_scale, args.v_scale_per_head, tile.head);
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head] * kLog2E, grown = fmaxf(largest, sink);
    if (grown != -INFINITY) {
      const float shrink = exp2_approx(largest - grown);
      sum = sum * shrink + exp2_approx(sink - grown);
      factor *= shrink;
      largest = grown;
    }
  }
  return {largest, sum, normalizer(sum, factor)};
}

__device__ __forceinline__ void store_log(const DecodeArgs& args, const Tile& tile, int row,
                                          int head, const Total& total) {
  if (args.lse == nullptr) return;
  args.lse[tile.b * args.lse_strides[0] + head * args.lse_strides[1] + row] =
      log_of_sum(total.largest, total.sum);
}

// Four dimensions from d on of a row of the tile's queries.
template <typename Format>
__device__ __forceinline__ void store_part(const DecodeArgs& args, const Tile& tile, int row, int d,
                                           const Part& part) {
  const QueryRows rows = query_rows(args, tile.b);
  const int query = row / args.group, head = tile.head * args.group + row % args.group;
  if (query >= rows.count) return;
  const Total total = total_of(args, tile, head, part.largest, part.sum);
  if (d < args.d) {
    const float values[4] = {part.out.x * total.factor, part.out.y * total.factor,
                             part.out.z * total.factor, part.out.w * total.factor};
    uint32_t words[2];
    pack<Format, 2>(values, words);
    store_vector(args.out + tile.b * args.out_strides[0] +
                     (rows.first + query) * args.out_strides[1] + head * args.out_strides[2] +
                     d * 2,
                 words);
  }
  if (d == 0) store_log(args, tile, rows.first + query, head, total);
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_PARTS_CUH_
