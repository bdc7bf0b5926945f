// SPDX-License-Identifier: Apache-2.0
// New latents and rotary keys into a paged cache.
#ifndef KERNELS_MLA_MLA_CACHE_WRITE_H_
#define KERNELS_MLA_MLA_CACHE_WRITE_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MlaCacheCall {
  const TensorView* latent = nullptr;    // [T, 512] bfloat16 or float16, rows contiguous
  const TensorView* rotary = nullptr;    // [T, 64] likewise
  const TensorView* kv_cache = nullptr;  // [blocks, block size, 576] of that dtype or
                                         // float8_e4m3fn, or [blocks, block size, 656] uint8
  const TensorView* slots = nullptr;     // [T] int32 or int64: block * block size + place
  const TensorView* kv_scale = nullptr;  // [1] float32, or null: 1; for float8 only
  // Both or neither: with them, rotary keys are rotated.
  const TensorView* positions = nullptr;  // [T] int32 or int64
  const TensorView* angles = nullptr;     // [P, 64]: cosines, then sines; float32 or latent's dtype
  bool interleaved = false;
};

struct MlaCachePlan {
  const char* kernel;  // "none" for an empty batch
  unsigned grid;
  unsigned block;
};

// Rows of float8 hold element / scale, rounded to nearest even and saturated at +-448 (NaN stays
// NaN). Rows of 656 bytes: 512 float8, the 4 float32 scales of 128 of them each, 64 bfloat16. A
// scale is the largest magnitude / 448, and 2^-126 at least.
//
// Rotation is that of rotary_embedding, in float32; its results are rounded once, to the cache's
// format. A position that is no row of `angles` takes the nearest one. `latent` and `rotary` may be
// the rows of a 16-bit cache that the tokens are written to.
//
// Slots outside of the cache, -1 among them, are skipped; of tokens with the same slot any one may
// stay, or parts of several.

// All checks and the choice of kernel; needs no GPU and no driver.
Status mla_cache_write_plan(const MlaCacheCall& call, MlaCachePlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status mla_cache_write(const MlaCacheCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_CACHE_WRITE_H_
