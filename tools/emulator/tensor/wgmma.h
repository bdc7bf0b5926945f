// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async, for one warp of a warpgroup: its 16 of the 64 rows.
#ifndef TOOLS_EMULATOR_TENSOR_WGMMA_H_
#define TOOLS_EMULATOR_TENSOR_WGMMA_H_

#include <cstdint>

#include "tools/emulator/tensor/bulk_copy.h"
#include "tools/emulator/tensor/elements.h"
#include "tools/emulator/tensor/memory.h"

namespace tiercel::emulator {

// A matrix descriptor: how an operand lies in shared memory.
struct MatrixDescriptor {
  uint32_t start, leading, stride;  // bytes
  uint32_t base_offset;             // rows of the swizzle's pattern
  Swizzle swizzle;

  static MatrixDescriptor decode(uint64_t bits);

  // Where 16 bytes of an operand lie. K-major: of row `row` (of a, or column of b), `chunk` counts
  // along k. MN-major: of step `row` along k, `chunk` counts along m or n.
  uint32_t k_major(uint32_t row, uint32_t chunk) const;
  uint32_t mn_major(uint32_t row, uint32_t chunk) const;

 private:
  uint32_t place(uint32_t address) const;
};

struct Wgmma {
  int n, k;
  Element a, b;
  Element d;  // f32, f16 or s32
  bool a_in_registers;
  bool a_transposed = false, b_transposed = false;  // MN-major, 16-bit elements only
  bool negate_a = false, negate_b = false;          // imm-scale -1
  bool short_adder = false;  // FP8 sums as the machine's, see multiply_add_short
};

// Throws if PTX has no such instruction.
void check(const Wgmma& shape);

struct WgmmaOperands {
  uint64_t a, b;                       // descriptors
  const uint32_t* const* a_registers;  // instead of a
  bool accumulate;                     // scale-d: else d begins at zero
};

// d += a * b, for rows 16 * warp and up. d is row-major, 16 x n, with the bits of s32 for integers.
void wgmma(Memory& memory, uint32_t rank, uint32_t warp, const Wgmma& shape,
           const WgmmaOperands& operands, float* d);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_WGMMA_H_
