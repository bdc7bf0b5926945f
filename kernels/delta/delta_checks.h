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
  const char* out_name = "out";
};

// Checks that the argument is on the device of `like`.
Status delta_check_place(const Argument& argument, const Argument& like);

// Checks shapes, dtypes and layouts of these tensors and fills `sizes` and q, k, v and out of the
// kernel's arguments.
Status delta_lay_out(const char* op, const DeltaTensors& tensors,
                     std::initializer_list<DType> dtypes, DeltaSizes* sizes, DeltaHeads* q,
                     DeltaHeads* k, DeltaHeads* v, DeltaHeads* out);

// For prompts. Checks the gates, [B, T, Hv] or [B, T, Hv, K]; states [N, Hv, K, V], or null; and
// `cu_seqlens`, or null, which with the sizes make the sequences of the kernels' arguments.
Status delta_check_gates(const char* op, const TensorView& g, const DeltaSizes& sizes,
                         const Argument& q);
Status delta_check_state(const char* op, const char* name, const TensorView* view, int64_t count,
                         const DeltaSizes& sizes, const Argument& q);
Status delta_lay_out_sequences(const char* op, const TensorView* cu_seqlens,
                               const DeltaSizes& sizes, const Argument& q, DeltaRuleArgs* args);

// Checks that a workspace has `size` elements of float32.
Status delta_check_workspace(const char* op, const TensorView& view, int64_t size,
                             const Argument& q);

// The kernel of a part of a prompt's call, or null.
const Kernel* delta_find_kernel(DeltaPart part, int64_t key_size, DType dtype, bool channels);

// The rows of blocks of the first kernel with a gate per head, each `places` blocks: heads of keys
// times blocks of their heads of values, several if all then run at once.
int64_t delta_chunk_rows(const DeltaSizes& sizes, int64_t places);

// The factor of the queries: a given number, or NaN for the usual one.
float delta_scale(float given, int64_t key_size);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_CHECKS_H_
