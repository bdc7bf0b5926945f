// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/fragments.h"

#include "tools/emulator/tensor/formats.h"

namespace tiercel::emulator {
namespace {

struct Numbers {  // of one register's 32 bits
  float values[4];
};

Numbers split(Element element, uint32_t bits) {
  Numbers numbers{};
  widen(element, reinterpret_cast<const uint8_t*>(&bits), 32 / element_bits(element),
        numbers.values);
  return numbers;
}

}  // namespace

void unpack_a(Element element, int k, const uint32_t* const* registers, float* out) {
  const int each = 32 / element_bits(element);
  const int count = 16 * k / (each * kLanes);
  for (int r = 0; r < count; ++r)
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4 + 8 * (r & 1);
      const int column = (lane % 4 + 4 * (r >> 1)) * each;
      const Numbers numbers = split(element, registers[r][lane]);
      for (int e = 0; e < each; ++e) out[row * k + column + e] = numbers.values[e];
    }
}

void unpack_b(Element element, int k, const uint32_t* const* registers, float* out) {
  const int each = 32 / element_bits(element);
  const int count = 8 * k / (each * kLanes);
  for (int r = 0; r < count; ++r)
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = (lane % 4 + 4 * r) * each;
      const Numbers numbers = split(element, registers[r][lane]);
      for (int e = 0; e < each; ++e) out[(row + e) * 8 + lane / 4] = numbers.values[e];
    }
}

int accumulator_registers(Element element, int n) {
  return element == Element::f16 ? n / 4 : n / 2;
}

void unpack_c(Element element, int n, const uint32_t* const* registers, float* out) {
  const int count = accumulator_registers(element, n);
  for (int r = 0; r < count; ++r) {
    const int half = element == Element::f16 ? r : r / 2;  // eight rows of eight columns
    for (int lane = 0; lane < kLanes; ++lane) {
      float* at = out + (lane / 4 + 8 * (half & 1)) * n + 8 * (half >> 1) + lane % 4 * 2;
      const uint32_t bits = registers[r][lane];
      if (element == Element::f16) {
        at[0] = from_f16(static_cast<uint16_t>(bits));
        at[1] = from_f16(static_cast<uint16_t>(bits >> 16));
      } else {
        at[r & 1] = float_of(bits);
      }
    }
  }
}

void pack_d(Element element, int n, const float* values, uint32_t* const* registers) {
  const int count = accumulator_registers(element, n);
  for (int r = 0; r < count; ++r) {
    const int half = element == Element::f16 ? r : r / 2;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float* at = values + (lane / 4 + 8 * (half & 1)) * n + 8 * (half >> 1) + lane % 4 * 2;
      registers[r][lane] = element == Element::f16
                               ? to_f16(at[0]) | static_cast<uint32_t>(to_f16(at[1])) << 16
                               : bits_of(at[r & 1]);
    }
  }
}

}  // namespace tiercel::emulator
