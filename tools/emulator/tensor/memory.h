// SPDX-License-Identifier: Apache-2.0
// How tensor instructions reach memory. Each access is checked: out of bounds is an error.
#ifndef TOOLS_EMULATOR_TENSOR_MEMORY_H_
#define TOOLS_EMULATOR_TENSOR_MEMORY_H_

#include <cstdint>

namespace tiercel::emulator {

enum class Access { read, write };

class Memory {
 public:
  virtual ~Memory() = default;
  // Offsets into the shared memory of a block of the cluster, by rank.
  virtual uint8_t* shared(uint32_t rank, uint32_t offset, uint32_t bytes, Access access) = 0;
  virtual uint8_t* global(uint64_t address, uint64_t bytes, Access access) = 0;
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_MEMORY_H_
