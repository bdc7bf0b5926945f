// SPDX-License-Identifier: Apache-2.0
// mma.sync, ldmatrix, stmatrix, movmatrix.
#include <string>
#include <vector>

#include "tools/emulator/tensor/mma_sync.h"
#include "tools/emulator/tensor/opcodes_vector.h"
#include "tools/emulator/tensor/tensor_state.h"

namespace tiercel::emulator {
namespace {

Step run_mma(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  const auto& shape = *static_cast<const MmaSync*>(kept(in));
  // Slots of four for d, a, b, c; unused ones repeat the first.
  const uint32_t* from[16];
  uint32_t* to[4];
  for (int i = 0; i < 16; ++i) from[i] = warp.in<uint32_t>(in.more[i]);
  for (int i = 0; i < 4; ++i) to[i] = warp.out<uint32_t>(in.more[i]);
  mma_sync(shape, from + 4, from + 8, from + 12, to);
  return Step::kNext;
}

void decode_mma(Decode& d, Instruction& out) {
  for (const char* word : {"sync", "aligned", "row", "col"})
    if (!d.take(word)) d.fail(std::string("the modifier .") + word + " is expected");
  MmaSync shape{};
  const std::string size =
      d.take_one_of({"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64"});
  if (size.empty()) d.fail("a shape of m16n8 is expected");
  shape.k = std::stoi(size.substr(6));
  if (d.take("satfinite")) shape.satfinite = true;
  d.take("kind::f8f6f4");
  shape.d = take_element(d);
  shape.a = take_element(d);
  shape.b = take_element(d);
  shape.c = take_element(d);
  try {
    check(shape);
  } catch (const EmulatorError& error) {
    d.fail(error.what());
  }
  std::vector<Operand> all;
  for (int i = 0; i < 4; ++i) {
    std::vector<Operand> part = vector_operand(d, i);
    part.resize(4, part.at(0));
    all.insert(all.end(), part.begin(), part.end());
  }
  d.set_more(out, all);
  keep(d, out, std::make_shared<MmaSync>(shape));
  out.run = run_mma;
}
const Opcode mma_opcode("mma", decode_mma);

enum Flags : uint32_t { kNarrow = 1, kTransposed = 2 };

Step move_matrices(Warp& warp, const Instruction& in, Mask mask, bool load) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  uint32_t addresses[kLanes];
  uint32_t* registers[4];
  const auto count = static_cast<int>(in.more_count);
  for (int lane = 0; lane < 8 * count; ++lane) {
    addresses[lane] = shared_address(warp, in.op[1], in.flags & kNarrow, in.imm, lane);
    if (addresses[lane] >> kRankShift != warp.cta->rank)
      throw EmulatorError("ldmatrix, stmatrix: the address is not of this block", lane);
    addresses[lane] &= kOffsetMask;
  }
  for (int i = 0; i < count; ++i)
    registers[i] = const_cast<uint32_t*>(warp.in<uint32_t>(in.more[i]));
  ClusterMemory& memory = memory_of(*warp.cta->cluster);
  const bool transposed = in.flags & kTransposed;
  if (load)
    ldmatrix(memory, warp.cta->rank, addresses, count, transposed, registers);
  else
    stmatrix(memory, warp.cta->rank, addresses, count, transposed, registers);
  return Step::kNext;
}

Step run_ldmatrix(Warp& warp, const Instruction& in, Mask mask) {
  return move_matrices(warp, in, mask, true);
}
Step run_stmatrix(Warp& warp, const Instruction& in, Mask mask) {
  return move_matrices(warp, in, mask, false);
}

void decode_matrices(Decode& d, Instruction& out) {
  const bool load = d.ptx.opcode == "ldmatrix";
  for (const char* word : {"sync", "aligned", "m8n8"})
    if (!d.take(word)) d.fail(std::string("the modifier .") + word + " is expected");
  const std::string count = d.take_one_of({"x1", "x2", "x4"});
  if (d.take("trans")) out.flags |= kTransposed;
  d.space();
  d.type({t::b16});
  bool narrow = false;
  out.op[1] = d.address(load ? 1 : 0, &out.imm, &narrow);
  if (narrow) out.flags |= kNarrow;
  const std::vector<Operand> registers = vector_operand(d, load ? 0 : 1);
  if ("x" + std::to_string(registers.size()) != count) d.fail("another number of registers");
  d.set_more(out, registers);
  out.run = load ? run_ldmatrix : run_stmatrix;
}
const Opcode ldmatrix_opcode("ldmatrix", decode_matrices);
const Opcode stmatrix_opcode("stmatrix", decode_matrices);

Step run_movmatrix(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  movmatrix(warp.in<uint32_t>(in.op[1]), warp.out<uint32_t>(in.op[0]));
  return Step::kNext;
}

void decode_movmatrix(Decode& d, Instruction& out) {
  for (const char* word : {"sync", "aligned", "m8n8", "trans"})
    if (!d.take(word)) d.fail(std::string("the modifier .") + word + " is expected");
  d.type({t::b16});
  out.op[0] = d.destination(0, t::b32);
  out.op[1] = d.source(1, t::b32);
  out.run = run_movmatrix;
}
const Opcode movmatrix_opcode("movmatrix", decode_movmatrix);

}  // namespace
}  // namespace tiercel::emulator
