// SPDX-License-Identifier: Apache-2.0
// Argument checks that the host code of expert MLPs shares.
#ifndef KERNELS_MOE_MOE_CHECKS_H_
#define KERNELS_MOE_MOE_CHECKS_H_

#include "kernels/sm90/checks.h"

namespace tiercel {

inline constexpr int64_t kScaleBlock = 128;  // values

// Rows are contiguous and begin at multiples of 16 bytes, as the copies need them.
Status check_rows(const Argument& argument);

// The dtype, device and layout of scales of `x` or of the weights.
Status check_scale(const Argument& scale, const Argument& x);

// The shape of float8 weights' scales: [E, rows], [E, 1] or, per 128x128 values,
// [E, rows / 128, columns / 128].
Status check_weights_scale(const Argument& scale, const TensorView& w);

// `argument` is in CUDA memory of the device of `x`.
Status check_beside(const Argument& argument, const Argument& x);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_CHECKS_H_
