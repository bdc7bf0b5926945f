// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what cuTensorMapEncodeTiled checks and what we keep in the 128 bytes of a
// CUtensorMap. The order of the fields is our own (NVIDIA leaves it open).
#ifndef TOOLS_EMULATOR_TENSOR_TENSOR_MAP_H_
#define TOOLS_EMULATOR_TENSOR_TENSOR_MAP_H_

#include <cstdint>
#include <string>

namespace tiercel::emulator {

constexpr int kLargestRank = 5;

// Numbers as in cuda.h.
enum class Swizzle : uint8_t { none, b32, b64, b128 };

struct TensorMap {
  uint8_t type;  // CUtensorMapDataType
  uint8_t rank;
  Swizzle swizzle;
  bool nan_fill;
  uint64_t base;
  uint64_t sizes[kLargestRank];    // innermost first, as in all arrays
  uint64_t strides[kLargestRank];  // bytes; strides[0] is an element
  uint32_t box[kLargestRank];      // elements in global memory
  uint32_t steps[kLargestRank];    // element strides

  uint32_t element_bytes() const;
  // Elements of the box that are copied, along a dimension and in bytes of all.
  uint32_t box_size(int dimension) const;
  uint32_t box_bytes() const;
};

uint32_t tensor_map_type_bytes(uint32_t type);  // 0 for an unknown one
bool tensor_map_type_is_float(uint32_t type);

struct TensorMapArguments {
  uint32_t type, rank;
  uint64_t base;
  const uint64_t* sizes;
  const uint64_t* strides;  // rank - 1
  const uint32_t* box;
  const uint32_t* steps;
  uint32_t interleave, swizzle, l2_promotion, oob_fill;
};

// Writes the map to 128 bytes. Returns what is wrong with an argument, or an empty text.
std::string encode_tensor_map(const TensorMapArguments& arguments, void* map);

// Throws if the 128 bytes are no tensor map.
TensorMap decode_tensor_map(const void* map);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_TENSOR_MAP_H_
