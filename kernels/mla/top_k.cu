// SPDX-License-Identifier: Apache-2.0
// top_k_indices: the indices of the k largest elements of each row, exactly, ties by the lowest
// index.
//
// A radix select. A cluster has a row, each of its blocks an equal part, which it reads once, keeps
// in shared memory as order-preserving integers and counts by a first digit. Every block adds up
// all counts, finds the digit of the k-th largest, and counts the next digit, of 11 bits, of the
// elements with that one, until the k-th largest is known, or exactly the missing number is left.
// Then each warp counts its elements above and equal to it, and the others' counts give the
// positions of its own: indices ascend. Parts that are too long for shared memory are read again in
// each round.
#include <cstdint>

#include "kernels/mla/top_k.cuh"
#include "kernels/mla/top_k_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

// The block's part of the row.
struct Part {
  const float* row;  // from the part's first element
  uint32_t* keys;    // null: too long to keep
  int first;         // of the row
  int length;

  __device__ __forceinline__ uint32_t key(int at) const {
    return keys != nullptr ? keys[at] : top_k_key(row[at]);
  }
};

// Reads the part, and counts its first digit. `keys` may be null.
__device__ __forceinline__ void read_part(const Part& part, uint32_t* bins, bool vectors) {
  const auto take = [&](int at, float x) {
    const uint32_t key = top_k_key(x);
    if (part.keys != nullptr) part.keys[at] = key;
    if (key != 0) top_k_count(bins, top_k_first_digit(key));
  };
  const int whole = vectors ? part.length / 4 * 4 : 0;
#pragma unroll 4
  for (int at = threadIdx.x * 4; at < whole; at += kTopKThreads * 4) {
    const float4 four = *reinterpret_cast<const float4*>(part.row + at);
    take(at, four.x), take(at + 1, four.y), take(at + 2, four.z), take(at + 3, four.w);
  }
#pragma unroll 4
  for (int at = whole + threadIdx.x; at < part.length; at += kTopKThreads) take(at, part.row[at]);
}

// The elements of a warp, 32 at a time, in order.
template <typename Take>
__device__ __forceinline__ void each_of_warp(const Part& part, const Take& take) {
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int each = (part.length + kTopKWarps * 32 - 1) / (kTopKWarps * 32) * 32;
  const int end = min(part.length, (warp + 1) * each);
#pragma unroll 4
  for (int at = warp * each + thread; at - thread < end; at += 32) {
    take(at, at < end ? part.key(at) : 0u);
  }
}

__global__ void __launch_bounds__(kTopKThreads, 2) top_k(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  TopKState& shared = *reinterpret_cast<TopKState*>(memory);
  const uint32_t blocks = cluster_blocks(), rank = cluster_rank();
  const int64_t row = blockIdx.x / blocks;
  const int thread = threadIdx.x;
  top_k_clear(shared.counts[0]);
  grid_dependency_wait();
  grid_dependency_launch();

  int length = args.columns;
  if (args.lengths != nullptr) length = min(max(args.lengths[row * args.length_step], 0), length);
  Part part;
  const int each = static_cast<int>((length + 4 * blocks - 1) / (4 * blocks) * 4);
  part.first = min(static_cast<int>(rank) * each, length);
  part.length = min(each, length - part.first);
  part.row = args.logits + row * args.row_stride + part.first;
  part.keys =
      part.length <= args.kept ? reinterpret_cast<uint32_t*>(memory + kTopKStateBytes) : nullptr;
  __syncthreads();
  read_part(part, shared.counts[0], args.vectors);

  const uint3 first = top_k_round(shared, 0, args.k, blocks);
  const TopKth kth = find_kth(shared, 1, args.k, blocks, first, [&](const auto& take) {
    for (int at = thread; at < part.length; at += kTopKThreads) take(part.key(at));
  });
  const uint32_t from = kth.from(), wanted = kth.wanted;
  uint32_t above = 0, equal = 0;
  each_of_warp(part, [&](int, uint32_t key) { above += key >= from, equal += kth.is_tie(key); });
  above = lanes_reduce<32>(above, Sum());
  equal = lanes_reduce<32>(equal, Sum());
  if (thread % 32 == 0) shared.warps[thread / 32][0] = above, shared.warps[thread / 32][1] = equal;
  __syncthreads();
  if (thread < 2) {
    uint32_t total = 0;
    for (int warp = 0; warp < kTopKWarps; ++warp) total += shared.warps[warp][thread];
    shared.totals[thread] = total;
  }
  top_k_sync(blocks);
  const TopKTotals totals = top_k_totals(shared, rank, blocks);
  above = totals.above, equal = totals.equal;
  for (int warp = 0; warp < thread / 32; ++warp) {
    above += shared.warps[warp][0], equal += shared.warps[warp][1];
  }
  int32_t* const out = args.out + row * args.k;
  const unsigned before = (1u << thread % 32) - 1;
  each_of_warp(part, [&](int at, uint32_t key) {
    const unsigned higher = __ballot_sync(kFullWarp, key >= from);
    const unsigned same = __ballot_sync(kFullWarp, kth.is_tie(key));
    const uint32_t mine = equal + __popc(same & before);
    const bool chosen = key >= from || (kth.is_tie(key) && mine < wanted);
    if (chosen) {
      out[above + __popc(higher & before) + min(mine, wanted)] = part.first + at;
    }
    above += __popc(higher), equal += __popc(same);
  });
  top_k_fill(args, out, totals, kth.all ? 0 : wanted);
  if (blocks > 1) top_k_sync(blocks);  // others may still read this block's totals
}

const TopKKernel kKernels[] = {
    {Kernel("top_k", reinterpret_cast<const void*>(top_k), kTopKShared)}};

}  // namespace

const TopKKernel* top_k_kernels(int* count) {
  *count = 1;
  return kKernels;
}

}  // namespace tiercel
