// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by all families, so that errors read alike: "<op>: `<argument>` must
// <expected>, got <value>".
#ifndef KERNELS_SM90_CHECKS_H_
#define KERNELS_SM90_CHECKS_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A tensor argument and its name in messages.
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

// Checks for the exact shape; `why` is its symbolic form in the message, such as "[T, k]".
Status check_shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* why);

// Row-major without gaps. Dimensions of size 1 may have any stride.
Status check_contiguous(const Argument& argument);

// Checks for a CUDA tensor whose data pointer is not null unless it is empty.
Status check_cuda(const Argument& argument);

Status check_same_device(const Argument& argument, const Argument& reference);

// Bytes of the widest load (16, 8, 4, ..., at least one element) that the alignment of base, row
// length and row stride (in elements) allows. Rows are contiguous.
int widest_vector_bytes(const void* base, int64_t rows, int64_t row_stride, int64_t row_length,
                        DType dtype);

}  // namespace tiercel

#endif  // KERNELS_SM90_CHECKS_H_
