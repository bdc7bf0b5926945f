// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/wgmma_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/fragments.h"

namespace tiercel::emulator {
namespace {

constexpr uint32_t kPoison = 0x7fedface;  // a NaN, also as two halves

constexpr size_t kLaneBytes = kLanes * sizeof(uint32_t);

}  // namespace

WgmmaQueue::Sums* WgmmaQueue::sums_of(const Wgmma& shape, const std::vector<uint32_t*>& d,
                                      int line) {
  for (Sums& sums : sums_) {
    if (sums.users == 0) continue;
    if (sums.registers == d && sums.element == shape.d) return &sums;
    for (const uint32_t* lanes : d)
      if (std::find(sums.registers.begin(), sums.registers.end(), lanes) != sums.registers.end())
        fault(
            "wgmma.mma_async in PTX line %d: an accumulator is also another's that is under way, "
            "of another shape",
            line);
  }
  auto free = std::find_if(sums_.begin(), sums_.end(), [](const Sums& s) { return s.users == 0; });
  if (free == sums_.end()) free = sums_.insert(sums_.end(), Sums{});
  free->registers = d;
  free->element = shape.d;
  free->n = shape.n;
  free->users = 0;
  free->values.resize(16 * shape.n);
  unpack_c(shape.d, shape.n, d.data(), free->values.data());
  for (uint32_t* lanes : d) std::fill(lanes, lanes + kLanes, kPoison);
  return &*free;
}

void WgmmaQueue::issue(const Wgmma& shape, const WgmmaOperands& operands, std::vector<uint32_t*> d,
                       std::vector<const uint32_t*> a, int line) {
  Issued issued{shape, operands, nullptr, std::move(a), {}, group_, line};
  for (const Sums& sums : sums_)
    if (sums.users > 0)
      for (const uint32_t* lanes : issued.a)
        if (std::find(sums.registers.begin(), sums.registers.end(), lanes) != sums.registers.end())
          fault("wgmma.mma_async in PTX line %d: operand a is an accumulator that is under way",
                line);
  issued.sums = sums_of(shape, d, line);
  ++issued.sums->users;
  for (const uint32_t* lanes : issued.a)
    issued.a_copy.insert(issued.a_copy.end(), lanes, lanes + kLanes);
  issued_.push_back(std::move(issued));
  if (!lazy_) run(issued_.back());
}

void WgmmaQueue::run(Issued& issued) {
  WgmmaOperands operands = issued.operands;
  operands.a_registers = issued.a.data();
  wgmma(memory_, rank_, warp_, issued.shape, operands, issued.sums->values.data());
}

void WgmmaQueue::release(Sums* sums, int line) {
  if (--sums->users > 0) return;
  for (size_t i = 0; i < sums->registers.size(); ++i)
    for (int lane = 0; lane < kLanes; ++lane)
      if (sums->registers[i][lane] != kPoison)
        fault("wgmma.mma_async in PTX line %d: accumulator %zu was written before wait_group", line,
              i);
  pack_d(sums->element, sums->n, sums->values.data(), sums->registers.data());
}

void WgmmaQueue::commit() { ++group_; }

void WgmmaQueue::wait(uint32_t groups) {
  while (!issued_.empty() && issued_.front().group + groups < group_) {
    Issued& issued = issued_.front();
    for (size_t i = 0; i < issued.a.size(); ++i)
      if (std::memcmp(issued.a[i], &issued.a_copy[i * kLanes], kLaneBytes) != 0)
        fault("wgmma.mma_async in PTX line %d: operand a's register %zu changed before wait_group",
              issued.line, i);
    if (lazy_) run(issued);
    release(issued.sums, issued.line);
    issued_.pop_front();
  }
}

}  // namespace tiercel::emulator
