// SPDX-License-Identifier: Apache-2.0
// Argument checks that launchers share, so that every op says the same thing in the same words:
// "<op>: `<argument>` must <expected>, got <what came>".
#ifndef KERNELS_SM90_CHECKS_H_
#define KERNELS_SM90_CHECKS_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A tensor argument and what messages call it.
struct Argument {
  const char* op;
  const char* name;
  const TensorView& view;
};

// "topk_softmax: `scores` must <expected>, got <got>".
std::string mismatch(const Argument& argument, const std::string& expected, const std::string& got);

// "[8, 64]".
std::string shape_text(const int64_t* shape, int ndim);

Status check_dtype(const Argument& argument, std::initializer_list<DType> allowed);
Status check_rank(const Argument& argument, int rank);

// The exact shape; `why` says where it comes from, as in "[T, k]".
Status check_shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* why);

// Row-major without gaps. Dimensions of size 1 may have any stride.
Status check_contiguous(const Argument& argument);

// A CUDA tensor with memory behind it, unless it is empty.
Status check_cuda(const Argument& argument);

Status check_same_device(const Argument& argument, const Argument& reference);

// The widest load, 16, 8, 4, ... bytes but at least one element, that fits base, row length and row
// stride (in elements) of rows whose inner stride is 1.
int widest_vector_bytes(const void* base, int64_t rows, int64_t row_stride, int64_t row_length,
                        DType dtype);

}  // namespace tiercel

#endif  // KERNELS_SM90_CHECKS_H_
