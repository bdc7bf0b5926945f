// SPDX-License-Identifier: Apache-2.0
// Checks that a step and a prompt of the gated delta rule share.
#ifndef KERNELS_DELTA_DELTA_CHECKS_H_
#define KERNELS_DELTA_DELTA_CHECKS_H_

#include <initializer_list>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/checks.h"

namespace tiercel {

struct DeltaSizes {
  int64_t batch;
  int64_t tokens;
  int64_t k_heads;
  int64_t v_heads;
  int64_t key_size;
  int64_t value_size;
};

struct DeltaTensors {
  const TensorView* q;
  const TensorView* k;
  const TensorView* v;
  const TensorView* beta;
  const TensorView* out;
};

// Checks that the argument is on the device of `like`.
Status delta_check_place(const Argument& argument, const Argument& like);

// Checks shapes, dtypes and layouts of these tensors and fills `sizes` and q, k, v and out of the
// kernel's arguments.
Status delta_lay_out(const char* op, const DeltaTensors& tensors,
                     std::initializer_list<DType> dtypes, DeltaSizes* sizes, DeltaHeads* q,
                     DeltaHeads* k, DeltaHeads* v, DeltaHeads* out);

// The factor of the queries: a given number, or NaN for the usual one.
float delta_scale(float given, int64_t key_size);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_CHECKS_H_
