// SPDX-License-Identifier: Apache-2.0
// Keys of mla_sparse: rows of the cache that a list of slots names.
#ifndef KERNELS_MLA_LOAD_SPARSE_CUH_
#define KERNELS_MLA_LOAD_SPARSE_CUH_

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/mla/sparse.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/copy_arrival.cuh"

namespace tiercel {

// Rows of a step, in bytes from the cache's beginning; -1: none.
struct SlotRows {
  const int64_t* own;
  unsigned valid;  // of the 32 keys of this warp, if it found some

  __device__ __forceinline__ bool real(int row) const { return own[row] >= 0; }

  // Tells the multiplying warpgroups which keys count. The stage is empty.
  __device__ __forceinline__ void note(const Memory&, unsigned char* pointer, int stage) const {
    const int thread = threadIdx.x % 128;
    if (thread < kMlaStep && thread % 32 == 0) {
      reinterpret_cast<unsigned*>(pointer + kSparseValid)[stage * 2 + thread / 32] = valid;
    }
  }
};

// All of the third warpgroup calls it, for one step after the other.
struct SlotRowsFinder {
  int ahead = -1;  // the slot of the next step

  __device__ __forceinline__ int slot_of(const MlaDecodeArgs& args, const SparseShare& share,
                                         int step) const {
    const int thread = threadIdx.x % 128, at = step * kMlaStep + thread;
    if (thread >= kMlaStep || at >= args.capacity) return -1;
    const char* indices = reinterpret_cast<const char*>(args.page_table);
    return load_strided(reinterpret_cast<const int32_t*>(indices + share.b * args.table_stride),
                        args.table_step, at);
  }

  __device__ __forceinline__ SlotRows find(const MlaDecodeArgs& args, const SparseShare& share,
                                           int step, int64_t* rows) {
    const int thread = threadIdx.x % 128;
    const int slot = step == share.first ? slot_of(args, share, step) : ahead;
    // Slots are contents of a tensor: those outside of the cache are none.
    const int64_t page = slot >> args.page_bits;
    const bool real = slot >= 0 && page <= args.last_page;
    const unsigned valid = __ballot_sync(kFullWarp, real);
    if (thread < kMlaStep) {
      const int64_t place = slot & ((1 << args.page_bits) - 1);
      rows[thread] = real ? page * args.page_stride + place * args.place_stride : -1;
    }
    if (step + 1 < share.last) ahead = slot_of(args, share, step + 1);
    named_sync<128>(kKeyRows);
    return {rows, valid};
  }
};

// Keys of 16 bits, row by row.
__device__ __forceinline__ void load_sparse_keys(const MlaDecodeArgs& args, SparseShare share,
                                                 const Memory& memory, unsigned char* pointer) {
  constexpr int kLanes = kHalfBlocks * 8;  // of a half row, 16 bytes each
  constexpr int kRows = 128 / kLanes;      // at once
  const int thread = threadIdx.x % 128, lane = thread % kLanes;
  int64_t* const rows = reinterpret_cast<int64_t*>(pointer + kMlaKeyRows);
  SlotRowsFinder finder;
  Ring ring;
  do {
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int stage = ring.stage();
      const SlotRows found = finder.find(args, share, step, rows + stage * kMlaStep);
      const uint32_t tile = memory.keys(stage);
      const auto copy = [&](int row, int chunk) {
        const int64_t at = found.own[row];
        const uint32_t to =
            tile + chunk / 8 * kMlaBlock + row * kMlaColumns + ((chunk % 8 ^ row % 8) * 16);
        async_copy_16(to, args.cache + (at < 0 ? 0 : at) + chunk * 16, at >= 0);
      };
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(memory.empty(half, stage), ring.parity() ^ 1);
        if (half == 0) found.note(memory, pointer, stage);
#pragma unroll 8
        for (int row = thread / kLanes; row < kMlaStep; row += kRows) {
          copy(row, half * kLanes + lane);
        }
        if (half == 0) {
#pragma unroll
          for (int row = thread / 8; row < kMlaStep; row += 128 / 8) {
            copy(row, 2 * kLanes + thread % 8);
          }
        }
        arrive_with_copies(
            reinterpret_cast<uint64_t*>(pointer + (memory.full(half, stage) - memory.base)));
      }
    }
  } while (share.next(args));
  async_copy_commit();
  async_copy_wait<0>();
}

}  // namespace tiercel

#endif  // KERNELS_MLA_LOAD_SPARSE_CUH_
