// SPDX-License-Identifier: Apache-2.0
// The interface of mla_cache_write's host and device code: the kernel's arguments and its table.
#ifndef KERNELS_MLA_MLA_CACHE_KERNELS_H_
#define KERNELS_MLA_MLA_CACHE_KERNELS_H_

#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kMlaCacheWarps = 4;

struct MlaCacheArgs {
  const char* latent;
  const char* rotary;
  char* cache;
  int64_t latent_stride;  // bytes
  int64_t rotary_stride;
  int64_t block_stride;
  int64_t place_stride;
  const void* slots;
  const float* scale;  // null means 1
  const void* positions;
  const char* angles;  // rows of cosines, then sines
  int64_t slot_count;  // of the cache; other slots are skipped
  int64_t tokens;
  uint32_t last_position;  // of `angles`; positions beyond it and below 0 use the nearest row
  int block_size;
  bool wide_slots;      // int64
  bool wide_positions;  // int64
  bool wide_angles;     // float32
  bool interleaved;
};

struct MlaCacheKernel {
  DType dtype;
  MlaLayout layout;
  bool rotates;
  Kernel kernel;
};

const MlaCacheKernel* mla_cache_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_CACHE_KERNELS_H_
