// SPDX-License-Identifier: Apache-2.0
// Sequences in chunks of 64 tokens, and tiles of 16-bit floats in shared memory.
#ifndef KERNELS_DELTA_CHUNKS_CUH_
#define KERNELS_DELTA_CHUNKS_CUH_

#include <cstdint>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/warp_matrix.cuh"

namespace tiercel {

inline constexpr int kDeltaPad =
    16;  // bytes between rows of a tile, so that eight rows meet no bank twice

struct DeltaSequence {
  int64_t begin;
  int64_t end;    // not below begin
  int64_t place;  // of the first chunk in the workspace
};

__device__ __forceinline__ int64_t delta_start(const DeltaRuleArgs& args, int index) {
  if (args.starts == nullptr) return index * args.length;
  const int64_t start = args.starts[index * args.start_step];
  return start < 0 ? 0 : start > args.tokens ? args.tokens : start;
}

__device__ __forceinline__ int64_t delta_place(int64_t begin, int index) {
  return begin / kDeltaChunk + index;
}

__device__ __forceinline__ DeltaSequence delta_sequence(const DeltaRuleArgs& args, int index) {
  const int64_t begin = delta_start(args, index), end = delta_start(args, index + 1);
  return {begin, end < begin ? begin : end, delta_place(begin, index)};
}

// The slot of a sequence's first segment.
__device__ __forceinline__ int64_t delta_slot(const DeltaRuleArgs& args, int64_t begin, int index) {
  if (args.segment_chunks == 0) return index;
  return delta_place(begin, index) / args.segment_chunks + index;
}

// The sequence that has a place or, if kSlots, the slot of a segment, if one has; otherwise any.
template <bool kSlots = false>
__device__ __forceinline__ int delta_owner(const DeltaRuleArgs& args, int64_t place) {
  int low = 0, high = args.count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    const int64_t begin = delta_start(args, middle);
    if ((kSlots ? delta_slot(args, begin, middle) : delta_place(begin, middle)) <= place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ int64_t delta_chunk_count(const DeltaSequence& sequence) {
  return (sequence.end - sequence.begin + kDeltaChunk - 1) / kDeltaChunk;
}

struct DeltaSegment {
  int index;            // of the sequence
  int64_t first, last;  // chunks of the sequence
  int64_t all;          // chunks of the sequence
  bool real;            // there is such a segment; an empty sequence has one
};

__device__ __forceinline__ DeltaSegment delta_segment(const DeltaRuleArgs& args, int64_t slot) {
  const int index = delta_owner<true>(args, slot);
  const DeltaSequence sequence = delta_sequence(args, index);
  const int64_t all = delta_chunk_count(sequence);
  if (args.segment_chunks == 0) return {index, 0, all, all, true};
  const int64_t number = slot - delta_slot(args, sequence.begin, index);
  const int64_t first = number * args.segment_chunks;
  return {index, first, min(all, first + args.segment_chunks), all,
          number == 0 || (number > 0 && first < all)};
}

__device__ __forceinline__ const char* delta_row(const DeltaRuleArgs& args, const DeltaHeads& heads,
                                                 int64_t token, int head) {
  const int64_t batch = args.starts == nullptr ? token / args.length : 0;
  const int64_t inside = args.starts == nullptr ? token - batch * args.length : token;
  return heads.data + batch * heads.batch + inside * heads.token + head * heads.head;
}

// Tells other blocks that what this thread knows of has been written.
__device__ __forceinline__ void delta_publish(int* flag) {
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

__device__ __forceinline__ int delta_published(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Copies rows of kBytes from global memory, a distance apart, into a tile; rows from `rows` on, and
// vectors of 16 bytes from `vectors` on, are zeros. A multiple of a row's vectors is `threads`.
template <int kBytes>
__device__ __forceinline__ void copy_rows(uint32_t tile, const char* from, int64_t stride, int rows,
                                          int thread, int threads, int vectors = kBytes / 16) {
  constexpr int kVectors = kBytes / 16;
  const int vector = thread % kVectors, step = threads / kVectors;
  uint32_t to = tile + thread / kVectors * (kBytes + kDeltaPad) + vector * 16;
  const char* at = from + thread / kVectors * stride + vector * 16;
#pragma unroll
  for (int row = thread / kVectors; row < kDeltaChunk; row += step) {
    const bool real = row < rows && vector < vectors;
    async_copy_16(to, real ? at : from, real);
    to += step * (kBytes + kDeltaPad), at += step * stride;
  }
}

// The address that a lane passes for a block of 16 rows and 16 columns of a tile. Words 0 to 3 are
// the upper left, upper right, lower left and lower right quarter.
__device__ __forceinline__ uint32_t block_by_rows(uint32_t tile, int pitch, int row, int column) {
  const int lane = threadIdx.x % 32;
  return tile + (row + lane % 8 + lane / 16 * 8) * pitch + (column + lane / 8 % 2 * 8) * 2;
}

// Words 0 to 3 are the upper left, lower left, upper right and lower right quarter.
__device__ __forceinline__ uint32_t block_by_columns(uint32_t tile, int pitch, int row,
                                                     int column) {
  const int lane = threadIdx.x % 32;
  return tile + (row + lane % 16) * pitch + (column + lane / 16 * 8) * 2;
}

// The place in the workspace of an element of a tile [64, K]. With kSwizzled in the layout that
// wgmma reads: blocks of 64 columns, with vectors of 16 bytes swapped in each row.
template <int kKeySize, bool kSwizzled>
__device__ __forceinline__ int delta_tile_place(int row, int column) {
  if constexpr (!kSwizzled) return (row * kKeySize + column) * 2;
  return column / 64 * kDeltaChunk * 128 + row * 128 + (column / 8 % 8 ^ row % 8) * 16 +
         column % 8 * 2;
}

template <typename Format>
__device__ __forceinline__ uint32_t pack_pair(float a, float b) {
  const float pair[2] = {a, b};
  return Format::pack(pair);
}

}  // namespace tiercel

#endif  // KERNELS_DELTA_CHUNKS_CUH_
