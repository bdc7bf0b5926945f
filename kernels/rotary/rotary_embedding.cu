// SPDX-License-Identifier: Apache-2.0
// rotary_embedding: rotates pairs of elements of every head of q and k by their token's angles.
//
// q and k are read and written once: 8192 tokens of 32 + 8 heads of 128 bfloat16 are 168 MB, 40 us
// at 4.2 TB/s. A thread processes one place in kHeads heads of a token: two vectors whose elements
// form pairs (one vector with both halves if interleaved), or two that are only copied. It loads
// its token's position, from which the cosines and sines follow, and all its vectors before it
// waits for either. The same code works in place, because a thread writes only elements that it
// alone has read. If few vectors of a head are rotated, the two vectors of a pair are less than 64
// bytes apart, the unit of memory reads. Then a thread takes one of them and one to copy, and gets
// the other elements of its pairs from its neighbour's registers (kExchanged).
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/integers.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

// kCount cosines or sines, from index `index` of the cache on.
template <typename Element, int kCount>
__device__ __forceinline__ void load_angles(float (&values)[kCount], const char* cache,
                                            int64_t index) {
  Packed<Element, kCount> packed;
  packed.load(cache + index * Element::kBytes);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = packed[i];
}

// The address of a head; heads of k are numbered after those of q.
__device__ __forceinline__ char* head_of(const HeadsOfTokens& q, const HeadsOfTokens& k,
                                         int q_heads, int64_t token, int head) {
  const bool is_q = head < q_heads;
  const HeadsOfTokens& heads = is_q ? q : k;
  return heads.data + token * heads.token_stride +
         static_cast<int64_t>(is_q ? head : head - q_heads) * heads.head_stride;
}

// Reads kVector elements at once; kInterleaved: the elements of a pair are adjacent. kVector 1 with
// kInterleaved reads one pair. A block covers places x heads x tokens, the grid tokens x heads.
template <typename Element, int kVector, bool kInterleaved, int kHeads, bool kExchanged = false>
__global__ void __launch_bounds__(kRotaryMostThreads)
    rotary_embedding(const __grid_constant__ RotaryArgs args) {
  constexpr bool kSideBySide = kInterleaved && kVector > 1;
  constexpr int kParts = kSideBySide ? 1 : 2;  // vectors per place
  constexpr int kPairs = kVector * kParts / 2;
  constexpr int kVectorBytes = kVector * Element::kBytes;
  const int place = threadIdx.x, copied = place - args.turning;
  const bool turns = kExchanged || copied < 0;
  int offsets[2];  // of the vectors within a head, bytes
  if (kExchanged) {
    offsets[0] = place * kVectorBytes;
    offsets[1] = offsets[0] + args.rotated * Element::kBytes;
  } else if (turns) {
    offsets[0] = place * (kInterleaved && kParts == 2 ? 2 : 1) * kVectorBytes;
    offsets[1] = offsets[0] + (kInterleaved ? 1 : args.turning) * kVectorBytes;
  } else {
    const int half = (args.rest + 1) / 2;  // the last copied place may have only one vector
    offsets[0] = args.rotated * Element::kBytes + copied * kVectorBytes;
    offsets[1] = offsets[0] + (copied + half < args.rest ? half : 0) * kVectorBytes;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int first = blockIdx.y * kHeads * blockDim.y + threadIdx.y;
  if (is_prefetching(args.prefetch_blocks) && token < args.tokens) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * blockDim.y;
      if (head >= args.heads) continue;
      const char* from = head_of(args.q, args.k, args.q_heads, token, head);
#pragma unroll
      for (int p = 0; p < kParts; ++p) prefetch_l2(from + offsets[p]);
    }
  }
  if (is_prefetching(args.prefetch_blocks) && place + threadIdx.y + threadIdx.z + blockIdx.y == 0) {
    prefetch_line(args.positions, blockIdx.x, args.tokens * (args.wide_positions ? 8 : 4));
  }
  grid_dependency_wait();
  grid_dependency_launch();
  if (token >= args.tokens) return;

  // The first load, because the address of the angles depends on it.
  Integer position;
  position.load(args.positions, token, args.wide_positions);
  // Prefetches the angles of a token of the next wave of blocks to L2.
  const int64_t next_token = token + static_cast<int64_t>(args.prefetch_blocks) * blockDim.z;
  const bool asks = place + threadIdx.y + blockIdx.y == 0 && next_token < args.tokens;
  Integer next;
  if (asks) next.load(args.positions, next_token, args.wide_positions);
  Packed<Element, kVector> x[kHeads][kParts] = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * blockDim.y;
    if (head >= args.heads) continue;
    const char* from = head_of(args.q, args.k, args.q_heads, token, head);
