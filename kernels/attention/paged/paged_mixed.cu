// SPDX-License-Identifier: Apache-2.0
// paged_mixed: plans a mixed batch over a float8 cache. Sequences with few new tokens get no tile.
// The tiles of the others are numbered consecutively, and sequences with many new tokens get
// workspace pages for 16-bit copies of their keys, while there is room. paged_widen converts all of
// these pages, or only the last ones of sequences with many keys and enough tiles, whose blocks
// convert the others while they multiply (copies.py): with fewer pages than multiprocessors all
// tiles would begin at once, and with few tiles each would convert too much.
//
// One block, one thread for each of up to 1024 sequences at a time, with a prefix sum over the
// sequences.
#include <cstdint>

#include "kernels/attention/paged/mixed.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kWarps = kPagedMixedThreads / 32;
constexpr int64_t kManyTiles = 8;            // from these on, their blocks copy pages
constexpr int64_t kMost = int64_t{1} << 29;  // numbers of tiles; starts may be anything

struct Counts {
  int64_t tiles = 0, pages = 0;

  __device__ __forceinline__ void add(const Counts& other) {
    tiles += other.tiles;
    pages += other.pages;
  }
};

struct Sequence : Counts {
  int before = 0;  // pages that are copied before
};

__device__ __forceinline__ int load(const char* from, int32_t step, int at) {
  return *reinterpret_cast<const int32_t*>(from + static_cast<int64_t>(step) * at);
}

__device__ __forceinline__ Sequence counts_of(const PagedMixedArgs& args, int b) {
  const int first = min(max(load(args.starts, args.start_step, b), 0), args.total);
  const int end = min(max(load(args.starts, args.start_step, b + 1), 0), args.total);
  const int rows = end - first;
  Sequence counts;
  if (rows <= args.few) return counts;
  counts.tiles = (rows + args.queries - 1) / args.queries;
  if (rows < args.many) return counts;
  const int keys = min(max(load(args.lengths, args.length_step, b), 0), args.capacity);
  const int pages = (keys + kPagedWidenPlaces - 1) / kPagedWidenPlaces;
  counts.pages = pages;
  const bool all = pages < args.many_pages || keys <= 2ll * rows || counts.tiles < kManyTiles;
  counts.before = all ? pages : min(pages, args.ahead);
  return counts;
}

__global__ void __launch_bounds__(kPagedMixedThreads)
    paged_mixed(const __grid_constant__ PagedMixedArgs args) {
  __shared__ Counts of_warp[kWarps];
  __shared__ int listed;  // of the sources
  grid_dependency_wait();
  grid_dependency_launch();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (thread == 0) listed = 0;
  for (int i = thread; i < args.before; i += kPagedMixedThreads) {
    args.sources[i] = make_int4(-1, 0, 0, 0);
  }
  for (int i = thread; i < args.pages * args.halves; i += kPagedMixedThreads) args.states[i] = 0;
  Counts before;  // of the sequences that came before this turn's
  for (int first = 0; first < args.batch; first += kPagedMixedThreads) {
    const int b = first + thread;
    Sequence own;
    if (b < args.batch) own = counts_of(args, b);
    Counts sum = own;  // of this warp's, up to this thread's
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Counts other{__shfl_up_sync(kFullWarp, sum.tiles, offset),
                         __shfl_up_sync(kFullWarp, sum.pages, offset)};
      if (lane >= offset) sum.add(other);
    }
    __syncthreads();  // of_warp was read, and all sources are cleared
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    Counts at = before;
#pragma unroll 1
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) at.add(of_warp[other]);
      before.add(of_warp[other]);
    }
    at.tiles += sum.tiles - own.tiles;
    at.pages += sum.pages - own.pages;
    if (b >= args.batch) continue;
    args.tile_starts[b] = static_cast<int>(min(at.tiles, kMost));
    const bool fits = own.pages > 0 && at.pages + own.pages <= args.pages;
    args.copied[b] = fits ? static_cast<int>(at.pages) : -1;
    if (!fits) continue;
    const int pages = static_cast<int>(own.pages), count = own.before;
    const int to = atomicAdd(&listed, count);
    if (to + count > args.before) continue;
    for (int i = 1; i <= count; ++i) {
      args.sources[to + count - i] =
          make_int4(b, pages - i, static_cast<int>(at.pages) + pages - i, 0);
    }
  }
  __syncthreads();
  for (int i = thread; i < args.before * args.halves; i += kPagedMixedThreads) {
    const int4 source = args.sources[i / args.halves];
    if (source.x >= 0) args.states[source.z * args.halves + i % args.halves] = 2;
  }
  if (thread == 0) args.tile_starts[args.batch] = static_cast<int>(min(before.tiles, kMost));
}

const PagedMixedKernel kKernels[] = {
    {Kernel("paged_mixed", reinterpret_cast<const void*>(paged_mixed))},
};

}  // namespace

const PagedMixedKernel* paged_mixed_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
