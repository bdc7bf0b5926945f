// SPDX-License-Identifier: Apache-2.0
// Addresses. Global memory is the host's own, at the host's addresses, where it is registered; the
// other spaces have windows of generic addresses that no host pointer can have.
#ifndef TOOLS_EMULATOR_MEMORY_H_
#define TOOLS_EMULATOR_MEMORY_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "tools/emulator/instruction.h"

namespace tiercel::emulator {

inline constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
inline constexpr uint64_t kLocalWindow = uint64_t{2} << 56;
inline constexpr uint64_t kParamWindow = uint64_t{3} << 56;
inline constexpr uint64_t kWindowMask = uint64_t{0xff} << 56;
// A shared address: the CTA's rank in its cluster in bits 24 to 31, the rest an offset. As on the
// GPU, a block's own memory begins after 1 KiB of the system's.
inline constexpr uint32_t kSharedStart = 1024;
inline constexpr int kRankShift = 24;

struct Allocation {
  uint64_t begin, end;
  std::string name;
  bool read_only;
};

// What kernels may touch of global memory.
class Allocations {
 public:
  void add(uint64_t begin, uint64_t size, const std::string& name, bool read_only = false);
  void remove(uint64_t begin);
  const Allocation* find(uint64_t address) const;  // the last one that begins at or before it
  std::string describe(uint64_t address) const;

 private:
  std::vector<Allocation> sorted_;
};

// The allocation that a warp touched last.
struct MemoryCache {
  uint64_t begin = 1, end = 0;
  bool read_only = false;
};

// The host memory of an access by one lane. Checks space, bounds and alignment, and throws.
// `address` is as the instruction has it: 32-bit for shared and local.
uint8_t* resolve(Warp& warp, Space space, uint64_t address, uint32_t size, int lane, bool write);

// The space and address within it that a generic address means.
Space split_generic(uint64_t generic, uint64_t* address);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_MEMORY_H_
