// SPDX-License-Identifier: Apache-2.0
// Floating-point arithmetic: f32, f64, f16, bf16 and pairs of the last two.
#include <cfenv>

#include "tools/emulator/float_lane.h"

namespace tiercel::emulator {
namespace {

// .ftz, .sat and .relu around an operation.
enum Around : uint32_t { kPlain = 0, kFtz = 1, kSat = 2, kRelu = 4 };

template <typename T, uint32_t around>
inline T before(T a) {
  if constexpr ((around & kFtz) != 0 && std::is_same_v<T, float>) return flush(a);
  return a;
}

template <typename T, uint32_t around>
inline T after(T a) {
  if constexpr (std::is_same_v<T, float>) {
    if constexpr ((around & kFtz) != 0) a = flush(a);
    if constexpr ((around & kSat) != 0) a = saturate(a);
  } else if constexpr (!std::is_same_v<T, double>) {
    if constexpr ((around & kSat) != 0) a = narrow<T>(saturate(widen(a)));
    if constexpr ((around & kRelu) != 0) {
      if (!(widen(a) > 0) && widen(a) == widen(a)) a = T{};
    }
  }
  return a;
}

template <typename Op, uint32_t around>
struct Arranged {
  template <typename T, typename... More>
  static T run(T a, More... more) {
    return after<T, around>(Op::run(before<T, around>(a), before<T, around>(more)...));
  }
};

template <typename Op, typename T>
struct Twice {  // the two halves of 32 bits
  template <typename... More>
  static uint32_t run(uint32_t a, More... more) {
    const T low = Op::run(T{static_cast<uint16_t>(a)}, T{static_cast<uint16_t>(more)}...);
    const T high =
        Op::run(T{static_cast<uint16_t>(a >> 16)}, T{static_cast<uint16_t>(more >> 16)}...);
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
};

// With the host's rounding set to Instruction::flags. The asm keeps the compiler from computing
// anything outside.
template <typename Op, typename T, size_t... k>
Step rounded_lanes(Warp& warp, const Instruction& in, Mask mask, std::index_sequence<k...>) {
  const Slot<T>* from[] = {warp.in<Slot<T>>(in.op[k + 1])...};
  Slot<T>* out = warp.out<Slot<T>>(in.op[0]);
  const int host = std::fegetround();
  std::fesetround(static_cast<int>(in.flags));
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    T values[] = {from_slot<T>(from[k][i])...};
    for (T& value : values) asm volatile("" : "+m"(value));
    T made = Op::run(values[k]...);
    asm volatile("" : "+m"(made));
    out[i] = to_slot<T>(made);
  }
  std::fesetround(host);
  return Step::kNext;
}

template <typename Op, typename T, int count>
Step rounded(Warp& warp, const Instruction& in, Mask mask) {
  return rounded_lanes<Op, T>(warp, in, mask, std::make_index_sequence<count>());
}

template <typename Op, typename T, int count>
constexpr Handler plain() {
  if constexpr (count == 1) {
    return lanes<Op, T, T>;
  } else if constexpr (count == 2) {
    return lanes<Op, T, T, T>;
  } else {
    return lanes<Op, T, T, T, T>;
  }
}

// Fills operands and handler for `count` sources of a type.
template <typename Op, int count>
void arrange(Decode& d, const Type& type, Instruction& out) {
  const std::string rounding = d.take_one_of({"rn", "rz", "rm", "rp"});
  const bool ftz = d.take("ftz"), sat = d.take("sat"), relu = d.take("relu");
  operands(d, out, type, type, count);
  if (!rounding.empty() && rounding != "rn") {
    if (type.kind != 'f') d.fail("that rounding of another type than f32 and f64");
    out.flags = static_cast<uint32_t>(rounding == "rz"   ? FE_TOWARDZERO
                                      : rounding == "rm" ? FE_DOWNWARD
                                                         : FE_UPWARD);
    if (type == t::f64) {
      out.run = rounded<Op, double, count>;
    } else if (ftz) {
      out.run = sat ? rounded<Arranged<Op, kFtz | kSat>, float, count>
                    : rounded<Arranged<Op, kFtz>, float, count>;
    } else {
      out.run = sat ? rounded<Arranged<Op, kSat>, float, count>
                    : rounded<Arranged<Op, kPlain>, float, count>;
    }
    return;
  }
  if (relu && type.bits > 32) d.fail(".relu of that type");
  if (type == t::f32) {
    if (relu) d.fail(".relu of that type");
    out.run = ftz ? (sat ? plain<Arranged<Op, kFtz | kSat>, float, count>()
                         : plain<Arranged<Op, kFtz>, float, count>())
                  : (sat ? plain<Arranged<Op, kSat>, float, count>()
                         : plain<Arranged<Op, kPlain>, float, count>());
  } else if (type == t::f64) {
    if (sat || ftz) d.fail(".sat or .ftz of f64");
    out.run = plain<Op, double, count>();
  } else {
    if (ftz && type.kind != 'h' && type.kind != 'H') d.fail(".ftz of that type");
    // .ftz of f16 matters only to subnormal numbers, which the GPU then flushes.
    if (ftz) d.fail(".ftz of f16");
    const auto of = [&](auto zero) {
      using T = decltype(zero);
      if (type.bits == 16) {
        return sat    ? plain<Arranged<Op, kSat>, T, count>()
               : relu ? plain<Arranged<Op, kRelu>, T, count>()
                      : plain<Op, T, count>();
      }
      return sat    ? plain<Twice<Arranged<Op, kSat>, T>, uint32_t, count>()
             : relu ? plain<Twice<Arranged<Op, kRelu>, T>, uint32_t, count>()
                    : plain<Twice<Op, T>, uint32_t, count>();
    };
    if (type.kind == 'h' || type.kind == 'H') {
      out.run = of(Half{});
    } else if (type.kind == 'g' || type.kind == 'G') {
      out.run = of(Brain{});
    } else {
      d.fail(std::string("type ") + type.name + " is not implemented here");
    }
  }
}

template <bool less>
void extreme(Decode& d, const Type& type, Instruction& out) {
  if (d.take("NaN")) {
    arrange<FloatExtreme<less, true>, 2>(d, type, out);
  } else {
    arrange<FloatExtreme<less, false>, 2>(d, type, out);
  }
}

}  // namespace

void decode_float_arithmetic(Decode& d, const Type& type, Instruction& out) {
  const std::string& name = d.ptx.opcode;
  if (name == "add") return arrange<FloatAdd, 2>(d, type, out);
  if (name == "sub") return arrange<FloatSub, 2>(d, type, out);
  if (name == "mul") return arrange<FloatMul, 2>(d, type, out);
  if (name == "mad") return arrange<FloatFma, 3>(d, type, out);
  if (name == "min") return extreme<true>(d, type, out);
  if (name == "max") return extreme<false>(d, type, out);
  if (name == "neg") return arrange<FloatNeg, 1>(d, type, out);
  if (name == "abs") return arrange<FloatAbs, 1>(d, type, out);
  if (name == "div" && type.kind == 'f') {
    if (!d.take("approx")) d.take("full");
    return arrange<FloatDiv, 2>(d, type, out);
  }
  d.fail(std::string("type ") + type.name + " is not implemented here");
}

namespace {

void decode_fma(Decode& d, Instruction& out) { arrange<FloatFma, 3>(d, d.type(), out); }

// f32 and f64, exactly rounded or approximate; the same here.
template <typename Op>
void exact_or_approx(Decode& d, Instruction& out) {
  d.take("approx");
  const Type type = d.type({t::f32, t::f64});
  const std::string rounding = d.take_one_of({"rn", "rz", "rm", "rp"});
  const bool ftz = d.take("ftz");
  operands(d, out, type, type, 1);
  if (!rounding.empty() && rounding != "rn") {
    out.flags = static_cast<uint32_t>(rounding == "rz"   ? FE_TOWARDZERO
                                      : rounding == "rm" ? FE_DOWNWARD
                                                         : FE_UPWARD);
    out.run = type == t::f64 ? rounded<Op, double, 1>
              : ftz          ? rounded<Arranged<Op, kFtz>, float, 1>
                             : rounded<Arranged<Op, kPlain>, float, 1>;
    return;
  }
  out.run = type == t::f64 ? plain<Op, double, 1>()
            : ftz          ? plain<Arranged<Op, kFtz>, float, 1>()
                           : plain<Op, float, 1>();
}

template <typename Op>
void approx(Decode& d, Instruction& out) {
  if (!d.take("approx")) d.fail(".approx is missing");
  const bool ftz = d.take("ftz");
  const Type type = d.type({t::f32, t::f64, t::f16, t::bf16, t::f16x2, t::bf16x2});
  operands(d, out, type, type, 1);
  if (type == t::f32) {
    out.run = ftz ? plain<Arranged<Op, kFtz>, float, 1>() : plain<Op, float, 1>();
  } else if (type == t::f64) {
    out.run = plain<Op, double, 1>();
  } else if (type.bits == 16) {
    out.run = type == t::f16 ? plain<Op, Half, 1>() : plain<Op, Brain, 1>();
  } else {
    out.run = type == t::f16x2 ? plain<Twice<Op, Half>, uint32_t, 1>()
                               : plain<Twice<Op, Brain>, uint32_t, 1>();
  }
}

struct Copysign {  // the sign of the first, the size of the second
  template <typename T>
  static T run(T a, T b) {
    return std::copysign(b, a);
  }
};

void decode_copysign(Decode& d, Instruction& out) {
  const Type type = d.type({t::f32, t::f64});
  operands(d, out, type, type, 2);
  out.run = type == t::f32 ? plain<Copysign, float, 2>() : plain<Copysign, double, 2>();
}

const Opcode opcodes[] = {
    {"fma", decode_fma},
    {"rcp", exact_or_approx<FloatRcp>},
    {"sqrt", exact_or_approx<FloatSqrt>},
    {"rsqrt", approx<FloatRsqrt>},
    {"sin", approx<FloatSin>},
    {"cos", approx<FloatCos>},
    {"lg2", approx<FloatLg2>},
    {"ex2", approx<FloatEx2>},
    {"tanh", approx<FloatTanh>},
    {"copysign", decode_copysign},
};

}  // namespace
}  // namespace tiercel::emulator
