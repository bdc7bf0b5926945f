// SPDX-License-Identifier: Apache-2.0
// rotary_embedding: pairs of elements of every head of q and k, turned by their token's angles.
//
// The plan. q and k are read and written once: 8192 tokens of 32 + 8 heads of 128 bfloat16 are
// 168 MB, 40 us at 4.2 TB/s; a token's cosines and sines are read once a block. A block has one
// token. A thread always has the same place in a head: two vectors whose elements make pairs (or one
// that holds both halves, when interleaved), or a vector that is only copied; it keeps its cosines
// and sines in registers and goes through the heads, two at a time, those of k after those of q. In
// place and out of place are the same code: a thread writes what only it has read.
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

// kCount pairs of cosines and sines: a vector's elements, one by one or two by two.
template <typename Element, int kCount>
__device__ __forceinline__ void load_angles(float (&values)[kCount], const RotaryArgs& args,
                                            const char* row, int first) {
  if (args.wide_cache) {
    const float* wide = reinterpret_cast<const float*>(row);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = wide[first + i];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = Element::widen(
          reinterpret_cast<const typename Element::Bits*>(row)[first + i]);
    }
  }
}

// kVector elements are read at once; kInterleaved: pairs side by side. kVector 1 with kInterleaved
// is a pair of elements.
template <typename Element, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(512) rotary_embedding(const __grid_constant__ RotaryArgs args) {
  constexpr bool kSideBySide = kInterleaved && kVector > 1;
  constexpr int kPairs = kSideBySide ? kVector / 2 : kVector;
  constexpr int kVectorBytes = kVector * Element::kBytes;
  const int pairs = args.rotated / 2;
  const int places = pairs / kPairs + args.rest;  // of a head
  const int together = blockDim.x / places;       // heads at a time
  const int place = threadIdx.x % places;
  const bool rotates = place < pairs / kPairs;
  const int64_t token = blockIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  if (threadIdx.x / places >= together) return;

  float cosines[kPairs], sines[kPairs];
  int first, second;  // bytes in a head
  if (rotates) {
    const int64_t position = args.wide_positions
                                 ? static_cast<const int64_t*>(args.positions)[token]
                                 : static_cast<const int32_t*>(args.positions)[token];
    const int angle_bytes = args.wide_cache ? 4 : Element::kBytes;
    const char* row = args.cache + position * args.rotated * angle_bytes;
    load_angles<Element>(cosines, args, row, place * kPairs);
    load_angles<Element>(sines, args, row, pairs + place * kPairs);
    if constexpr (kSideBySide) {
      first = place * kVectorBytes;
      second = first;
    } else if constexpr (kInterleaved) {
      first = place * 2 * Element::kBytes;
      second = first + Element::kBytes;
    } else {
      first = place * kVectorBytes;
      second = first + pairs * Element::kBytes;
    }
  } else {
    first = args.rotated * Element::kBytes + (place - pairs / kPairs) * kVectorBytes;
    second = first;
  }

#pragma unroll 2
  for (int head = threadIdx.x / places; head < args.heads; head += together) {
    const bool is_q = head < args.q_heads;
    const HeadsOfTokens& in = is_q ? args.q : args.k;
    const HeadsOfTokens& out = is_q ? args.q_out : args.k_out;
    const int64_t number = is_q ? head : head - args.q_heads;
    const char* from = in.data + token * in.token_stride + number * in.head_stride;
    char* to = out.data + token * out.token_stride + number * out.head_stride;
    float x[kVector];
    load_elements<Element>(x, from + first);
    if (!rotates) {
      store_elements<Element>(to + first, x);
      continue;
    }
    if constexpr (kSideBySide) {
      float turned[kVector];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        turned[2 * i] = x[2 * i] * cosines[i] - x[2 * i + 1] * sines[i];
        turned[2 * i + 1] = x[2 * i + 1] * cosines[i] + x[2 * i] * sines[i];
      }
      store_elements<Element>(to + first, turned);
    } else {
      float y[kVector], turned[kVector];
      load_elements<Element>(y, from + second);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) turned[i] = x[i] * cosines[i] - y[i] * sines[i];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) y[i] = y[i] * cosines[i] + x[i] * sines[i];
      store_elements<Element>(to + first, turned);
      store_elements<Element>(to + second, y);
    }
  }
}

#define TIERCEL_ROTARY(dtype, vector, interleaved)                                          \
  {DType::k##dtype,                                                                         \
   interleaved,                                                                             \
   vector * dtype##Element::kBytes,                                                         \
   Kernel("rotary_embedding<" #dtype ", vector=" #vector ", interleaved=" #interleaved ">", \
          reinterpret_cast<const void*>(rotary_embedding<dtype##Element, vector, interleaved>))}

// By dtype; vectors before elements.
const RotaryKernel kKernels[] = {
    TIERCEL_ROTARY(Float32, 4, false),  TIERCEL_ROTARY(Float32, 4, true),
    TIERCEL_ROTARY(Float32, 1, false),  TIERCEL_ROTARY(Float32, 1, true),
    TIERCEL_ROTARY(BFloat16, 8, false), TIERCEL_ROTARY(BFloat16, 8, true),
    TIERCEL_ROTARY(BFloat16, 1, false), TIERCEL_ROTARY(BFloat16, 1, true),
    TIERCEL_ROTARY(Float16, 8, false),  TIERCEL_ROTARY(Float16, 8, true),
    TIERCEL_ROTARY(Float16, 1, false),  TIERCEL_ROTARY(Float16, 1, true),
};

}  // namespace

const RotaryKernel* rotary_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
