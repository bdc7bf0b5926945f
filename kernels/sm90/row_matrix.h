// SPDX-License-Identifier: Apache-2.0
// Tensors of any number of dimensions as the rows of their last one.
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

// The leading dimensions joined. Unimplemented where rows are at several distances or the elements
// of a row are not neighbours.
Status join_rows(const Argument& argument, RowMatrix* matrix);

// The last dimension's size; 1 of a scalar.
int64_t last_size(const TensorView& view);

// `like`'s shape, but with `last` in the last dimension; `why` says where it comes from.
Status check_shape_like(const Argument& argument, const TensorView& like, int64_t last,
                        const char* why);

}  // namespace tiercel

#endif  // KERNELS_SM90_ROW_MATRIX_H_
