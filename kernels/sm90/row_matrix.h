// SPDX-License-Identifier: Apache-2.0
// Tensors of any rank as rows of their last dimension.
#ifndef KERNELS_SM90_ROW_MATRIX_H_
#define KERNELS_SM90_ROW_MATRIX_H_

#include <cstdint>

#include "kernels/sm90/checks.h"

namespace tiercel {

struct RowMatrix {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t row_stride = 0;  // elements
};

// Joins the leading dimensions; Unimplemented unless all rows are one stride apart.
Status join_leading(const Argument& argument, RowMatrix* matrix);

// Also Unimplemented unless each row is contiguous.
Status join_rows(const Argument& argument, RowMatrix* matrix);

// The last dimension's size; 1 for a scalar.
int64_t last_size(const TensorView& view);

// Checks for `like`'s shape with `last` as the last dimension; the error quotes `why`.
Status check_shape_like(const Argument& argument, const TensorView& like, int64_t last,
                        const char* why);

}  // namespace tiercel

#endif  // KERNELS_SM90_ROW_MATRIX_H_
