// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/tensor_map.h"

#include <cstring>
#include <sstream>

#include "tools/emulator/tensor/fault.h"

namespace tiercel::emulator {
namespace {

constexpr uint64_t kMagic = 0x70614d6c65637254;  // "TrcelMap"
constexpr uint64_t kLargestStride = uint64_t{1} << 40;
constexpr uint64_t kLargestSize = uint64_t{1} << 32;
constexpr uint32_t kLargestBox = 256, kLargestStep = 8;

struct Stored {
  uint64_t magic;
  uint64_t base;
  uint64_t strides[kLargestRank - 1];
  uint32_t last[kLargestRank];  // sizes minus one
  uint16_t box[kLargestRank];
  uint8_t steps[kLargestRank];
  uint8_t type, rank, swizzle, nan_fill;
  uint8_t unused[128 - 87 - 8];
  uint32_t check;
};
static_assert(sizeof(Stored) == 128, "a CUtensorMap has 128 bytes");

uint32_t checksum(const Stored& stored) {
  uint32_t sum = 2166136261u;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&stored);
  for (size_t i = 0; i < offsetof(Stored, check); ++i) sum = (sum ^ bytes[i]) * 16777619u;
  return sum;
}

struct DataType {
  uint8_t bytes;
  bool is_float;
};
// In the order of CUtensorMapDataType, without the packed 4- and 6-bit types of later machines.
constexpr DataType kTypes[] = {{1, false}, {2, false}, {4, false}, {4, false}, {8, false},
                               {8, false}, {2, true},  {4, true},  {8, true},  {2, true},
                               {4, true},  {4, true},  {4, true}};

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string check_dimensions(const TensorMapArguments& a, uint32_t element) {
  const uint64_t alignment = a.interleave == 2 ? 32 : 16;
  for (uint32_t i = 0; i < a.rank; ++i) {
    if (a.sizes[i] < 1 || a.sizes[i] > kLargestSize)
      return text("globalDim[", i, "] is ", a.sizes[i], ", expected 1 to 2^32");
    if (a.box[i] < 1 || a.box[i] > kLargestBox)
      return text("boxDim[", i, "] is ", a.box[i], ", expected 1 to ", kLargestBox);
    if (a.steps[i] < 1 || a.steps[i] > kLargestStep)
      return text("elementStrides[", i, "] is ", a.steps[i], ", expected 1 to ", kLargestStep);
    if (i > 0 && (a.strides[i - 1] % alignment != 0 || a.strides[i - 1] >= kLargestStride))
      return text("globalStrides[", i - 1, "] is ", a.strides[i - 1], ", expected a multiple of ",
                  alignment, " below 2^40");
  }
  if (a.interleave != 0) return "";
  const uint32_t inner = a.box[0] * element;
  if (inner % 16 != 0) return text("boxDim[0] has ", inner, " bytes, expected a multiple of 16");
  const uint32_t row = 16u << a.swizzle;
  if (a.swizzle != 0 && inner > row)
    return text("boxDim[0] has ", inner, " bytes, expected at most the swizzle's ", row);
  return "";
}

}  // namespace

uint32_t tensor_map_type_bytes(uint32_t type) {
  return type < sizeof kTypes / sizeof *kTypes ? kTypes[type].bytes : 0;
}

bool tensor_map_type_is_float(uint32_t type) {
  return type < sizeof kTypes / sizeof *kTypes && kTypes[type].is_float;
}

uint32_t TensorMap::element_bytes() const { return tensor_map_type_bytes(type); }

uint32_t TensorMap::box_size(int dimension) const {
  return (box[dimension] + steps[dimension] - 1) / steps[dimension];
}

uint32_t TensorMap::box_bytes() const {
  uint32_t bytes = element_bytes();
  for (int i = 0; i < rank; ++i) bytes *= box_size(i);
  return bytes;
}

std::string encode_tensor_map(const TensorMapArguments& a, void* map) {
  if (!map || reinterpret_cast<uintptr_t>(map) % 64 != 0)
    return "tensorMap is no address that is a multiple of 64";
  const uint32_t element = tensor_map_type_bytes(a.type);
  if (!element) return text("tensorDataType is ", a.type, ", which this machine lacks");
  if (a.rank < 1 || a.rank > kLargestRank)
    return text("tensorRank is ", a.rank, ", expected 1 to 5");
  if (a.interleave > 2) return text("interleave is ", a.interleave, ", expected 0 to 2");
  if (a.interleave != 0 && a.rank < 3)
    return text("tensorRank is ", a.rank, ", expected 3 or more with an interleaved layout");
  if (a.swizzle > 3) return text("swizzle is ", a.swizzle, ", expected 0 to 3");
  if (a.interleave == 2 && a.swizzle != 1) return "interleave is 32B, expected with swizzle 32B";
  if (a.l2_promotion > 3) return text("l2Promotion is ", a.l2_promotion, ", expected 0 to 3");
  if (a.oob_fill > 1) return text("oobFill is ", a.oob_fill, ", expected 0 or 1");
  if (a.oob_fill == 1 && !tensor_map_type_is_float(a.type))
    return "oobFill is NaN, expected with a floating-point type only";
  if (!a.sizes || !a.box || !a.steps || (a.rank > 1 && !a.strides))
    return "globalDim, globalStrides, boxDim or elementStrides is null";
  const uint64_t alignment = a.interleave == 2 ? 32 : 16;
  if (!a.base || a.base % alignment != 0)
    return text("globalAddress is ", a.base, ", expected a multiple of ", alignment);
  const std::string wrong = check_dimensions(a, element);
  if (!wrong.empty()) return wrong;
  if (a.interleave != 0) return "interleave: the emulator has no interleaved layouts";

  Stored stored{};
  stored.magic = kMagic;
  stored.base = a.base;
  stored.type = static_cast<uint8_t>(a.type);
  stored.rank = static_cast<uint8_t>(a.rank);
  stored.swizzle = static_cast<uint8_t>(a.swizzle);
  stored.nan_fill = static_cast<uint8_t>(a.oob_fill);
  for (uint32_t i = 0; i < a.rank; ++i) {
    stored.last[i] = static_cast<uint32_t>(a.sizes[i] - 1);
    stored.box[i] = static_cast<uint16_t>(a.box[i]);
    // The innermost one is ignored without interleaving.
    stored.steps[i] = i == 0 ? 1 : static_cast<uint8_t>(a.steps[i]);
    if (i > 0) stored.strides[i - 1] = a.strides[i - 1];
  }
  stored.check = checksum(stored);
  std::memcpy(map, &stored, sizeof stored);
  return "";
}

TensorMap decode_tensor_map(const void* map) {
  Stored stored;
  std::memcpy(&stored, map, sizeof stored);
  if (stored.magic != kMagic || stored.check != checksum(stored))
    fault("the tensor map at %p is not one that cuTensorMapEncodeTiled wrote", map);
  TensorMap result{};
  result.type = stored.type;
  result.rank = stored.rank;
  result.swizzle = static_cast<Swizzle>(stored.swizzle);
  result.nan_fill = stored.nan_fill != 0;
  result.base = stored.base;
  result.strides[0] = tensor_map_type_bytes(stored.type);
  for (int i = 0; i < stored.rank; ++i) {
    result.sizes[i] = uint64_t{stored.last[i]} + 1;
    if (i > 0) result.strides[i] = stored.strides[i - 1];
    result.box[i] = stored.box[i];
    result.steps[i] = stored.steps[i];
  }
  return result;
}

}  // namespace tiercel::emulator
