// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/mma_sync.h"

#include <algorithm>
#include <cstring>

#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/fragments.h"

namespace tiercel::emulator {
namespace {

constexpr int kLargestK = 32;

uint8_t* matrix_row(Memory& memory, uint32_t rank, uint32_t address, int lane, Access access) {
  if (address % 16 != 0)
    fault("ldmatrix, stmatrix: the row address 0x%x of lane %d is no multiple of 16", address,
          lane);
  return memory.shared(rank, address, 16, access);
}

// A lane holds two neighbours of a row (transposed: of a column) of an 8x8 matrix.
void to_fragment(const uint16_t (*rows)[8], bool transposed, uint32_t* lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t bits = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = lane / 4, column = lane % 4 * 2 + e;
      const uint32_t element = transposed ? rows[column][row] : rows[row][column];
      bits |= element << (16 * e);
    }
    lanes[lane] = bits;
  }
}

void from_fragment(const uint32_t* lanes, bool transposed, uint16_t (*rows)[8]) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < 2; ++e) {
      const int row = lane / 4, column = lane % 4 * 2 + e;
      const auto element = static_cast<uint16_t>(lanes[lane] >> (16 * e));
      (transposed ? rows[column][row] : rows[row][column]) = element;
    }
}

}  // namespace

void check(const MmaSync& shape) {
  const int steps = shape.k * element_bits(shape.a);  // bits of a row of a
  const bool floats = element_bits(shape.a) == 8 && !is_integer(shape.a);
  const bool mixed = shape.a == shape.b || (floats && !is_integer(shape.b)) ||
                     (is_integer(shape.a) && is_integer(shape.b));
  const bool sums = is_integer(shape.a) ? shape.c == Element::s32 && shape.d == Element::s32
                    : shape.a == Element::f16 || floats
                        ? shape.c != Element::s32 && shape.d != Element::s32
                        : shape.c == Element::f32 && shape.d == Element::f32;
  if ((steps != 128 && steps != 256) || element_bits(shape.a) != element_bits(shape.b) || !mixed ||
      !sums)
    fault("mma.sync m16n8k%d.%s.%s.%s.%s is not emulated", shape.k, element_name(shape.d),
          element_name(shape.a), element_name(shape.b), element_name(shape.c));
}

void mma_sync(const MmaSync& shape, const uint32_t* const* a, const uint32_t* const* b,
              const uint32_t* const* c, uint32_t* const* d) {
  float left[16 * kLargestK], right[kLargestK * 8], sums[16 * 8];
  unpack_a(shape.a, shape.k, a, left);
  unpack_b(shape.b, shape.k, b, right);
  unpack_c(shape.c, 8, c, sums);
  if (is_integer(shape.a)) {
    int32_t integers[16 * 8];
    std::memcpy(integers, sums, sizeof sums);
    if (shape.satfinite) fault("mma.sync .satfinite is not emulated");
    multiply_add(integers, 8, left, right, 16, 8, shape.k);
    std::memcpy(sums, integers, sizeof sums);
  } else {
    multiply_add(sums, 8, left, right, 16, 8, shape.k);
  }
  pack_d(shape.d, 8, sums, d);
}

void ldmatrix(Memory& memory, uint32_t rank, const uint32_t* addresses, int count, bool transposed,
              uint32_t* const* registers) {
  uint16_t rows[kLanes][8];
  for (int lane = 0; lane < 8 * count; ++lane)
    std::memcpy(rows[lane], matrix_row(memory, rank, addresses[lane], lane, Access::read), 16);
  for (int i = 0; i < count; ++i) to_fragment(rows + 8 * i, transposed, registers[i]);
}

void stmatrix(Memory& memory, uint32_t rank, const uint32_t* addresses, int count, bool transposed,
              const uint32_t* const* registers) {
  uint16_t rows[kLanes][8];
  for (int i = 0; i < count; ++i) from_fragment(registers[i], transposed, rows + 8 * i);
  for (int lane = 0; lane < 8 * count; ++lane)
    std::memcpy(matrix_row(memory, rank, addresses[lane], lane, Access::write), rows[lane], 16);
}

void movmatrix(const uint32_t* from, uint32_t* to) {
  uint16_t rows[8][8];
  from_fragment(from, false, rows);
  to_fragment(rows, true, to);
}

}  // namespace tiercel::emulator
