// SPDX-License-Identifier: Apache-2.0
// atom and red. Lanes one after another: a warp's instruction is not interrupted.
#include <algorithm>

#include "tools/emulator/float_lane.h"

namespace tiercel::emulator {
namespace {

// flags: the space, narrow addresses, and what is done.
constexpr uint32_t kNarrow = 0x100;
enum Operation : uint32_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
const char* const kNames[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};

template <typename T>
T compute(uint32_t operation, T old, T b, T c) {
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case kAdd:
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                              static_cast<std::make_unsigned_t<T>>(b));
      case kMin:
        return std::min(old, b);
      case kMax:
        return std::max(old, b);
      case kAnd:
        return old & b;
      case kOr:
        return old | b;
      case kXor:
        return old ^ b;
      case kExch:
        return b;
      case kCas:
        return old == b ? c : old;
      case kInc:
        return old >= b ? T{0} : static_cast<T>(old + 1);
      default:
        return old == 0 || old > b ? b : static_cast<T>(old - 1);
    }
  } else {
    return operation == kAdd   ? FloatAdd::run(old, b)
           : operation == kMin ? FloatExtreme<true, false>::run(old, b)
                               : FloatExtreme<false, false>::run(old, b);
  }
}

// op[0] (if any) = old; `more`: elements of b; op[2]: c; op[5]: address. Pairs are elements too.
template <typename T, int elements>
Step atomic(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t size = sizeof(T) * elements;
  const bool narrow = (in.flags & kNarrow) != 0;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint64_t address = narrow
                                 ? static_cast<uint32_t>(warp.in<uint32_t>(in.op[5])[i] + in.imm)
                                 : warp.in<uint64_t>(in.op[5])[i] + static_cast<uint64_t>(in.imm);
    uint8_t* at = resolve(warp, static_cast<Space>(in.flags & 0xff), address, size, i, true);
    Slot<std::conditional_t<size == 8, double, float>> old_slot = 0, b_slot;
    b_slot = warp.in<decltype(b_slot)>(in.op[1])[i];
    std::memcpy(&old_slot, at, size);
    T old[elements], b[elements], c[elements] = {};
    std::memcpy(old, &old_slot, size);
    std::memcpy(b, &b_slot, size);
    if (in.op[2].present()) std::memcpy(c, warp.in<decltype(b_slot)>(in.op[2]) + i, size);
    T made[elements];
    for (int k = 0; k < elements; ++k) made[k] = compute<T>(in.flags >> 16, old[k], b[k], c[k]);
    std::memcpy(at, made, size);
    if (in.op[0].present()) warp.out<decltype(b_slot)>(in.op[0])[i] = old_slot;
  }
  return Step::kNext;
}

// red.global.v4.f32.add and the like: elements in registers of their own.
template <typename T>
Step vector_red(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t size = sizeof(T) * in.more_count;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint64_t address = warp.in<uint64_t>(in.op[5])[i] + static_cast<uint64_t>(in.imm);
    uint8_t* at = resolve(warp, static_cast<Space>(in.flags & 0xff), address, size, i, true);
    for (uint32_t k = 0; k < in.more_count; ++k, at += sizeof(T)) {
      T old;
      std::memcpy(&old, at, sizeof(T));
      const T b = from_slot<T>(warp.in<uint32_t>(in.more[k])[i]);
      const T made = compute<T>(in.flags >> 16, old, b, b);
      std::memcpy(at, &made, sizeof(T));
    }
  }
  return Step::kNext;
}

void decode(Decode& d, Instruction& out, bool returns) {
  const Space space = d.space();
  uint32_t operation = 0;
  while (operation < 10 && !d.take(kNames[operation])) ++operation;
  if (operation == 10) d.fail("an operation is missing");
  d.take_cache_hints();
  d.take("noftz");
  const int count = d.vector_length();
  const Type type = d.type();
  bool narrow = false;
  out.op[5] = d.address(returns ? 1 : 0, &out.imm, &narrow);
  out.flags = static_cast<uint32_t>(space) | (narrow ? kNarrow : 0) | operation << 16;
  const bool floats = type.kind == 'f' || type.kind == 'H' || type.kind == 'G' ||
                      type.kind == 'h' || type.kind == 'g';
  if (floats && operation > kMax) d.fail("that operation of floating point");
  const int first = returns ? 2 : 1;
  if (count > 1) {
    if (returns || narrow || !(type == t::f32)) d.fail("a vector of that kind");
    std::vector<Operand> all;
    for (const PtxOperand& part : d.operand(first).parts) all.push_back(d.source(part, type));
    if (static_cast<int>(all.size()) != count) d.fail("a vector of another length");
    d.set_more(out, all);
    out.run = vector_red<float>;
    return;
  }
  if (returns) out.op[0] = d.destination(0, type);
  out.op[1] = d.source(first, type);
  if (operation == kCas) out.op[2] = d.source(first + 1, type);
  if (type == t::u32 || type == t::b32) {
    out.run = atomic<uint32_t, 1>;
  } else if (type == t::s32) {
    out.run = atomic<int32_t, 1>;
  } else if (type == t::u64 || type == t::b64) {
    out.run = atomic<uint64_t, 1>;
  } else if (type == t::s64) {
    out.run = atomic<int64_t, 1>;
  } else if (type == t::b16) {
    out.run = atomic<uint16_t, 1>;
  } else if (type == t::f32) {
    out.run = atomic<float, 1>;
  } else if (type == t::f64) {
    out.run = atomic<double, 1>;
  } else if (type == t::f16) {
    out.run = atomic<Half, 1>;
  } else if (type == t::bf16) {
    out.run = atomic<Brain, 1>;
  } else if (type == t::f16x2) {
    out.run = atomic<Half, 2>;
  } else if (type == t::bf16x2) {
    out.run = atomic<Brain, 2>;
  } else {
    d.fail(std::string("type ") + type.name + " is not implemented here");
  }
}

const Opcode opcodes[] = {
    {"atom", [](Decode& d, Instruction& out) { decode(d, out, true); }},
    {"red", [](Decode& d, Instruction& out) { decode(d, out, false); }},
};

}  // namespace
}  // namespace tiercel::emulator
