// SPDX-License-Identifier: Apache-2.0
// setp, set and testp.
#include "tools/emulator/float_lane.h"

namespace tiercel::emulator {
namespace {

// What a comparison answers for less, equal, greater and (floating point) unordered.
enum Answer : uint32_t { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8 };

struct Comparison {
  const char* name;
  uint32_t answers;
  bool floats_only;
};
const Comparison kComparisons[] = {
    {"eq", kEqual, false},
    {"ne", kLess | kGreater, false},
    {"lt", kLess, false},
    {"le", kLess | kEqual, false},
    {"gt", kGreater, false},
    {"ge", kGreater | kEqual, false},
    {"lo", kLess, false},
    {"ls", kLess | kEqual, false},
    {"hi", kGreater, false},
    {"hs", kGreater | kEqual, false},
    {"equ", kEqual | kUnordered, true},
    {"neu", kLess | kGreater | kUnordered, true},
    {"ltu", kLess | kUnordered, true},
    {"leu", kLess | kEqual | kUnordered, true},
    {"gtu", kGreater | kUnordered, true},
    {"geu", kGreater | kEqual | kUnordered, true},
    {"num", kLess | kEqual | kGreater, true},
    {"nan", kUnordered, true},
};

template <typename T, uint32_t answers>
bool compare(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    switch (answers & 7) {
      case kEqual:
        return a == b;
      case kLess | kGreater:
        return a != b;
      case kLess:
        return a < b;
      case kLess | kEqual:
        return a <= b;
      case kGreater:
        return a > b;
      default:
        return a >= b;
    }
  } else {
    const auto x = widen(a), y = widen(b);
    return ((answers & kLess) != 0 && x < y) || ((answers & kEqual) != 0 && x == y) ||
           ((answers & kGreater) != 0 && x > y) ||
           ((answers & kUnordered) != 0 && (x != x || y != y));
  }
}

// flags of the handlers: how a further predicate is combined, and whether the second result is.
enum Combine : uint32_t { kNone, kAnd, kOr, kXor };

Mask combine(uint32_t how, Mask value, Mask other) {
  switch (how) {
    case kAnd:
      return value & other;
    case kOr:
      return value | other;
    case kXor:
      return value ^ other;
    default:
      return value;
  }
}

template <typename T, uint32_t answers, bool ftz>
Step setp(Warp& warp, const Instruction& in, Mask mask) {
  const Slot<T>*a = warp.in<Slot<T>>(in.op[2]), *b = warp.in<Slot<T>>(in.op[3]);
  const Mask value = collect([&](int i) {
    T x = from_slot<T>(a[i]), y = from_slot<T>(b[i]);
    if constexpr (ftz) x = flush(x), y = flush(y);
    return compare<T, answers>(x, y);
  });
  if (in.flags == kNone && !in.op[1].present()) {
    set_predicate(warp, in.op[0], value, mask);
    return Step::kNext;
  }
  const Mask other =
      in.op[4].present() ? warp.predicate(in.op[4]) ^ static_cast<Mask>(in.imm) : kAllLanes;
  const Mask first = combine(in.flags, value, other), second = combine(in.flags, ~value, other);
  set_predicate(warp, in.op[0], first, mask);
  if (in.op[1].present()) set_predicate(warp, in.op[1], second, mask);
  return Step::kNext;
}

template <typename T, bool ftz, size_t... k>
Handler setp_of(uint32_t which, std::index_sequence<k...>) {
  // All sets of answers that exist, of integers the first eight only.
  static constexpr uint32_t kSets[] = {2, 5, 1, 3, 4, 6, 10, 13, 9, 11, 12, 14, 7, 8};
  Handler found = nullptr;
  ((kSets[k] == which ? void(found = setp<T, kSets[k], ftz>) : void()), ...);
  return found;
}

const Comparison* take_comparison(Decode& d) {
  for (const Comparison& one : kComparisons) {
    if (d.take(one.name)) return &one;
  }
  d.fail("a comparison is missing");
}

void decode_setp(Decode& d, Instruction& out) {
  const Comparison* comparison = take_comparison(d);
  out.flags = d.take("and") ? kAnd : d.take("or") ? kOr : d.take("xor") ? kXor : kNone;
  const bool ftz = d.take("ftz");
  const Type type = d.type();
  const PtxOperand& to = d.operand(0);
  if (to.kind == PtxOperand::kPair) {
    const auto part = [&](const PtxOperand& one) {
      return one.kind == PtxOperand::kSink ? d.scratch(1) : d.source(one, t::pred);
    };
    out.op[0] = part(to.parts[0]), out.op[1] = part(to.parts[1]);
  } else {
    out.op[0] = d.predicate(0);
  }
  out.op[2] = d.source(1, type), out.op[3] = d.source(2, type);
  if (out.flags != kNone) {
    out.op[4] = d.predicate(3);
    out.imm = d.negated(3) ? kAllLanes : 0;
  }
  const auto of = [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_integral_v<T>) {
      out.run = setp_of<T, false>(comparison->answers, std::make_index_sequence<6>());
    } else if constexpr (std::is_same_v<T, float>) {
      out.run = ftz ? setp_of<T, true>(comparison->answers, std::make_index_sequence<14>())
                    : setp_of<T, false>(comparison->answers, std::make_index_sequence<14>());
    } else {
      if (ftz) d.fail(".ftz of that type");
      out.run = setp_of<T, false>(comparison->answers, std::make_index_sequence<14>());
    }
  };
  if (type == t::f32) return of(float{});
  if (type == t::f64) return of(double{});
  if (type == t::f16) return of(Half{});
  if (type == t::bf16) return of(Brain{});
  if (comparison->floats_only) d.fail("that comparison of integers");
  if (type == t::u16 || type == t::b16) return of(uint16_t{});
  if (type == t::s16) return of(int16_t{});
  if (type == t::u32 || type == t::b32) return of(uint32_t{});
  if (type == t::s32) return of(int32_t{});
  if (type == t::u64 || type == t::b64) return of(uint64_t{});
  if (type == t::s64) return of(int64_t{});
  d.fail(std::string("type ") + type.name + " is not implemented here");
}

