// SPDX-License-Identifier: Apache-2.0
// elect.sync, and instructions that only tell the machine something.
#include <algorithm>
#include <string>

#include "tools/emulator/tensor/tensor_state.h"

namespace tiercel::emulator {
namespace {

Step run_nothing(Warp&, const Instruction&, Mask) { return Step::kNext; }

// op[0] the elected lane, op[1] the predicate, op[2] the member mask
Step run_elect(Warp& warp, const Instruction& in, Mask mask) {
  const Mask members = warp.in<uint32_t>(in.op[2])[first_lane(mask)];
  if (!warp.together(members, mask)) return Step::kBlocked;
  const int leader = first_lane(members & mask);
  uint32_t* lanes = warp.out<uint32_t>(in.op[0]);
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) lanes[lane] = static_cast<uint32_t>(leader);
  Mask* predicate = warp.out<Mask>(in.op[1]);
  *predicate = (*predicate & ~mask) | 1u << leader;
  return Step::kNext;
}

void decode_elect(Decode& d, Instruction& out) {
  if (!d.take("sync")) d.fail("the modifier .sync is expected");
  const PtxOperand& pair = d.operand(0);
  if (pair.kind != PtxOperand::kPair) d.fail("a pair of destinations is expected");
  out.op[0] = d.destination(pair.parts.at(0), t::b32);
  out.op[1] = d.destination(pair.parts.at(1), t::pred);
  out.op[2] = d.source(1, t::b32);
  out.run = run_elect;
}
const Opcode elect_opcode("elect", decode_elect);

// A grid begins when the one before it has ended: nothing to wait for.
Step run_grid_wait(Warp& warp, const Instruction&, Mask) {
  warp.cta->waited = true;
  return Step::kNext;
}

void decode_griddepcontrol(Decode& d, Instruction& out) {
  const std::string operation = d.take_one_of({"wait", "launch_dependents"});
  if (operation.empty()) d.fail("an operation is missing");
  out.run = operation == "wait" ? run_grid_wait : run_nothing;
}
const Opcode griddepcontrol_opcode("griddepcontrol", decode_griddepcontrol);

// Registers that ptxas gives a thread of a kernel with setmaxnreg: all that the blocks of a
// multiprocessor may have, in eights. Without a number of threads, or .maxnreg, it ignores
// setmaxnreg.
uint32_t launch_registers(const PtxFunction& kernel) {
  constexpr uint64_t kOfMultiprocessor = 65536, kMost = 256;
  uint64_t count = kernel.max_registers;
  if (count == 0 && kernel.max_threads != 0)
    count = kOfMultiprocessor / (kernel.max_threads * kernel.min_blocks);
  return static_cast<uint32_t>(std::min(count, kMost) / 8 * 8);
}

// imm: the number asked for. Warps share what the block was launched with.
Step run_setmaxnreg_dec(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  const auto count = static_cast<uint32_t>(in.imm);
  if (count > warp.machine_registers)
    throw EmulatorError("setmaxnreg.dec from " + std::to_string(warp.machine_registers) +
                        " registers to more");
  warp.cta->free_registers += warp.machine_registers - count;
  warp.machine_registers = count;
  return Step::kNext;
}

Step run_setmaxnreg_inc(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  const auto count = static_cast<uint32_t>(in.imm);
  if (count < warp.machine_registers)
    throw EmulatorError("setmaxnreg.inc from " + std::to_string(warp.machine_registers) +
                        " registers to fewer");
  const uint32_t wanted = count - warp.machine_registers;
  if (wanted > warp.cta->free_registers) return Step::kBlocked;
  warp.cta->free_registers -= wanted;
  warp.machine_registers = count;
  return Step::kNext;
}

void decode_setmaxnreg(Decode& d, Instruction& out) {
  const std::string operation = d.take_one_of({"inc", "dec"});
  if (operation.empty()) d.fail("an operation is missing");
  d.take("sync");
  d.take("aligned");
  d.type({t::u32});
  const int64_t count = d.immediate(0);
  if (count < 24 || count > 256 || count % 8 != 0)
    d.fail("the number of registers is expected to be a multiple of 8 from 24 to 256");
  Kernel& kernel = d.kernel();
  kernel.launch_registers = launch_registers(*kernel.ptx);
  if (kernel.launch_registers == 0)
    d.fail("ptxas ignores it in a kernel with neither .maxntid, .reqntid nor .maxnreg");
  out.imm = count;
  out.run = operation == "inc" ? run_setmaxnreg_inc : run_setmaxnreg_dec;
}
const Opcode setmaxnreg_opcode("setmaxnreg", decode_setmaxnreg);

Step run_policy(Warp& warp, const Instruction& in, Mask mask) {
  uint64_t* out = warp.out<uint64_t>(in.op[0]);
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) out[lane] = 0;
  return Step::kNext;
}

// Hints to caches that there are none of.
void decode_createpolicy(Decode& d, Instruction& out) {
  for (const std::string& word : d.rest()) d.take(word.c_str());
  out.op[0] = d.destination(0, t::b64);
  out.run = run_policy;
}
const Opcode createpolicy_opcode("createpolicy", decode_createpolicy);

void decode_prefetch(Decode& d, Instruction& out) {
  for (const std::string& word : d.rest()) d.take(word.c_str());
  out.run = run_nothing;
}
const Opcode prefetch_opcode("prefetch", decode_prefetch);
const Opcode prefetchu_opcode("prefetchu", decode_prefetch);

}  // namespace
}  // namespace tiercel::emulator
