// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/tensor_state.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "tools/emulator/tensor/fault.h"

namespace tiercel::emulator {

uint8_t* ClusterMemory::shared(uint32_t rank, uint32_t offset, uint32_t bytes, Access) {
  return cluster_.shared(uint64_t{rank} << kRankShift | (offset & kOffsetMask), bytes);
}

uint8_t* ClusterMemory::global(uint64_t address, uint64_t bytes, Access access) {
  if (address < cache_.begin || address + bytes > cache_.end) {
    const Allocations& all = *cluster_.launch->allocations;
    const Allocation* found = all.find(address);
    if (!found || address + bytes > found->end)
      throw EmulatorError(
          "out-of-bounds " + std::string(access == Access::write ? "write" : "read") + " of " +
          std::to_string(bytes) + " bytes of global memory: " + all.describe(address));
    cache_ = {found->begin, found->end, found->read_only};
  }
  if (access == Access::write && cache_.read_only)
    fault("write to global memory that is read-only");
  return reinterpret_cast<uint8_t*>(address);
}

ClusterMemory& memory_of(Cluster& cluster) {
  if (!cluster.tensor_state) cluster.tensor_state = std::make_shared<ClusterMemory>(cluster);
  return *static_cast<ClusterMemory*>(cluster.tensor_state.get());
}

MBarrier mbarrier_at(Cluster& cluster, uint32_t address, int lane) {
  if (address % 8 != 0) throw EmulatorError("an mbarrier's address is no multiple of 8", lane);
  uint8_t* place =
      memory_of(cluster).shared(address >> kRankShift, address & kOffsetMask, 8, Access::write);
  return MBarrier(reinterpret_cast<uint64_t*>(place));
}

std::function<void()> BulkGroups::add() {
  ++*open_;
  return [count = open_] { --*count; };
}

void BulkGroups::commit() { committed_.push_back(std::exchange(open_, std::make_shared<int>(0))); }

bool BulkGroups::done(uint32_t left) {
  while (!committed_.empty() && *committed_.front() == 0) committed_.pop_front();
  // A later group may be done before an earlier one; the wait is for all but the last ones.
  for (size_t i = 0; i + left < committed_.size(); ++i)
    if (*committed_[i] != 0) return false;
  return true;
}

WarpTensorState::WarpTensorState(Warp& warp)
    : queue(memory_of(*warp.cta->cluster), warp.cta->rank, warp.index % 4,
            warp.cta->cluster->launch->options.lazy) {}

WarpTensorState& tensor_state(Warp& warp) {
  if (!warp.tensor_state) warp.tensor_state = std::make_shared<WarpTensorState>(warp);
  return *static_cast<WarpTensorState*>(warp.tensor_state.get());
}

namespace {

constexpr uint32_t kWarps = 4;  // of a warpgroup

// A warpgroup's instructions that some of its warps have not come to yet.
struct WarpgroupOrder {
  std::deque<const Instruction*> ahead;
  uint64_t first = 0;           // the number of ahead.front()
  uint64_t count[kWarps] = {};  // instructions so far
};

struct CtaTensorState {
  std::map<uint32_t, WarpgroupOrder> warpgroups;
};

}  // namespace

void check_warpgroup_order(Warp& warp, const Instruction& in, const char* what) {
  if (!warp.cta->tensor_state) warp.cta->tensor_state = std::make_shared<CtaTensorState>();
  auto& state = *static_cast<CtaTensorState*>(warp.cta->tensor_state.get());
  WarpgroupOrder& order = state.warpgroups[warp.index / kWarps];
  const uint64_t at = order.count[warp.index % kWarps]++ - order.first;
  if (at == order.ahead.size()) {
    order.ahead.push_back(&in);
  } else if (order.ahead[at] != &in) {
    fault("%s: another warp of the warpgroup is at PTX line %d instead", what,
          order.ahead[at]->line);
  }
  while (*std::min_element(order.count, order.count + kWarps) > order.first) {
    order.ahead.pop_front();
    ++order.first;
  }
}

uint32_t shared_address(Warp& warp, Operand operand, bool narrow, int64_t offset, int lane) {
  if (narrow) return static_cast<uint32_t>(warp.in<uint32_t>(operand)[lane] + offset);
  uint64_t address = 0;
  const uint64_t generic = warp.in<uint64_t>(operand)[lane] + static_cast<uint64_t>(offset);
  if (split_generic(generic, &address) != Space::kSharedCluster)
    throw EmulatorError("this generic address is not of shared memory", lane);
  return static_cast<uint32_t>(address);
}

uint64_t uniform64(const Warp& warp, Operand operand, Mask mask, const char* what) {
  const uint64_t* lanes = warp.in<uint64_t>(operand);
  const uint64_t value = lanes[first_lane(mask)];
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1 && lanes[lane] != value)
      throw EmulatorError(std::string(what) + " differs between the warp's lanes", lane);
  return value;
}

}  // namespace tiercel::emulator
