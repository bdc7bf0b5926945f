// SPDX-License-Identifier: Apache-2.0
// The states that segments of a sequence begin with, and the gradients of these states.
#ifndef KERNELS_DELTA_SCAN_CUH_
#define KERNELS_DELTA_SCAN_CUH_

#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

// Two steps' worth of a block's columns of the states, and of a segment's M.
struct DeltaScanMemory {
  float4 states[2][kDeltaScanSize][2];
  float factors[2][kDeltaScanSize][kDeltaScanPitch];
};
static_assert(sizeof(DeltaScanMemory) == kDeltaScanSmem);

// A segment makes M S + B of a state S, so that it makes M^T G + C of the gradient G of the state
// after it. Goes through the segments in order, or with kBack from the last to the first. A block
// has some columns of a head's state; a thread half of them in a row. `from`, or zeros, is what the
// first segment begins with, or the gradient of what the last one leaves. With kBack, `grads` holds
// C of each segment, which the gradient of the state before it replaces. The next segment's M is
// copied ahead, because it is as many bytes as a block can load while it multiplies. A segment that
// leaves nothing of a state has none.
template <bool kBack>
__device__ __forceinline__ void scan_segments(const DeltaRuleArgs& args, int block,
                                              DeltaScanMemory& memory, const float* from,
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
  const auto owner = [&](int64_t number) {
    return (slot + (kBack ? last - number : number)) * args.v_heads + head;
  };
  const auto copy = [&](int64_t number) {
    const float* const factors = args.transitions + owner(number) * kRows * pitch + args.value_size;
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kRows / 4; i += kDeltaScanThreads) {
      const int at = i / (kRows / 4), vector = i % (kRows / 4) * 4;
      async_copy_16(shared_address(&memory.factors[number % 2][at][vector]),
                    factors + at * pitch + vector, true);
    }
  };
  const auto is_lost = [&](int64_t number) {
    return !kBack && args.lost != nullptr && args.lost[owner(number)] != 0;
  };
  const auto load_added = [&](int64_t number) {
    const float* const added =
        kBack ? grads + owner(number) * size + at
              : args.transitions + owner(number) * kRows * pitch + row * pitch + column;
    return make_float4(added[0], added[1], added[2], added[3]);
  };
  const int64_t steps = chunks == 0 ? 0 : (chunks - 1) / args.segment_chunks;
  if (steps == 0) return;
  bool lost = is_lost(0), next_lost = steps > 1 && is_lost(1);
  if (!lost) copy(0);
  async_copy_commit();
  float4 added = load_added(0);
#pragma unroll 1
  for (int64_t number = 0; number < steps; ++number) {
    float4 next = added;
    if (number + 1 < steps) {
      if (!next_lost) copy(number + 1);
      next = load_added(number + 1);
    }
    async_copy_commit();
    const bool later_lost = number + 2 < steps && is_lost(number + 2);
    float4(&before)[kRows][2] = memory.states[number % 2];
    float (&factors)[kRows][kDeltaScanPitch] = memory.factors[number % 2];
    before[row][half] = state;
    async_copy_wait<1>();
    __syncthreads();
    state = added;
#pragma unroll 8
    for (int i = 0; i < (lost ? 0 : kRows); i += 4) {
      float of_row[4];
      if constexpr (kBack) {
#pragma unroll
        for (int j = 0; j < 4; ++j) of_row[j] = factors[i + j][row];
      } else {
        const float4 four = *reinterpret_cast<const float4*>(&factors[row][i]);
        of_row[0] = four.x, of_row[1] = four.y, of_row[2] = four.z, of_row[3] = four.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = of_row[j];
        const float4 other = before[i + j][half];
        state.x = fmaf(factor, other.x, state.x), state.y = fmaf(factor, other.y, state.y);
        state.z = fmaf(factor, other.z, state.z), state.w = fmaf(factor, other.w, state.w);
      }
    }
    float* const to =
        kBack ? grads + owner(number) * size + at
              : args.segment_states + ((slot + number + 1) * args.v_heads + head) * size + at;
    *reinterpret_cast<float4*>(to) = state;
    added = next;
    lost = next_lost, next_lost = later_lost;
    __syncthreads();  // before these factors are overwritten
  }
}

}  // namespace tiercel

#endif  // KERNELS_DELTA_SCAN_CUH_
