// SPDX-License-Identifier: Apache-2.0
// Host code that the ops share which norm and rotate the heads of queries and keys.
#ifndef KERNELS_ROTARY_QK_HEADS_H_
#define KERNELS_ROTARY_QK_HEADS_H_

#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct QkHeads {
  const TensorView* q = nullptr;  // [T, H, D] bfloat16 or float16, last dimension contiguous
  const TensorView* k = nullptr;  // [T, Hk, D], the same
  const TensorView* positions = nullptr;  // [T] int32 or int64; with sections [3, T]
  const TensorView* angles = nullptr;     // [P, R]: cosines, then sines; float32 or q's dtype
  const TensorView* q_weight = nullptr;   // [D] float32 or q's dtype, or null: no norm
  const TensorView* k_weight = nullptr;
  double eps = 1e-6;
  bool interleaved = false;
  bool has_sections = false;  // qk_norm_rope_cache only
};

// A tensor of the shape and dtype of `like`, on its device.
Status check_like(const Argument& argument, const Argument& like, const char* shape_text);

// All but what concerns results.
Status check_qk_heads(const char* op, const QkHeads& heads);

bool in_vectors(const HeadsOfTokens& heads, int bytes);

// Fills all members. Unimplemented if the kernels do not take the sizes or the layout; `aligned`
// says whether other tensors fit.
Status prepare_qk_heads(const char* op, const QkHeads& heads, bool aligned, QkHeadsArgs* args);

// The lanes of a head, a power of two.
int qk_lanes(const QkHeadsArgs& args);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_QK_HEADS_H_
