// SPDX-License-Identifier: Apache-2.0
// The states that segments of a sequence begin with, and the gradients of these states.
#ifndef KERNELS_DELTA_SCAN_CUH_
#define KERNELS_DELTA_SCAN_CUH_

#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Two of them, of a block's columns.
using DeltaScanStates = float4[2][kDeltaScanSize][2];

// A segment makes M S + B of a state S, so that it makes M^T G + C of the gradient G of the state
// after it. Goes through the segments in order, or with kBack from the last to the first. A block
// has some columns of a head's state; a thread half of them in a row. `from`, or zeros, is what the
// first segment begins with, or the gradient of what the last one leaves. With kBack, `grads` holds
// C of each segment, which the gradient of the state before it replaces.
template <bool kBack>
__device__ __forceinline__ void scan_segments(const DeltaRuleArgs& args, int block,
                                              DeltaScanStates& states, const float* from,
                                              float* grads) {
  constexpr int kRows = kDeltaScanSize, kColumns = kDeltaScanColumns / 2;
  static_assert(kDeltaScanThreads == 2 * kRows && kColumns == 4);
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  const int parts = args.value_size / kDeltaScanColumns;
  const int part = block % parts;
  const int head = block / parts % args.v_heads;
  const int index = block / parts / args.v_heads;
  const int column = part * kDeltaScanColumns + half * kColumns;
  const DeltaSequence sequence = delta_sequence(args, index);
  const int64_t chunks = delta_chunk_count(sequence);
  const int64_t slot = delta_slot(args, sequence.begin, index);
  const int64_t size = int64_t{kRows} * args.value_size;
  const int64_t pitch = args.value_size + kRows;
  float4 state = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int64_t at = int64_t{row} * args.value_size + column;
  if (from != nullptr) {
    from += (int64_t{index} * args.v_heads + head) * size + at;
    state = make_float4(from[0], from[1], from[2], from[3]);
  }
  const int64_t last = kBack ? (chunks - 1) / args.segment_chunks : 0;
#pragma unroll 1
  for (int64_t number = 0; (number + 1) * args.segment_chunks < chunks; ++number) {
    float4(&before)[kRows][2] = states[number % 2];
    before[row][half] = state;
    const int64_t owner = (slot + (kBack ? last - number : number)) * args.v_heads + head;
    const float* const transition = args.transitions + owner * kRows * pitch;
    const float* const factors = transition + args.value_size + (kBack ? row : row * pitch);
    const float* const added =
        kBack ? grads + owner * size + at : transition + row * pitch + column;
    __syncthreads();
    state = make_float4(added[0], added[1], added[2], added[3]);
#pragma unroll 8
    for (int i = 0; i < kRows; i += 4) {
      uint32_t words[4];
      if constexpr (kBack) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(factors[(i + j) * pitch]);
      } else {
        load_vector(words, factors + i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = __uint_as_float(words[j]);
        const float4 other = before[i + j][half];
        state.x = fmaf(factor, other.x, state.x), state.y = fmaf(factor, other.y, state.y);
        state.z = fmaf(factor, other.z, state.z), state.w = fmaf(factor, other.w, state.w);
      }
    }
    float* const to =
        kBack ? grads + owner * size + at
              : args.segment_states + ((slot + number + 1) * args.v_heads + head) * size + at;
    *reinterpret_cast<float4*>(to) = state;
  }
}

}  // namespace tiercel

#endif  // KERNELS_DELTA_SCAN_CUH_
