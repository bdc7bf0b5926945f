// SPDX-License-Identifier: Apache-2.0
// Checks that the quantising launchers share.
#ifndef KERNELS_QUANT_QUANT_CHECKS_H_
#define KERNELS_QUANT_QUANT_CHECKS_H_

#include "kernels/sm90/checks.h"

namespace tiercel {

// Rows of neighbouring values that 16-byte loads can take; NotImplementedError otherwise.
Status check_rows_of_vectors(const Argument& argument);

// Contiguous memory at an address that `bytes` divides.
Status check_aligned(const Argument& argument, int bytes);

// Whether the rows of [T, K] follow each other without gaps.
bool is_flat(const TensorView& rows);

}  // namespace tiercel

#endif  // KERNELS_QUANT_QUANT_CHECKS_H_
