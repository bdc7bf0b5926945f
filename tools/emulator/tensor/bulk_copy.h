// SPDX-License-Identifier: Apache-2.0
// The copy engine: boxes of a tensor (cp.async.bulk.tensor, tile mode) and plain runs of bytes
// between global and shared memory. When a copy happens and what it signals is the caller's.
#ifndef TOOLS_EMULATOR_TENSOR_BULK_COPY_H_
#define TOOLS_EMULATOR_TENSOR_BULK_COPY_H_

#include <cstdint>

#include "tools/emulator/tensor/memory.h"
#include "tools/emulator/tensor/tensor_map.h"

namespace tiercel::emulator {

// Where the byte of an address in a swizzled tile lies: 16-byte chunks trade places within a row of
// 32, 64 or 128 bytes, by the row's number.
uint32_t swizzled(Swizzle swizzle, uint32_t address);

enum class Reduction { none, add, min, max, bit_and, bit_or, bit_xor };

// Throws if the machine would not copy this box: checks that need no memory access.
void check_tile(const TensorMap& map, uint32_t shared_offset);

// Reads a box (what is outside of the tensor becomes zero, or NaN) to shared memory.
void load_tile(Memory& memory, const TensorMap& map, const int32_t* coordinates, uint32_t rank,
               uint32_t shared_offset);

// Writes what of the box lies in the tensor, or combines it with what is there.
void store_tile(Memory& memory, const TensorMap& map, const int32_t* coordinates, uint32_t rank,
                uint32_t shared_offset, Reduction reduction = Reduction::none);

// Throws unless both addresses and the size are multiples of 16.
void check_bulk(uint64_t to, uint64_t from, uint32_t bytes);

// `type`: CUtensorMapDataType.
void reduce_bytes(uint32_t type, Reduction reduction, uint8_t* to, const uint8_t* from,
                  uint32_t bytes);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_BULK_COPY_H_