// All bits of each half of the result for which the comparison holds.
template <typename T, uint32_t answers>
struct SetPairs {
  static uint32_t run(uint32_t a, uint32_t b) {
    const auto half = [&](int shift) {
      const bool holds = compare<T, answers>(T{static_cast<uint16_t>(a >> shift)},
                                             T{static_cast<uint16_t>(b >> shift)});
      return holds ? 0xffffu << shift : 0u;
    };
    return half(0) | half(16);
  }
};

void decode_set(Decode& d, Instruction& out) {
  const Comparison* comparison = take_comparison(d);
  d.type({t::u32});
  const Type type = d.type({t::f16x2, t::bf16x2});
  if (comparison->answers != (kGreater | kEqual)) d.fail("only ge of pairs is implemented here");
  operands(d, out, t::u32, type, 2);
  constexpr uint32_t kAtLeast = kGreater | kEqual;
  out.run = type == t::f16x2 ? lanes<SetPairs<Half, kAtLeast>, uint32_t, uint32_t, uint32_t>
                             : lanes<SetPairs<Brain, kAtLeast>, uint32_t, uint32_t, uint32_t>;
}

template <typename T>
Step testp(Warp& warp, const Instruction& in, Mask mask) {
  const Slot<T>* a = warp.in<Slot<T>>(in.op[1]);
  const Mask value = collect([&](int i) {
    const T x = from_slot<T>(a[i]);
    switch (in.flags) {
      case 0:
        return std::isfinite(x);
      case 1:
        return std::isinf(x);
      case 2:
        return x == x;
      case 3:
        return x != x;
      case 4:
        return std::isnormal(x);
      default:
        return std::fpclassify(x) == FP_SUBNORMAL;
    }
  });
  set_predicate(warp, in.op[0], value, mask);
  return Step::kNext;
}

void decode_testp(Decode& d, Instruction& out) {
  static const char* const kTests[] = {"finite",     "infinite", "number",
                                       "notanumber", "normal",   "subnormal"};
  out.flags = 6;
  for (uint32_t i = 0; i < 6; ++i) {
    if (d.take(kTests[i])) out.flags = i;
  }
  if (out.flags == 6) d.fail("a test is missing");
  const Type type = d.type({t::f32, t::f64});
  out.op[0] = d.predicate(0), out.op[1] = d.source(1, type);
  out.run = type == t::f32 ? testp<float> : testp<double>;
}

const Opcode opcodes[] = {{"set", decode_set}, {"setp", decode_setp}, {"testp", decode_testp}};

}  // namespace
}  // namespace tiercel::emulator
