// SPDX-License-Identifier: Apache-2.0
// Groups of neighbouring rows, each times a matrix of its own, and the gradients.
#ifndef KERNELS_MOE_GROUPED_GEMM_H_
#define KERNELS_MOE_GROUPED_GEMM_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// With offsets [E + 1], int32 or int64, not decreasing, and e a group of the rows
// offsets[e] <= row < offsets[e + 1] (an offset outside 0 to M counts as the nearest of these; a
// row in several groups gets the product of any one of them):
enum class GroupedKind {
  kPlain,       // a x [M, K], b w [E, N, K]:     out[rows] = x[rows] @ w[e]^T, [M, N]
  kGradX,       // a grad [M, N], b w [E, N, K]:  out[rows] = grad[rows] @ w[e], [M, K]
  kGradWeight,  // a grad [M, N], b x [M, K]:     out[e] = grad[rows]^T @ x[rows], [E, N, K]
};

// The launch that a call would make.
struct GroupedGemmPlan {
  const char* kernel;  // "none" where nothing is to be done
  int tile_m;
  int tile_n;
  int tiles;  // an upper bound: only the device knows the sizes of groups
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// a, b and out are all bfloat16 or all float16. Rows of a and b are contiguous and begin at
// multiples of 16 bytes; out and offsets are contiguous. N and K are multiples of 8, and there are
// up to 512 groups. Sums are float32; rows of out that are in no group become zeros.
//
// With scales, of kPlain only, a and b are float8_e4m3fn, out is bfloat16 and K is a multiple of
// 16. x_scale [M, ceil(K / 128)] has any strides, w_scale [E, ceil(N / 128), ceil(K / 128)] is
// contiguous. Then a may be [E, C, K], x_scale [E, C, ...] and out [E, C, N]: `offsets` are counts
// [E] then, and the rows from counts[e] on are neither multiplied nor written (a count outside 0 to
// C counts as the nearest of these).
struct GroupedGemmCall {
  GroupedKind kind = GroupedKind::kPlain;
  const TensorView* a = nullptr;
  const TensorView* b = nullptr;
  const TensorView* offsets = nullptr;
  const TensorView* out = nullptr;
  const TensorView* x_scale = nullptr;
  const TensorView* w_scale = nullptr;
  // Rows of a group by which float8 tiles are chosen; 0: the mean, or C.
  int64_t expected_rows = 0;
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status grouped_gemm_plan(const GroupedGemmCall& call, int multiprocessors, GroupedGemmPlan* plan);

// Plans for the tensors' device and launches on `stream` (a CUstream).
Status grouped_gemm(const GroupedGemmCall& call, void* stream);

Status grouped_gemm_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_GROUPED_GEMM_H_
