// SPDX-License-Identifier: Apache-2.0
// A head of a query or key in the registers of a few lanes: what the kernels share that norm and
// rotate heads, and those of their gradients.
#ifndef KERNELS_ROTARY_QK_HEADS_CUH_
#define KERNELS_ROTARY_QK_HEADS_CUH_

#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/rotary_kernels.h"

namespace tiercel {

// Eight elements of a list of float32 or of `Element`, as they are in memory: whoever loads them
// does not wait for them.
template <typename Element>
struct Eight {
  uint32_t words[kQkVector];

  __device__ __forceinline__ void load(const char* list, int64_t index, bool is_float32) {
    const char* const from = list + index * (is_float32 ? 4 : Element::kBytes);
    load_vector(reinterpret_cast<uint32_t (&)[4]>(words[0]), from);
    if (is_float32) load_vector(reinterpret_cast<uint32_t (&)[4]>(words[4]), from + 16);
  }
  // Element number `i` alone, at another index than its neighbours'.
  __device__ __forceinline__ void load_one(int i, const char* list, int64_t index,
                                           bool is_float32) {
    if (is_float32) {
      words[i] = *reinterpret_cast<const uint32_t*>(list + index * 4);
    } else {
      words[i] = *reinterpret_cast<const uint16_t*>(list + index * Element::kBytes);
    }
  }
  // Elements that load_one() has loaded.
  __device__ __forceinline__ void get_each(float (&values)[kQkVector], bool is_float32) const {
#pragma unroll
    for (int i = 0; i < kQkVector; ++i) {
      values[i] = is_float32 ? __uint_as_float(words[i]) : Element::low(words[i]);
    }
  }
  __device__ __forceinline__ void get(float (&values)[kQkVector], bool is_float32) const {
#pragma unroll
    for (int i = 0; i < kQkVector; ++i) {
      const uint32_t pair = words[i / 2];
      const float narrow = i % 2 ? Element::high(pair) : Element::low(pair);
      values[i] = is_float32 ? __uint_as_float(words[i]) : narrow;
    }
  }
};

// The two vectors of a lane: elements of them form pairs, or both are only copied.
struct HeadPlace {
  int offsets[2];  // of the vectors within a head, elements
  bool has[2];
  bool turns;

  __device__ __forceinline__ HeadPlace(const QkHeadsArgs& args, int lane, bool interleaved) {
    const int copied = lane - args.turning;
    turns = copied < 0;
    if (turns) {
      offsets[0] = lane * (interleaved ? 2 : 1) * kQkVector;
      offsets[1] = offsets[0] + (interleaved ? 1 : args.turning) * kQkVector;
      has[0] = has[1] = true;
    } else {
      const int half = (args.rest + 1) / 2;  // the last place may have only one vector
      offsets[0] = args.rotated + copied * kQkVector;
      offsets[1] = offsets[0] + half * kQkVector;
      has[0] = copied < half;
      has[1] = copied + half < args.rest;
    }
  }
};

// Rotates the pairs of a lane's two vectors.
template <bool kInterleaved>
__device__ __forceinline__ void turn_pairs(float (&values)[2][kQkVector],
                                           const float (&cosine)[kQkVector],
                                           const float (&sine)[kQkVector]) {
#pragma unroll
  for (int j = 0; j < kQkVector; ++j) {
    constexpr int kStep = kInterleaved ? 2 : 1, kNext = kInterleaved ? 1 : 0;
    constexpr int kPairs = kInterleaved ? kQkVector / 2 : kQkVector;  // in the first vector
    float& first_of_pair = values[kInterleaved ? j / kPairs : 0][j % kPairs * kStep];
    float& second_of_pair = values[kInterleaved ? j / kPairs : 1][j % kPairs * kStep + kNext];
    const float a = first_of_pair, b = second_of_pair;
    first_of_pair = a * cosine[j] - b * sine[j];
    second_of_pair = b * cosine[j] + a * sine[j];
  }
}

}  // namespace tiercel

#endif  // KERNELS_ROTARY_QK_HEADS_CUH_
