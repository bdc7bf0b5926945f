// SPDX-License-Identifier: Apache-2.0
// A lane's share of a row of scores, in registers.
#ifndef KERNELS_ROUTING_ROW_SCORES_CUH_
#define KERNELS_ROUTING_ROW_SCORES_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

// A row's address and how it may be read.
struct RowOfScores {
  const char* data;
  int64_t inner_stride;  // bytes
  int experts;           // 0: nothing is read
  int vector_bytes;
};

// kWords words of scores from `first` on. Behind the row's end they are -infinity, which loses
// against every real score because of its higher index.
template <typename Keys, int kWords>
__device__ __forceinline__ void load_scores(uint32_t (&words)[kWords], const RowOfScores& row,
                                            int first) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = Keys::kPad;
  const bool whole_words = Keys::kBytes < 4 && row.vector_bytes >= 4;
  if (row.vector_bytes >= kWords * 4) {
    if (first < row.experts) load_vector(words, row.data + first * Keys::kBytes);
  } else if (whole_words) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int index = first + w * Keys::kPerWord;
      if (index < row.experts) {
        words[w] = *reinterpret_cast<const uint32_t*>(row.data + index * Keys::kBytes);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords * Keys::kPerWord; ++i) {
      if (first + i < row.experts) {
        const char* address = row.data + (first + i) * row.inner_stride;
        uint32_t& word = words[i / Keys::kPerWord];
        if constexpr (Keys::kBytes == 4) {
          word = *reinterpret_cast<const uint32_t*>(address);
        } else {
          const uint32_t bits = *reinterpret_cast<const uint16_t*>(address);
          word = __byte_perm(word, bits, i % 2 ? 0x5410 : 0x3254);
        }
      }
    }
  }
}

// kVectors vectors of kWords words; vector v begins at score (v * kLanes + lane) * kPerVector.
template <typename Keys, int kLanes, int kVectors, int kWords>
struct LaneScores {
  static constexpr int kPerVector = kWords * Keys::kPerWord;

  uint32_t words[kVectors][kWords];

  __device__ __forceinline__ void load(const RowOfScores& row, int lane) {
    // One branch for all loads, so that they are issued back to back.
    if (row.vector_bytes >= kWords * 4) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int first = (v * kLanes + lane) * kPerVector;
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[v][w] = Keys::kPad;
        if (first < row.experts) load_vector(words[v], row.data + first * Keys::kBytes);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load_scores<Keys>(words[v], row, (v * kLanes + lane) * kPerVector);
      }
    }
  }

  // The keys of kCount scores from vector `v` on, with indices as in lane 0.
  template <int kCount>
  __device__ __forceinline__ void keys_from(typename Keys::Key (&keys)[kCount], int v) const {
    static_assert(kCount % kPerVector == 0, "whole vectors");
#pragma unroll
    for (int i = 0; i < kCount; i += Keys::kPerWord) {
      const int vector = v + i / kPerVector;
      const int index = vector * kLanes * kPerVector + i % kPerVector;
      Keys::make(&keys[i], words[vector][i % kPerVector / Keys::kPerWord], index);
    }
  }

  // Calls visit(index, score) for every score of the lane.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        visit(v * kPerVector + i,
              Keys::raw_score(words[v][i / Keys::kPerWord], i % Keys::kPerWord));
      }
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_ROUTING_ROW_SCORES_CUH_
