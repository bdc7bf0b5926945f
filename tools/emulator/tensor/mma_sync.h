// SPDX-License-Identifier: Apache-2.0
// mma.sync.aligned.m16n8kK.row.col, ldmatrix, stmatrix and movmatrix, for a whole warp.
#ifndef TOOLS_EMULATOR_TENSOR_MMA_SYNC_H_
#define TOOLS_EMULATOR_TENSOR_MMA_SYNC_H_

#include <cstdint>

#include "tools/emulator/tensor/elements.h"
#include "tools/emulator/tensor/memory.h"

namespace tiercel::emulator {

struct MmaSync {
  int k;
  Element a, b;
  Element c, d;  // f32 or f16; s32 with integers
  bool satfinite = false;
};

// Throws if PTX has no such instruction on sm_90.
void check(const MmaSync& shape);

// Registers are arrays of 32 lanes; d may be c.
void mma_sync(const MmaSync& shape, const uint32_t* const* a, const uint32_t* const* b,
              const uint32_t* const* c, uint32_t* const* d);

// `count` 8x8 matrices of 16-bit elements; lane 8 * i + row has the address of a row of matrix i.
void ldmatrix(Memory& memory, uint32_t rank, const uint32_t* addresses, int count, bool transposed,
              uint32_t* const* registers);
void stmatrix(Memory& memory, uint32_t rank, const uint32_t* addresses, int count, bool transposed,
              const uint32_t* const* registers);
// movmatrix: one 8x8 matrix of 16-bit elements, transposed from a register to another.
void movmatrix(const uint32_t* from, uint32_t* to);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_MMA_SYNC_H_
