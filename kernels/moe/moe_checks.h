// SPDX-License-Identifier: Apache-2.0
// Argument checks that the launchers of experts' MLPs share.
#ifndef KERNELS_MOE_MOE_CHECKS_H_
#define KERNELS_MOE_MOE_CHECKS_H_

#include "kernels/sm90/checks.h"

namespace tiercel {

inline constexpr int64_t kScaleBlock = 128;  // values

// Rows of neighbouring elements at multiples of 16 bytes, as the copies take them.
Status check_rows(const Argument& argument);

// The dtype and place of scales of `x`, or of weights that are where `x` is.
Status check_scale(const Argument& scale, const Argument& x);

// The shape of float8 weights' scales: [E, rows], [E, 1] or, of blocks of 128x128 values,
// [E, rows / 128, columns / 128].
Status check_weights_scale(const Argument& scale, const TensorView& w);

// Of an argument that has to lie where `x` does, in CUDA memory.
Status check_beside(const Argument& argument, const Argument& x);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_CHECKS_H_
