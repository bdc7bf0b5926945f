// SPDX-License-Identifier: Apache-2.0
// top_k_indices: where the k largest elements of each row are, exactly, ties by the lowest index.
//
// A cluster has a row, each of its blocks an equal part, which it reads once, keeps in shared
// memory as integers of the same order and counts by their upper 11 bits. Every block adds the
// counts of all up, finds the digit that the k-th largest has, and counts the next digit of what
// has that one; after three digits the k-th largest is known, or earlier, if what is left is just
// enough. Then each warp counts what it has above it and equal to it, and knows from the counts of
// others where its own go: indices ascend. Parts that are too long for shared memory are read again
// each time.
#include <cstdint>

#include "kernels/mla/top_k.cuh"
#include "kernels/mla/top_k_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kWarps = kTopKThreads / 32;
constexpr int kRounds = 3;
constexpr int kOwnBins = kTopKBins / kTopKThreads;  // of a thread
static_assert(kOwnBins == 4);

// Everything a block has besides its part of the row.
struct State {
  uint32_t counts[kRounds][kTopKBins];
  uint32_t totals[2];  // of the block: above the k-th largest, equal to it
  uint32_t warps[kWarps][2];
  uint32_t found[3];  // digit, what lies above it, what has it
};
static_assert(sizeof(State) <= kTopKState);

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

__device__ __forceinline__ void count(uint32_t* bins, uint32_t digit) {
  atomicAdd(bins + digit, 1u);
}

// Reads the part, and counts its first digit. `keys` may be null.
__device__ __forceinline__ void read_part(const Part& part, uint32_t* bins, bool vectors) {
  const auto take = [&](int at, float x) {
    const uint32_t key = top_k_key(x);
    if (part.keys != nullptr) part.keys[at] = key;
    if (key != 0) count(bins, key >> top_k_shift(0));
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

// The digit of the `wanted`-th largest, from the counts of all blocks: {digit, how many have a
// higher one, how many have it}. With fewer than that, digit 0 and {how many, 0}. All blocks have
// counted, and a cluster barrier lies between.
__device__ __forceinline__ uint3 find_digit(State& shared, int round, uint32_t wanted,
                                            uint32_t blocks) {
  const int thread = threadIdx.x;
  // Thread 0 has the highest bins.
  const int bin = kTopKBins - kOwnBins * (thread + 1);
  uint4 own = make_uint4(0, 0, 0, 0);
  const uint32_t local = shared_address(&shared.counts[round][bin]);
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint4 other = cluster_load(local, block);
    own.x += other.x, own.y += other.y, own.z += other.z, own.w += other.w;
  }
  const uint32_t sum = own.x + own.y + own.z + own.w;
  uint32_t upto = sum;  // of this thread and those before
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, upto, offset);
    if (thread % 32 >= offset) upto += other;
  }
  if (thread % 32 == 31) shared.warps[thread / 32][0] = upto;
  if (thread == kTopKThreads - 1) shared.found[0] = 0, shared.found[2] = 0;
  __syncthreads();
  uint32_t before = 0, total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) before += shared.warps[warp][0];
    total += shared.warps[warp][0];
  }
  upto += before;
  if (total < wanted) {
    if (thread == 0) shared.found[1] = total;
  } else if (upto >= wanted && upto - sum < wanted) {
    const uint32_t bins[kOwnBins] = {own.w, own.z, own.y, own.x};
    uint32_t above = upto - sum;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
      if (above < wanted && above + bins[i] >= wanted) {
        shared.found[0] = bin + kOwnBins - 1 - i;
        shared.found[1] = above;
        shared.found[2] = bins[i];
        break;
      }
      above += bins[i];
    }
  }
  __syncthreads();
  const uint3 found = make_uint3(shared.found[0], shared.found[1], shared.found[2]);
  __syncthreads();  // found and warps may be written again
  return found;
}

