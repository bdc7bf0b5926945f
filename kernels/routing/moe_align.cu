// SPDX-License-Identifier: Apache-2.0
// moe_align_block_size: sorts the indices of all chosen experts by expert and pads each expert's
// share to whole blocks.
//
// Reads N = T * k ids of 4 or 8 bytes and writes N + padding slots of 4 bytes: at T = 8192, k = 8,
// 0.25 MiB in and 0.3 to 0.4 MiB out, which takes 0.2 us. The time goes to the chain of load,
// count, sum over experts and write, so there is one launch, and each step works on chip.
//  - moe_align_small: one block, or one cluster of blocks for more ids. Each warp ranks its ids
//    among those of the same expert with ballots, in order (no atomics, so the result is
//    deterministic). The counts of a block are summed over its warps and sent to the shared memory
//    of the cluster's other blocks, so blocks wait for one cluster barrier only. Meanwhile each
//    block sorts its ids in shared memory, so that writes to slots coalesce. Every slot is written
//    once.
//  - moe_align_count and moe_align_store, for more ids than a cluster's registers hold: the first
//    counts per block into a workspace; the second sums the counts and then works as above, chunk
//    by chunk. Floor: ids read twice (the second time half from L2), slots written once.
#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/moe_align_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

template <int kItems, bool kCluster, int kBits>
__global__ void __launch_bounds__(kMoeAlignMaxThreads, 1)
    moe_align_small(const __grid_constant__ MoeAlignArgs args) {
  extern __shared__ uint32_t words[];
  if constexpr (kCluster) cluster_arrive_relaxed();
  const AlignShared shared =
      cut_shared(words, args.experts, blockDim.x / 32, kCluster ? cluster_blocks() : 1);
  const uint32_t part = kCluster ? cluster_rank() : 0, parts = kCluster ? cluster_blocks() : 1;
  const uint32_t first_id = part * args.span;
  const uint32_t ids = first_id < args.numel ? min(args.span, args.numel - first_id) : 0;
  const int active_warps = (ids + 32 * kItems - 1) / (32 * kItems);
  if (static_cast<int>(threadIdx.x) < active_warps * 32) clear_counts(shared, args.experts);
  grid_dependency_wait();
  grid_dependency_launch();

  uint32_t expert[kItems];
  load_experts(expert, args, first_id, ids);
  fill_outputs(args, part, parts);
  __syncwarp();
  align_block<kBits, kCluster>(args, shared, expert, first_id, active_warps);
}

// Counts each block's ids per expert into args.counts, and writes padding everywhere.
__global__ void __launch_bounds__(kMoeAlignMaxThreads, 1)
    moe_align_count(const __grid_constant__ MoeAlignArgs args) {
  extern __shared__ uint32_t words[];
  for (int e = threadIdx.x; e <= args.experts; e += blockDim.x) words[e] = 0;
  grid_dependency_wait();
  grid_dependency_launch();
  __syncthreads();
  const uint32_t first_id = blockIdx.x * args.span;
  const uint32_t ids = first_id < args.numel ? min(args.span, args.numel - first_id) : 0;
  constexpr int kItems = 8;
  for (uint32_t id = 0; id < ids; id += kItems * blockDim.x) {
    uint32_t expert[kItems];
    load_experts(expert, args, first_id + id, ids - id);
    if (id == 0) fill_outputs(args, blockIdx.x, gridDim.x);
#pragma unroll
    for (int i = 0; i < kItems; ++i) atomicAdd(words + expert[i], 1);
  }
  if (ids == 0) fill_outputs(args, blockIdx.x, gridDim.x);
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) {
    args.counts[blockIdx.x * args.experts + e] = words[e];
  }
}

// Sums args.counts: shared.first[e] over the preceding blocks, shared.base[e] over all blocks.
__device__ __forceinline__ void sum_blocks(const MoeAlignArgs& args, const AlignShared& shared) {
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) shared.first[e] = shared.base[e] = 0;
  __syncthreads();
  const int groups = blockDim.x / args.experts;  // of threads, each for some of the blocks
  const int group = threadIdx.x / args.experts, e = threadIdx.x % args.experts;
  if (group < groups) {
    uint32_t before = 0, total = 0;
#pragma unroll 16
    for (uint32_t block = group; block < gridDim.x; block += groups) {
      const uint32_t count = args.counts[block * args.experts + e];
      before += block < blockIdx.x ? count : 0;
      total += count;
    }
    atomicAdd(shared.first + e, before);
    atomicAdd(shared.base + e, total);
  }
  __syncthreads();
}