#pragma unroll
    for (int p = 0; p < kParts; ++p) x[i][p].load(from + offsets[p]);
  }
  if (asks) {
    const uint32_t bytes = args.rotated * (args.wide_cache ? 4 : Element::kBytes);
    const uint64_t at = next.clamped(args.wide_positions, args.last_position);
    const char* const row = args.cache + at * bytes;
#pragma unroll 1
    for (uint32_t b = 0; b < bytes; b += 128) prefetch_l2(row + b);
  }
  float cosines[kPairs], sines[kPairs];
  if (turns) {
    const int pair = (kExchanged ? place & (args.turning - 1) : place) * kPairs;
    const uint64_t row = position.clamped(args.wide_positions, args.last_position);
    const int64_t cosine = row * static_cast<uint32_t>(args.rotated) + pair;
    const int64_t sine = cosine + args.rotated / 2;
    if (args.wide_cache) {
      load_angles<Float32Element>(cosines, args.cache, cosine);
      load_angles<Float32Element>(sines, args.cache, sine);
    } else {
      load_angles<Element>(cosines, args.cache, cosine);
      load_angles<Element>(sines, args.cache, sine);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * blockDim.y;
    if constexpr (kExchanged) {
      float turned[kVector];
      Packed<Element, kVector> other;
#pragma unroll
      for (int w = 0; w < Packed<Element, kVector>::kWords; ++w) {
        other.words[w] = __shfl_xor_sync(0xffffffffu, x[i][0].words[w], args.turning);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float sine = place < args.turning ? -sines[j] : sines[j];
        turned[j] = x[i][0][j] * cosines[j] + other[j] * sine;
      }
      x[i][0].round(turned);
    }
    if (head >= args.heads) continue;
    if (turns && !kExchanged) {
      float turned[kParts][kVector];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        constexpr int kStep = kSideBySide ? 2 : 1, kLast = kParts - 1, kNext = kSideBySide ? 1 : 0;
        const float a = x[i][0][kStep * j], b = x[i][kLast][kStep * j + kNext];
        turned[0][kStep * j] = a * cosines[j] - b * sines[j];
        turned[kLast][kStep * j + kNext] = b * cosines[j] + a * sines[j];
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) x[i][p].round(turned[p]);
    }
    char* to = head_of(args.q_out, args.k_out, args.q_heads, token, head);
#pragma unroll
    for (int p = 0; p < kParts; ++p) x[i][p].store(to + offsets[p]);
  }
}

#define TIERCEL_ROTARY(dtype, vector, interleaved, heads)                              \
  {DType::k##dtype,                                                                    \
   interleaved,                                                                        \
   false,                                                                              \
   vector * dtype##Element::kBytes,                                                    \
   heads,                                                                              \
   Kernel("rotary_embedding<" #dtype ", vector=" #vector ", interleaved=" #interleaved \
          ", heads=" #heads ">",                                                       \
          reinterpret_cast<const void*>(                                               \
              rotary_embedding<dtype##Element, vector, interleaved, heads>))}
#define TIERCEL_ROTARY_DTYPE(dtype, vector)                                           \
  TIERCEL_ROTARY(dtype, vector, false, 1), TIERCEL_ROTARY(dtype, vector, false, 2),   \
      TIERCEL_ROTARY(dtype, vector, true, 1), TIERCEL_ROTARY(dtype, vector, true, 2), \
      TIERCEL_ROTARY(dtype, 1, false, 2), TIERCEL_ROTARY(dtype, 1, true, 2)
#define TIERCEL_ROTARY_EXCHANGED(dtype)                                 \
  {DType::k##dtype,                                                     \
   false,                                                               \
   true,                                                                \
   16,                                                                  \
   2,                                                                   \
   Kernel("rotary_embedding<" #dtype ", vector=8, exchanged, heads=2>", \
          reinterpret_cast<const void*>(rotary_embedding<dtype##Element, 8, false, 2, true>))}

// By dtype; vector kernels before element kernels, fewest heads first.
const RotaryKernel kKernels[] = {
    TIERCEL_ROTARY_DTYPE(Float32, 4), TIERCEL_ROTARY_DTYPE(BFloat16, 8),
    TIERCEL_ROTARY_DTYPE(Float16, 8), TIERCEL_ROTARY_EXCHANGED(BFloat16),
    TIERCEL_ROTARY_EXCHANGED(Float16)};

}  // namespace

const RotaryKernel* rotary_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
