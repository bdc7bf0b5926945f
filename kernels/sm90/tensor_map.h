// SPDX-License-Identifier: Apache-2.0
// Tensor maps: the descriptors by which TMA reads tensors in global memory.
#ifndef KERNELS_SM90_TENSOR_MAP_H_
#define KERNELS_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kTensorMapMaxRank = 5;

// The part of a tensor map that is fixed when a kernel is compiled. Shape and strides come from the
// tensor.
struct TensorMapSpec {
  int rank;
  uint32_t box[kTensorMapMaxRank];  // elements per copy, in the tensor's order of dimensions
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
};

// Encodes the map of `view` into `map`. Messages name the tensor by `op` and `name`. Checks TMA's
// requirements: no empty dimension, a contiguous last one, base and strides multiples of 16 bytes.
// Needs a driver.
Status encode_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                         const char* name, CUtensorMap* map);

// Only the checks; needs no driver. The tensors that it refuses are valid, but not for TMA.
Status check_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                        const char* name);

}  // namespace tiercel

#endif  // KERNELS_SM90_TENSOR_MAP_H_
