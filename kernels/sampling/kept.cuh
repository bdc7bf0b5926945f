// SPDX-License-Identifier: Apache-2.0
// Probabilities of tokens, from what sample_positions keeps of a row.
#ifndef KERNELS_SAMPLING_KEPT_CUH_
#define KERNELS_SAMPLING_KEPT_CUH_

#include <cstdint>

#include "kernels/sampling/row.cuh"
#include "kernels/sampling/sample_kernels.h"

namespace tiercel {

// The probability of a logit.
__device__ __forceinline__ float probability(const Kept& kept, float inverse, float x) {
  const float d = x == kept.largest ? 0.0f : kept.largest - x;
  uint32_t fixed = __float_as_uint(d + kept.origin) - __float_as_uint(kept.origin);
  fixed = kept.origin == 0.0f ? 0 : min(fixed, (1u << kFixedBits) - 1);
  const bool within = d <= kept.limit && fixed <= kept.fixed && __float_as_uint(d) <= kept.bits;
  return within ? exp2_approx(-d * kept.scale) * inverse : 0.0f;
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_KEPT_CUH_
