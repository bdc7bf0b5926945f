// SPDX-License-Identifier: Apache-2.0
// Attention of absorbed queries over a paged cache of latents.
#ifndef KERNELS_MLA_MLA_DECODE_H_
#define KERNELS_MLA_MLA_DECODE_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MlaDecodeCall {
  const TensorView* q = nullptr;         // [B, Sq, H, 576] bfloat16 or float16
  const TensorView* kv_cache = nullptr;  // [pages, page size, 576] of q's dtype or
                                         // float8_e4m3fn, or [.., .., 656] uint8: mla_cache_write.h
  const TensorView* page_table = nullptr;  // [B, pages of a sequence] int32
  const TensorView* seqused_k = nullptr;   // [B] int32: keys of each sequence
  const TensorView* kv_scale = nullptr;    // [1] float32, or null: 1; for float8 only
  const TensorView* out = nullptr;         // [B, Sq, H, 512] of q's dtype
  const TensorView* lse = nullptr;         // [B, H, Sq] float32, or null
  const TensorView* workspace = nullptr;   // float32, or null where MlaDecodePlan::workspace is 0
  double scale = 1.0;
  int64_t d_v = 512;
};

// The launches of a call.
struct MlaDecodePlan {
  const char* kernel;   // "none" for an empty output
  const char* combine;  // a second kernel, or "none"
  int rows;             // of a block: queries times heads
  int step;             // keys
  int copy_rows;        // keys of a copy
  int lanes;            // equal shares of all steps
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int64_t workspace;  // floats, of any initial value
};

// All checks and the choice of launches for a device with that many multiprocessors; needs no GPU
// and no driver. Ignores the workspace.
Status mla_decode_plan(const MlaDecodeCall& call, int multiprocessors, MlaDecodePlan* plan);

// A call that was checked.
class MlaDecodeLaunch {
 public:
  // For the tensors' device; launches nothing.
  Status prepare(const MlaDecodeCall& call);

  // Floats that `run` needs, of any value. Another launch may use the same ones after this one in
  // the stream.
  int64_t workspace() const { return plan_.workspace; }

  // On `stream`, a CUstream; `workspace` starts at a multiple of 16 bytes.
  Status run(float* workspace, void* stream);

 private:
  MlaDecodeArgs args_{};
  MlaDecodePlan plan_{};
  CUtensorMap map_{};
  CUtensorMap halves_{};
  const Kernel* kernel_ = nullptr;
  DType dtype_ = DType::kBFloat16;
  int device_ = 0;
};

// Checks and launches with the call's workspace. If that is needed and null, launches nothing and
// sets `*needed` to the number of floats.
Status mla_decode(const MlaDecodeCall& call, void* stream, int64_t* needed);

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_DECODE_H_