// The elements of a warp, 32 at a time, in order.
template <typename Take>
__device__ __forceinline__ void each_of_warp(const Part& part, const Take& take) {
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int each = (part.length + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const int end = min(part.length, (warp + 1) * each);
#pragma unroll 4
  for (int at = warp * each + thread; at - thread < end; at += 32) {
    take(at, at < end ? part.key(at) : 0u);
  }
}

__global__ void __launch_bounds__(kTopKThreads) top_k(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  State& shared = *reinterpret_cast<State*>(memory);
  const uint32_t blocks = cluster_blocks(), rank = cluster_rank();
  const int64_t row = blockIdx.x / blocks;
  const int thread = threadIdx.x;
  for (int at = thread; at < kRounds * kTopKBins; at += kTopKThreads) shared.counts[0][at] = 0;
  grid_dependency_wait();
  grid_dependency_launch();

  int length = args.columns;
  if (args.lengths != nullptr) length = min(max(args.lengths[row * args.length_step], 0), length);
  Part part;
  const int each = static_cast<int>((length + 4 * blocks - 1) / (4 * blocks) * 4);
  part.first = min(static_cast<int>(rank) * each, length);
  part.length = min(each, length - part.first);
  part.row = args.logits + row * args.row_stride + part.first;
  part.keys = part.length <= args.kept ? reinterpret_cast<uint32_t*>(memory + kTopKState) : nullptr;
  __syncthreads();
  read_part(part, shared.counts[0], args.vectors);

  // The k-th largest key has the digits so far, `prefix`; all above are taken, and of those that
  // have them `wanted`.
  uint32_t prefix = 0, wanted = args.k;
  bool all = false;  // every element is taken, or every one with the prefix
  int round = 0;
  for (;; ++round) {
    cluster_arrive();
    cluster_wait();
    const uint3 found = find_digit(shared, round, wanted, blocks);
    if (found.z == 0) {  // fewer than k
      all = true;
      break;
    }
    prefix |= found.x << top_k_shift(round);
    wanted -= found.y;
    all = wanted == found.z;
    if (all || round == kRounds - 1) break;
    const int upper = top_k_shift(round), lower = top_k_shift(round + 1);
    for (int at = thread; at < part.length; at += kTopKThreads) {
      const uint32_t key = part.key(at);
      if (key != 0 && key >> upper == prefix >> upper) {
        count(shared.counts[round + 1], key >> lower & ((1u << (upper - lower)) - 1));
      }
    }
  }

  // Above are keys of at least `from`; with the last digit known, `prefix` itself are ties.
  const uint32_t from = all ? max(prefix, 1u) : prefix + 1;
  const auto is_tie = [&](uint32_t key) { return !all && key == prefix; };
  uint32_t above = 0, equal = 0;
  each_of_warp(part, [&](int, uint32_t key) { above += key >= from, equal += is_tie(key); });
  above = lanes_reduce<32>(above, Sum());
  equal = lanes_reduce<32>(equal, Sum());
  if (thread % 32 == 0) shared.warps[thread / 32][0] = above, shared.warps[thread / 32][1] = equal;
  __syncthreads();
  if (thread < 2) {
    uint32_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += shared.warps[warp][thread];
    shared.totals[thread] = total;
  }
  cluster_arrive();
  cluster_wait();
  above = equal = 0;
  uint32_t taken = 0, ties = 0;  // of all
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint2 other = cluster_load_pair(shared_address(shared.totals), block);
    if (block < rank) above += other.x, equal += other.y;
    taken += other.x, ties += other.y;
  }
  for (int warp = 0; warp < thread / 32; ++warp) {
    above += shared.warps[warp][0], equal += shared.warps[warp][1];
  }
  int32_t* const out = args.out + row * args.k;
  const unsigned before = (1u << thread % 32) - 1;
  each_of_warp(part, [&](int at, uint32_t key) {
    const unsigned higher = __ballot_sync(kFullWarp, key >= from);
    const unsigned same = __ballot_sync(kFullWarp, is_tie(key));
    const uint32_t mine = equal + __popc(same & before);
    const bool chosen = key >= from || (is_tie(key) && mine < wanted);
    if (chosen) {
      out[above + __popc(higher & before) + min(mine, wanted)] = part.first + at;
    }
    above += __popc(higher), equal += __popc(same);
  });
  taken += all ? 0 : min(ties, wanted);
  for (uint32_t at = taken + rank * kTopKThreads + thread; at < args.k;
       at += blocks * kTopKThreads) {
    out[at] = -1;
  }
  // Others may still read this block's counts.
  cluster_arrive();
  cluster_wait();
}

const TopKKernel kKernels[] = {
    {Kernel("top_k", reinterpret_cast<const void*>(top_k), kTopKShared)}};

}  // namespace

const TopKKernel* top_k_kernels(int* count) {
  *count = 1;
  return kKernels;
}

}  // namespace tiercel
