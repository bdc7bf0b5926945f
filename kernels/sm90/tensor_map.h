// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the copy engine (TMA) is told of a tensor in global memory.
#ifndef KERNELS_SM90_TENSOR_MAP_H_
#define KERNELS_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kTensorMapMaxRank = 5;

// The part of a tensor map that a kernel was compiled for. The rest, shape and strides, is the
// tensor's own.
struct TensorMapSpec {
  int rank;
  uint32_t box[kTensorMapMaxRank];  // of a copy, in elements, in the tensor's order of dimensions
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
};

// Encodes the map of `view` into `map`. `op` and `name` are what messages call the tensor. Checks
// what the copy engine demands: no empty dimension, the last one contiguous, base and strides
// multiples of 16 bytes. Needs a driver.
Status encode_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                         const char* name, CUtensorMap* map);

// The checks alone; needs no driver. What they refuse is valid, but not for the copy engine.
Status check_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                        const char* name);

}  // namespace tiercel

#endif  // KERNELS_SM90_TENSOR_MAP_H_
