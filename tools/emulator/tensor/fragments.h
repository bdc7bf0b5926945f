// SPDX-License-Identifier: Apache-2.0
// Where the elements of matrix operands sit in the registers of a warp. A register is an array of
// 32 lanes; lane 4 * group + member.
#ifndef TOOLS_EMULATOR_TENSOR_FRAGMENTS_H_
#define TOOLS_EMULATOR_TENSOR_FRAGMENTS_H_

#include <cstdint>

#include "tools/emulator/instruction.h"
#include "tools/emulator/tensor/elements.h"

namespace tiercel::emulator {

// 16 rows of a (mma.sync's a, and a warp's part of wgmma's): 16 x k, row-major.
void unpack_a(Element element, int k, const uint32_t* const* registers, float* out);

// mma.sync's b: k x 8, row-major.
void unpack_b(Element element, int k, const uint32_t* const* registers, float* out);

// Accumulators, 16 x n: f32 and s32 take n / 2 registers, f16 half as many. `out` is row-major; of
// s32 it holds the same bits.
void unpack_c(Element element, int n, const uint32_t* const* registers, float* out);
void pack_d(Element element, int n, const float* values, uint32_t* const* registers);
int accumulator_registers(Element element, int n);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_FRAGMENTS_H_
