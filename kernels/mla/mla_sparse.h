// SPDX-License-Identifier: Apache-2.0
// Attention of absorbed queries, each over rows of a cache of latents that it names.
#ifndef KERNELS_MLA_MLA_SPARSE_H_
#define KERNELS_MLA_MLA_SPARSE_H_

#include <cstdint>

#include "kernels/mla/mla_decode.h"
#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MlaSparseCall {
  const TensorView* q = nullptr;         // [T, H, 576] bfloat16
  const TensorView* kv_cache = nullptr;  // [pages, page size, 576] of q's dtype or
                                         // float8_e4m3fn, or [.., .., 656] uint8: mla_cache_write.h
  const TensorView* indices = nullptr;   // [T, k] int32: page * page size + place
  const TensorView* kv_scale = nullptr;  // [1] float32, or null: 1; for float8 only
  const TensorView* out = nullptr;       // [T, H, 512] of q's dtype
  const TensorView* lse = nullptr;       // [T, H] float32, or null
  const TensorView* workspace = nullptr;  // float32, or null where MlaDecodePlan::workspace is 0
  double scale = 1.0;
  int64_t d_v = 512;
};

// All checks and the choice of launches for a device with that many multiprocessors; needs no GPU
// and no driver. Ignores the workspace.
Status mla_sparse_attention_plan(const MlaSparseCall& call, int multiprocessors,
                                 MlaDecodePlan* plan);

// A call that was checked.
class MlaSparseLaunch {
 public:
  // For the tensors' device; launches nothing.
  Status prepare(const MlaSparseCall& call);

  // Floats that `run` needs, of any value. Another launch may use the same ones after this one in
  // the stream.
  int64_t workspace() const { return plan_.workspace; }

  // On `stream`, a CUstream; `workspace` starts at a multiple of 16 bytes.
  Status run(float* workspace, void* stream);

 private:
  MlaDecodeArgs args_{};
  MlaDecodePlan plan_{};
  const Kernel* kernel_ = nullptr;
  DType dtype_ = DType::kBFloat16;
  int device_ = 0;
};

// Checks and launches with the call's workspace. If that is needed and null, launches nothing and
// sets `*needed` to the number of floats.
Status mla_sparse_attention(const MlaSparseCall& call, void* stream, int64_t* needed);

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_SPARSE_H_
