// SPDX-License-Identifier: Apache-2.0
// Checks shared by the quantising ops.
#ifndef KERNELS_QUANT_QUANT_CHECKS_H_
#define KERNELS_QUANT_QUANT_CHECKS_H_

#include "kernels/sm90/checks.h"

namespace tiercel {

// Unimplemented unless rows are contiguous and aligned for 16-byte loads.
Status check_rows_of_vectors(const Argument& argument);

// Checks for contiguous memory aligned to `bytes`.
Status check_aligned(const Argument& argument, int bytes);

// True if there are no gaps between the rows of [T, K].
bool is_flat(const TensorView& rows);

}  // namespace tiercel

#endif  // KERNELS_QUANT_QUANT_CHECKS_H_
