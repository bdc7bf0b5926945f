// SPDX-License-Identifier: Apache-2.0
// The wgmma instructions that a warp has issued and not waited for.
#ifndef TOOLS_EMULATOR_TENSOR_WGMMA_QUEUE_H_
#define TOOLS_EMULATOR_TENSOR_WGMMA_QUEUE_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "tools/emulator/tensor/wgmma.h"

namespace tiercel::emulator {

// A lazy queue multiplies when the warp waits, as late as a machine might: a tile that is
// overwritten too early gives wrong results. In between the accumulators hold a NaN, and so does
// what is computed from them too early; one that is written is an error, as is an operand in
// registers that changes. A queue that is not lazy multiplies at once, as early as a machine might.
class WgmmaQueue {
 public:
  WgmmaQueue(Memory& memory, uint32_t rank, uint32_t warp, bool lazy)
      : memory_(memory), rank_(rank), warp_(warp), lazy_(lazy) {}

  // Registers are arrays of 32 lanes that stay where they are. `line`: for messages.
  void issue(const Wgmma& shape, const WgmmaOperands& operands, std::vector<uint32_t*> d,
             std::vector<const uint32_t*> a, int line);
  void commit();
  // Until at most `groups` committed groups are left.
  void wait(uint32_t groups);
  bool idle() const { return issued_.empty(); }

 private:
  struct Sums {  // the accumulators of instructions under way
    std::vector<uint32_t*> registers;
    Element element;
    int n, users;
    std::vector<float> values;
  };
  struct Issued {
    Wgmma shape;
    WgmmaOperands operands;
    Sums* sums;
    std::vector<const uint32_t*> a;
    std::vector<uint32_t> a_copy;
    uint64_t group;
    int line;
  };
  Sums* sums_of(const Wgmma& shape, const std::vector<uint32_t*>& d, int line);
  void run(Issued& issued);
  void release(Sums* sums, int line);

  Memory& memory_;
  uint32_t rank_, warp_;
  bool lazy_;
  uint64_t group_ = 0;  // that instructions join now
  std::deque<Issued> issued_;
  std::deque<Sums> sums_;  // a deque: its elements do not move
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_WGMMA_QUEUE_H_
