// SPDX-License-Identifier: Apache-2.0
// Checks shared by the linear layers' launchers.
#ifndef KERNELS_LINEAR_LINEAR_CHECKS_H_
#define KERNELS_LINEAR_LINEAR_CHECKS_H_

#include <initializer_list>

#include "kernels/sm90/checks.h"

namespace tiercel {

inline constexpr int64_t kScaleBlock = 128;  // values of K, and rows of the weights, of one scale

// Unimplemented unless `size`, which is the argument's dimension `letter`, is a positive multiple
// of what TMA moves at a time of `dtype`.
Status check_multiple(const Argument& argument, int64_t size, const char* letter, DType dtype);

Status check_matrix(const Argument& argument, int64_t rows, int64_t columns, const char* why,
                    const Argument& first, DType dtype);

// Checks the tensor maps' rules before the driver is needed, with any kernel's maps.
Status check_maps(std::initializer_list<Argument> arguments);

// Checks for scales of blocks of 128 values in one or both dimensions, with any strides.
Status check_block_scale(const Argument& argument, int64_t rows, int64_t columns, const char* why,
                         const Argument& x);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_CHECKS_H_
