// SPDX-License-Identifier: Apache-2.0
// Penalties and a mask of allowed tokens.
#ifndef KERNELS_SAMPLING_CHANGES_CUH_
#define KERNELS_SAMPLING_CHANGES_CUH_

#include <cstdint>

#include "kernels/sampling/row.cuh"

namespace tiercel {

// Penalties and mask of a row's tokens.
struct Changes {
  const int* counts;
  const uint32_t* prompt;
  const uint32_t* allowed;
  float repetition, inverse, presence, frequency;

  template <bool kPenalties>
  __device__ __forceinline__ void load(const SampleArgs& args, int64_t row) {
    allowed = args.allowed == nullptr ? nullptr : args.allowed + row * args.words;
    if constexpr (kPenalties) {
      counts = args.counts == nullptr ? nullptr : args.counts + row * args.columns;
      prompt = args.prompt == nullptr ? nullptr : args.prompt + row * args.words;
      repetition = parameter(args.repetition, row);
      inverse = __frcp_rn(repetition);
      presence = parameter(args.presence, row);
      frequency = parameter(args.frequency, row);
    }
  }
  // The columns from `column` on, which all have their bit in one word.
  template <bool kPenalties, int kCount>
  __device__ __forceinline__ void apply(int column, int columns, float (&values)[kCount]) const {
    if (column >= columns) return;
    if constexpr (kPenalties) {
      const uint32_t in_prompt = prompt == nullptr ? 0 : prompt[column / 32] >> column % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int count = counts == nullptr || column + i >= columns ? 0 : counts[column + i];
        float x = values[i];
        if (count > 0 || (in_prompt >> i & 1 && column + i < columns))
          x = __fmul_rn(x, x > 0.0f ? inverse : repetition);
        if (count > 0) {
          x = __fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count)));
          x = __fsub_rn(x, presence);
        }
        values[i] = x;
      }
    }
    if (allowed != nullptr) {
      const uint32_t bits = allowed[column / 32] >> column % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(bits >> i & 1)) values[i] = -kInfinity;
      }
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_CHANGES_CUH_
