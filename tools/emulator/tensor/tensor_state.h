// SPDX-License-Identifier: Apache-2.0
// What the tensor part keeps for a cluster and for a warp of the interpreter.
#ifndef TOOLS_EMULATOR_TENSOR_TENSOR_STATE_H_
#define TOOLS_EMULATOR_TENSOR_TENSOR_STATE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "tools/emulator/state.h"
#include "tools/emulator/tensor/mbarrier.h"
#include "tools/emulator/tensor/memory.h"
#include "tools/emulator/tensor/wgmma_queue.h"

namespace tiercel::emulator {

constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;

// A cluster's shared memory and all of global memory. Offsets may still have their rank on top.
class ClusterMemory : public Memory {
 public:
  explicit ClusterMemory(Cluster& cluster) : cluster_(cluster) {}
  uint8_t* shared(uint32_t rank, uint32_t offset, uint32_t bytes, Access access) override;
  uint8_t* global(uint64_t address, uint64_t bytes, Access access) override;

 private:
  Cluster& cluster_;
  MemoryCache cache_;
};

ClusterMemory& memory_of(Cluster& cluster);

// The object at a shared address (rank and offset) of the cluster; 8 bytes, aligned.
MBarrier mbarrier_at(Cluster& cluster, uint32_t address, int lane);

// A thread's bulk copies that signal no mbarrier: those under way, by group.
class BulkGroups {
 public:
  // Counts one more copy of the open group, until what is returned is called.
  std::function<void()> add();
  void commit();
  // Whether at most `left` committed groups have copies under way.
  bool done(uint32_t left);

 private:
  std::shared_ptr<int> open_ = std::make_shared<int>(0);
  std::deque<std::shared_ptr<int>> committed_;
};

struct WarpTensorState {
  explicit WarpTensorState(Warp& warp);
  WgmmaQueue queue;
  BulkGroups bulk[kLanes];
};

WarpTensorState& tensor_state(Warp& warp);

// wgmma instructions are for a whole warpgroup: its four warps execute the same ones, in the same
// order. Throws when the warp is at another one than the first warp to get that far.
void check_warpgroup_order(Warp& warp, const Instruction& in, const char* what);

// A shared address from an operand: 32 bits as it is, 64 bits generic.
uint32_t shared_address(Warp& warp, Operand operand, bool narrow, int64_t offset, int lane);

// The lowest lane of a mask, and the value that all lanes of it have; an error if they differ.
inline int first_lane(Mask mask) { return __builtin_ctz(mask); }
uint64_t uniform64(const Warp& warp, Operand operand, Mask mask, const char* what);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_TENSOR_STATE_H_
