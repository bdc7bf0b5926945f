// SPDX-License-Identifier: Apache-2.0
// Keys of 16 bits.
#ifndef KERNELS_MLA_LOAD_CUH_
#define KERNELS_MLA_LOAD_CUH_

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

// Finds where a step's keys are in the cache, in bytes from its beginning. All of the third
// warpgroup calls it. `rows` is not what it was for the step before.
__device__ __forceinline__ const int64_t* find_rows(const MlaDecodeArgs& args, const Share& share,
                                                    int step, int64_t* rows) {
  const int thread = threadIdx.x % 128, at = step * kMlaStep + thread;
  if (thread < kMlaStep && at < share.length) {
    const char* table = reinterpret_cast<const char*>(args.page_table);
    const int entry =
        load_strided(reinterpret_cast<const int32_t*>(table + share.b * args.table_stride),
                     args.table_step, at >> args.page_bits);
    const int64_t page = entry < 0 || entry > args.last_page ? args.last_page : entry;
    const int64_t place = at & ((1 << args.page_bits) - 1);
    rows[thread] = page * args.page_stride + place * args.place_stride;
  }
  named_sync<128>(kKeyRows);
  return rows;
}

// A step's rows of mla_decode: those behind the sequence's end are not real.
struct PagedRows {
  const int64_t* own;
  int keys;

  __device__ __forceinline__ bool real(int row) const { return row < keys; }
  __device__ __forceinline__ void note(const Memory&, unsigned char*, int) const {}
};

struct PagedRowsFinder {
  __device__ __forceinline__ PagedRows find(const MlaDecodeArgs& args, const Share& share, int step,
                                            int64_t* rows) const {
    const int keys = min(share.length - step * kMlaStep, kMlaStep);
    return {find_rows(args, share, step, rows), keys};
  }
};

// One warp loads its half of all steps. Of a pair of blocks, each loads every other box, into both.
__device__ __forceinline__ void load_keys(const MlaDecodeArgs& args, const CUtensorMap* map,
                                          Share share, const Memory& memory, int half,
                                          unsigned char* pointer) {
  static_assert(kMlaStep / kMlaLeastBox <= 32);  // copies of a block of columns, one a lane
  const int thread = threadIdx.x % 32, own = thread * args.copy_rows;
  const int blocks = half == 0 ? kHalfBlocks + 1 : kHalfBlocks;
  const bool loads =
      own < kMlaStep && (!args.pair || thread % 2 == static_cast<int>(cluster_rank()));
  const auto block_of = [&](int at) {
    return at == kHalfBlocks ? kMlaBlocks - 1 : half * kHalfBlocks + at;
  };
  Ring ring;
  do {
    const int32_t* table = reinterpret_cast<const int32_t*>(
        reinterpret_cast<const char*>(args.page_table) + share.b * args.table_stride);
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int key = step * kMlaStep, stage = ring.stage();
      // Copies without a key that counts are left out.
      const int keys = min(share.length - key, kMlaStep);
      const int copies = (keys + args.copy_rows - 1) / args.copy_rows;
      const bool copies_one = loads && thread < copies;
      int row = 0;  // of the map
      if (copies_one) {
        const int first = key + own;
        const int entry = load_strided(table, args.table_step, first >> args.page_bits);
        const int page = entry < 0 || entry > args.last_page ? args.last_page : entry;
        row = page * args.page_rows + (first & ((1 << args.page_bits) - 1));
      }
      mbarrier_wait(memory.empty(half, stage), ring.parity() ^ 1);
      uint64_t* full =
          reinterpret_cast<uint64_t*>(pointer + (memory.full(half, stage) - memory.base));
      if (thread == 0) mbarrier_expect(full, copies * args.copy_rows * kMlaColumns * blocks);
      __syncwarp();
      unsigned char* const to = pointer + (memory.keys(stage) - memory.base) + own * kMlaColumns;
#pragma unroll 1
      for (int at = 0; copies_one && at < blocks; ++at) {
        const int block = block_of(at);
        if (args.pair) {
          box_multicast(to + block * kMlaBlock, map, block * 64, row, full, 0b11);
        } else {
          box_load(to + block * kMlaBlock, map, block * 64, row, full);
        }
      }
      __syncwarp();
    }
  } while (share.next(args));
}

// All four warps load pages of a few keys, row by row: TMA cannot start that many copies in the
// time that they take. A half is completed when the next one has been started.
__device__ __forceinline__ void load_keys_by_row(const MlaDecodeArgs& args, Share share,
                                                 const Memory& memory, unsigned char* pointer) {
  constexpr int kLanes = kHalfBlocks * 8;  // of a half row, 16 bytes each
  constexpr int kRows = 128 / kLanes;      // at once
  const int thread = threadIdx.x % 128, lane = thread % kLanes;
  int64_t* const rows = reinterpret_cast<int64_t*>(pointer + kMlaKeyRows);
  const auto copy = [&](uint32_t tile, const char* from, int row, int chunk, bool real) {
    const uint32_t to =
        tile + chunk / 8 * kMlaBlock + row * kMlaColumns + ((chunk % 8 ^ row % 8) * 16);
    async_copy_16(to, from + chunk * 16, real);
  };
  uint32_t started = 0;  // the barrier of a half that is in flight
  const auto complete = [&] {
    if (started == 0) return;
    proxy_fence();
    release(started);
  };
  Ring ring;
  do {
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int stage = ring.stage(), keys = min(share.length - step * kMlaStep, kMlaStep);
      const int64_t* const own = find_rows(args, share, step, rows + stage * kMlaStep);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(memory.empty(half, stage), ring.parity() ^ 1);
        const uint32_t tile = memory.keys(stage);
#pragma unroll 4
        for (int row = thread / kLanes; row < kMlaStep; row += kRows) {
          const bool real = row < keys;
          copy(tile, args.cache + (real ? own[row] : 0), row, half * kLanes + lane, real);
        }
        if (half == 0) {
          for (int row = thread / 8; row < kMlaStep; row += 128 / 8) {
            const bool real = row < keys;
            copy(tile, args.cache + (real ? own[row] : 0), row, 2 * kLanes + thread % 8, real);
          }
        }
        async_copy_commit();
        async_copy_wait<1>();
        complete();
        started = memory.full(half, stage);
      }
    }
  } while (share.next(args));
  async_copy_wait<0>();
  complete();
}

}  // namespace tiercel

#endif  // KERNELS_MLA_LOAD_CUH_