template <int kItems, int kBits>
__global__ void __launch_bounds__(kMoeAlignMaxThreads, 1)
    moe_align_store(const __grid_constant__ MoeAlignArgs args) {
  extern __shared__ uint32_t words[];
  const AlignShared shared = cut_shared(words, args.experts, blockDim.x / 32, 0);
  clear_counts(shared, args.experts);
  const uint32_t first_id = blockIdx.x * args.span;
  const uint32_t end = first_id < args.numel ? min(first_id + args.span, args.numel) : first_id;
  grid_dependency_wait();
  grid_dependency_launch();

  uint32_t expert[kItems];
  load_experts(expert, args, first_id, end - first_id);
  sum_blocks(args, shared);
  const int e = threadIdx.x;
  const bool real = e < args.experts;
  const uint32_t total = real ? shared.base[e] : 0, before = real ? shared.first[e] : 0;
  const uint32_t blocks = block_of(args, total + args.block_size - 1);
  uint32_t all_blocks;
  const uint32_t begin = scan_block(blocks, shared.sums + 32, &all_blocks) * args.block_size;
  uint32_t next = begin + before;  // the slot of expert e's next id
  const uint32_t chunk = blockDim.x * kItems;
  for (uint32_t id = first_id; id < end; id += chunk) {
    const int active_warps = (min(chunk, end - id) + 32 * kItems - 1) / (32 * kItems);
    uint32_t rank[kItems];
    const uint32_t mine = count_block<kBits, false>(args, shared, expert, rank, active_warps);
    uint32_t ids;
    const uint32_t first = scan_block(mine, shared.sums, &ids);
    if (real) {
      shared.first[e] = first;
      shared.base[e] = next - first;
      next += mine;
    }
    __syncthreads();
    sort_block(args, shared, expert, rank, active_warps);
    if (id + chunk < end) {
      __syncwarp();
      clear_counts(shared, args.experts);  // the warp's counts
      load_experts(expert, args, id + chunk, end - id - chunk);
    }
    __syncthreads();
    store_block(args, shared, ids, id);
  }
  if (blockIdx.x == 0) store_number(args, all_blocks);
}

// 7 bits: up to 128 experts; 9 bits: up to 512; 10 bits: up to 1024. One id per thread: any number.
#define TIERCEL_SMALL(items, cluster, bits)                                          \
  {items, cluster, items == 1 ? kMoeAlignMaxExperts : 1 << bits,                     \
   Kernel("moe_align_small<items=" #items ", cluster=" #cluster ", bits=" #bits ">", \
          reinterpret_cast<const void*>(moe_align_small<items, cluster, bits>),      \
          kMoeAlignMaxSharedBytes)}
#define TIERCEL_STORE(bits)                                                          \
  {kMoeAlignStoreItems, false, 1 << bits,                                            \
   Kernel("moe_align_store<bits=" #bits ">",                                         \
          reinterpret_cast<const void*>(moe_align_store<kMoeAlignStoreItems, bits>), \
          kMoeAlignMaxSharedBytes)}

const MoeAlignKernel kSmall[] = {TIERCEL_SMALL(1, false, 9), TIERCEL_SMALL(2, true, 7),
                                 TIERCEL_SMALL(2, true, 9),  TIERCEL_SMALL(2, true, 10),
                                 TIERCEL_SMALL(4, true, 7),  TIERCEL_SMALL(4, true, 9),
                                 TIERCEL_SMALL(4, true, 10), TIERCEL_SMALL(8, true, 7),
                                 TIERCEL_SMALL(8, true, 9),  TIERCEL_SMALL(8, true, 10)};
const Kernel kCount("moe_align_count", reinterpret_cast<const void*>(moe_align_count), 0);
const MoeAlignKernel kStore[] = {TIERCEL_STORE(7), TIERCEL_STORE(9), TIERCEL_STORE(10)};

}  // namespace

const MoeAlignKernel* moe_align_small_kernels(int* count) {
  *count = sizeof(kSmall) / sizeof(kSmall[0]);
  return kSmall;
}
const Kernel& moe_align_count_kernel() { return kCount; }
const MoeAlignKernel* moe_align_store_kernels(int* count) {
  *count = sizeof(kStore) / sizeof(kStore[0]);
  return kStore;
}

}  // namespace tiercel
