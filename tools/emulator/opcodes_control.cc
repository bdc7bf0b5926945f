// SPDX-License-Identifier: Apache-2.0
// Branches, exits, calls, and what does nothing here.
#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

// The lanes of the mask go to an instruction, the group's others to the next one.
void jump(Warp& warp, Mask mask, uint32_t target) {
  if (mask == warp.active) {
    warp.group->pc = target;
    return;
  }
  warp.group->pc = warp.pc + 1;
  warp.group->mask = warp.active & ~mask;
  warp.groups.push_back({target, mask, false, 0});
}

Step bra(Warp& warp, const Instruction& in, Mask mask) {
  jump(warp, mask, static_cast<uint32_t>(in.imm));
  return Step::kControl;
}

void decode_bra(Decode& d, Instruction& out) {
  d.take("uni");
  if (d.operand(0).kind != PtxOperand::kLabel) d.fail("no such label");
  out.imm = d.operand(0).value;
  out.run = bra;
}

Step brx(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t* index = warp.in<uint32_t>(in.op[1]);
  const auto& targets = *reinterpret_cast<const std::vector<int64_t>*>(in.imm);
  std::map<uint32_t, Mask> to;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (index[i] >= targets.size()) throw EmulatorError("brx.idx beyond its list", i);
    to[static_cast<uint32_t>(targets[index[i]])] |= 1u << i;
  }
  warp.group->pc = warp.pc + 1;
  warp.group->mask = warp.active & ~mask;
  for (const auto& [pc, lanes] : to) warp.groups.push_back({pc, lanes, false, 0});
  return Step::kControl;
}

void decode_brx(Decode& d, Instruction& out) {
  if (!d.take("idx")) d.fail(".idx is missing");
  d.take("uni");
  out.op[1] = d.source(0, t::b32);
  const auto& lists = d.kernel().ptx->branch_targets;
  const auto found = lists.find(d.operand(1).name);
  if (found == lists.end()) d.fail("no such list of labels");
  out.imm = static_cast<int64_t>(reinterpret_cast<intptr_t>(&found->second));
  out.run = brx;
}

Step leave(Warp& warp, const Instruction&, Mask mask) {
  warp.alive &= ~mask;
  warp.group->mask = warp.active & ~mask;
  warp.group->pc = warp.pc + 1;
  for (Group& group : warp.groups) group.blocked = false;  // some may have waited for these lanes
  return Step::kControl;
}

void decode_ret(Decode& d, Instruction& out) {
  d.take("uni");
  out.run = leave;
}

Step trap(Warp&, const Instruction&, Mask mask) {
  throw EmulatorError("trap", __builtin_ctz(mask));
}

void decode_trap(Decode&, Instruction& out) { out.run = trap; }

Step assertion(Warp&, const Instruction&, Mask mask) {
  throw EmulatorError("a device assertion failed", __builtin_ctz(mask));
}

void decode_call(Decode& d, Instruction& out) {
  d.take("uni");
  if (d.operand(0).name != "__assertfail") d.fail("a call of a function");
  out.run = assertion;
}

Step nothing(Warp&, const Instruction&, Mask) { return Step::kNext; }
Step pause(Warp&, const Instruction&, Mask) { return Step::kYield; }

// Memory is seen at once, and in order, by everybody: fences have nothing to do.
void decode_fence(Decode& d, Instruction& out) {
  while (!d.rest().empty()) {
    static const char* const kKnown[] = {"sc",
                                         "acq_rel",
                                         "acquire",
                                         "release",
                                         "gpu",
                                         "sys",
                                         "cta",
                                         "cluster",
                                         "gl",
                                         "proxy",
                                         "async",
                                         "alias",
                                         "mbarrier_init",
                                         "async::generic",
                                         "sync_restrict::shared::cta",
                                         "sync_restrict::shared::cluster",
                                         "global",
                                         "shared::cta",
                                         "shared::cluster"};
    bool taken = false;
    for (const char* known : kKnown) taken |= d.take(known);
    if (!taken) d.fail("modifier ." + d.rest()[0] + " is not implemented here");
  }
  out.run = nothing;
}

void decode_nanosleep(Decode& d, Instruction& out) {
  d.type({t::u32});
  out.run = pause;
}

void decode_pmevent(Decode& d, Instruction& out) {
  d.take("mask");
  out.run = nothing;
}

const Opcode opcodes[] = {
    {"bra", decode_bra},         {"brx", decode_brx},
    {"ret", decode_ret},         {"exit", decode_ret},
    {"trap", decode_trap},       {"brkpt", decode_trap},
    {"call", decode_call},       {"fence", decode_fence},
    {"membar", decode_fence},    {"nanosleep", decode_nanosleep},
    {"pmevent", decode_pmevent},
};

}  // namespace
}  // namespace tiercel::emulator
