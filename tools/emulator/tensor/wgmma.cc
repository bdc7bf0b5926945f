// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/wgmma.h"

#include <algorithm>
#include <cstring>

#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/formats.h"
#include "tools/emulator/tensor/fragments.h"

namespace tiercel::emulator {
namespace {

constexpr int kLargestN = 256, kLargestK = 32;
constexpr int kChunk = 16;  // bytes

// An operand of rows x k (a, or b's columns) from shared memory; element (row, step) goes to
// out[row * row_pitch + step * k_pitch].
void read_operand(Memory& memory, uint32_t rank, const MatrixDescriptor& descriptor,
                  Element element, bool transposed, uint32_t first_row, int rows, int k, float* out,
                  int row_pitch, int k_pitch) {
  const int each = kChunk * 8 / element_bits(element);
  const int lines = transposed ? k : rows, chunks = (transposed ? rows : k) / each;
  const int line_pitch = transposed ? k_pitch : row_pitch;
  const int pitch = transposed ? row_pitch : k_pitch;
  const uint32_t first_line = transposed ? 0 : first_row;
  const uint32_t first_chunk = transposed ? first_row / each : 0;
  float values[kChunk];
  for (int line = 0; line < lines; ++line)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t address = transposed
                                   ? descriptor.mn_major(first_line + line, first_chunk + chunk)
                                   : descriptor.k_major(first_line + line, first_chunk + chunk);
      widen(element, memory.shared(rank, address, kChunk, Access::read), each, values);
      float* to = out + line * line_pitch + chunk * each * pitch;
      for (int e = 0; e < each; ++e) to[e * pitch] = values[e];
    }
}

}  // namespace

MatrixDescriptor MatrixDescriptor::decode(uint64_t bits) {
  const auto field = [&](int shift) { return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4; };
  static constexpr Swizzle swizzles[] = {Swizzle::none, Swizzle::b128, Swizzle::b64, Swizzle::b32};
  return {field(0), field(16), field(32), static_cast<uint32_t>(bits >> 49 & 7),
          swizzles[bits >> 62]};
}

uint32_t MatrixDescriptor::place(uint32_t address) const {
  // Rows count from where the pattern begins. That the base offset is subtracted follows from its
  // definition; no kernel of ours has one that is not 0.
  return address ^
         (swizzled(swizzle, address - (base_offset << 7)) ^ (address - (base_offset << 7)));
}

uint32_t MatrixDescriptor::k_major(uint32_t row, uint32_t chunk) const {
  const uint32_t pitch = kChunk << static_cast<int>(swizzle);
  const uint32_t along_k = swizzle == Swizzle::none ? leading : kChunk;
  return place(start + row % 8 * pitch + row / 8 * stride + chunk * along_k);
}

uint32_t MatrixDescriptor::mn_major(uint32_t row, uint32_t chunk) const {
  const uint32_t wide = 1u << static_cast<int>(swizzle);  // chunks in a row of the pattern
  const bool plain = swizzle == Swizzle::none;
  return place(start + chunk % wide * kChunk + chunk / wide * (plain ? stride : leading) +
               row % 8 * wide * kChunk + row / 8 * (plain ? leading : stride));
}

void check(const Wgmma& shape) {
  const int bits = element_bits(shape.a);
  const bool integers = is_integer(shape.a);
  const bool same = shape.a == shape.b || (bits == 8 && integers == is_integer(shape.b));
  const bool narrow = shape.a == Element::f16 || (bits == 8 && !integers);
  const bool sums = integers ? shape.d == Element::s32
                             : shape.d == Element::f32 || (narrow && shape.d == Element::f16);
  const bool columns = shape.n >= 8 && shape.n <= kLargestN && shape.n % 8 == 0 &&
                       (!integers || shape.n <= 32 || shape.n % 16 == 0);
  const bool transposed = shape.a_transposed || shape.b_transposed;
  if (shape.k * bits != 256 || bits != element_bits(shape.b) || !same || !sums || !columns ||
      (transposed && bits != 16) || (shape.a_in_registers && shape.a_transposed))
    fault("wgmma.mma_async m64n%dk%d.%s.%s.%s%s is not emulated", shape.n, shape.k,
          element_name(shape.d), element_name(shape.a), element_name(shape.b),
          transposed ? " transposed" : "");
}

void wgmma(Memory& memory, uint32_t rank, uint32_t warp, const Wgmma& shape,
           const WgmmaOperands& operands, float* d) {
  float left[16 * kLargestK], right[kLargestK * kLargestN];
  if (shape.a_in_registers)
    unpack_a(shape.a, shape.k, operands.a_registers, left);
  else
    read_operand(memory, rank, MatrixDescriptor::decode(operands.a), shape.a, shape.a_transposed,
                 16 * warp, 16, shape.k, left, shape.k, 1);
  read_operand(memory, rank, MatrixDescriptor::decode(operands.b), shape.b, shape.b_transposed, 0,
               shape.n, shape.k, right, 1, shape.n);
  if (shape.negate_a != shape.negate_b)
    for (int i = 0; i < 16 * shape.k; ++i) left[i] = -left[i];
  if (!operands.accumulate) std::fill(d, d + 16 * shape.n, 0.0f);

  if (is_integer(shape.a)) {
    int32_t sums[16 * kLargestN];
    std::memcpy(sums, d, sizeof(float) * 16 * shape.n);
    multiply_add(sums, shape.n, left, right, 16, shape.n, shape.k);
    std::memcpy(d, sums, sizeof(float) * 16 * shape.n);
  } else if (shape.short_adder && element_bits(shape.a) == 8) {
    multiply_add_short(d, shape.n, left, right, 16, shape.n, shape.k);
  } else {
    multiply_add(d, shape.n, left, right, 16, shape.n, shape.k);
  }
  if (shape.d == Element::f16)
    for (int i = 0; i < 16 * shape.n; ++i) d[i] = from_f16(to_f16(d[i]));
}

}  // namespace tiercel::emulator
