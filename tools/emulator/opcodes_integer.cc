// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic.
#include <algorithm>
#include <limits>

#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;
template <typename T>
using Wider = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

struct Add {
  template <typename T>
  static T run(T a, T b) {
    return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};
struct Sub {
  template <typename T>
  static T run(T a, T b) {
    return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  }
};
struct AddSat {
  static int32_t run(int32_t a, int32_t b) {
    const int64_t sum = int64_t{a} + b;
    return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
  }
};
struct SubSat {
  static int32_t run(int32_t a, int32_t b) {
    const int64_t sum = int64_t{a} - b;
    return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
  }
};
struct MulLo {
  template <typename T>
  static T run(T a, T b) {
    // uint64_t first: 16-bit unsigned operands would multiply as int.
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
struct MulHi {
  template <typename T>
  static T run(T a, T b) {
    return static_cast<T>((static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b)) >> (sizeof(T) * 8));
  }
};
struct MulWide {
  template <typename T>
  static Wider<T> run(T a, T b) {
    return static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b);
  }
};
struct MadLo {
  template <typename T>
  static T run(T a, T b, T c) {
    return Add::run<T>(MulLo::run<T>(a, b), c);
  }
};
struct MadHi {
  template <typename T>
  static T run(T a, T b, T c) {
    return Add::run<T>(MulHi::run<T>(a, b), c);
  }
};
struct MadWide {
  template <typename T, typename W>
  static W run(T a, T b, W c) {
    return Add::run<W>(static_cast<W>(MulWide::run<T>(a, b)), c);
  }
};
// Division by zero gives all ones, as on the GPU.
struct Div {
  template <typename T>
  static T run(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return Sub::run<T>(0, a);
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <typename T>
  static T run(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return 0;
    }
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <typename T>
  static T run(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <typename T>
  static T run(T a, T b) {
    return a > b ? a : b;
  }
};
template <typename Op>
struct Relu {
  template <typename T>
  static T run(T a, T b) {
    return Max::run<T>(Op::template run<T>(a, b), T{0});
  }
};
template <typename Op, typename T>
struct Pairwise {  // u16x2, s16x2
  static uint32_t run(uint32_t a, uint32_t b) {
    const auto low =
        static_cast<uint16_t>(Op::template run<T>(static_cast<T>(a), static_cast<T>(b)));
    const auto high = static_cast<uint16_t>(
        Op::template run<T>(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return low | static_cast<uint32_t>(high) << 16;
  }
};
struct Neg {
  template <typename T>
  static T run(T a) {
    return Sub::run<T>(0, a);
  }
};
struct Abs {
  template <typename T>
  static T run(T a) {
    return a < 0 ? Sub::run<T>(0, a) : a;
  }
};
struct Sad {
  template <typename T>
  static T run(T a, T b, T c) {
    return Add::run<T>(a < b ? Sub::run<T>(b, a) : Sub::run<T>(a, b), c);
  }
};

// Calls f with a value of the type's C++ type.
template <typename F>
void with_type(Decode& d, const Type& type, F&& f) {
  if (type == t::u16) return f(uint16_t{});
  if (type == t::s16) return f(int16_t{});
  if (type == t::u32) return f(uint32_t{});
  if (type == t::s32) return f(int32_t{});
  if (type == t::u64) return f(uint64_t{});
  if (type == t::s64) return f(int64_t{});
  d.fail(std::string("type ") + type.name + " is not implemented here");
}

}  // namespace

// What of add, sub, mul, ... is not of integers: opcodes_float.cc.
void decode_float_arithmetic(Decode& d, const Type& type, Instruction& out);

namespace {

bool is_integer(const Type& type) {
  return type.kind == 'u' || type.kind == 's' || type.kind == 'b';
}

template <typename Op>
void binary(Decode& d, Instruction& out) {
  const Type type = d.type();
  if constexpr (std::is_same_v<Op, Min> || std::is_same_v<Op, Max>) {
    if ((type == t::s32 || type == t::s16x2) && d.take("relu")) {
      operands(d, out, type, type, 2);
      using W = uint32_t;
      out.run = type == t::s32 ? lanes<Relu<Op>, int32_t, int32_t, int32_t>
                               : lanes<Pairwise<Relu<Op>, int16_t>, W, W, W>;
      return;
    }
  }
  if (type.kind == 'x') {
    operands(d, out, type, type, 2);
    out.run = type == t::u16x2 ? lanes<Pairwise<Op, uint16_t>, uint32_t, uint32_t, uint32_t>
                               : lanes<Pairwise<Op, int16_t>, uint32_t, uint32_t, uint32_t>;
    return;
  }
  if (!is_integer(type)) return decode_float_arithmetic(d, type, out);
  operands(d, out, type, type, 2);
  if constexpr (std::is_same_v<Op, Add> || std::is_same_v<Op, Sub>) {
    if (d.take("sat")) {
      using Saturated = std::conditional_t<std::is_same_v<Op, Add>, AddSat, SubSat>;
      if (!(type == t::s32)) d.fail(".sat of another type than s32");
      out.run = lanes<Saturated, int32_t, int32_t, int32_t>;
      return;
    }
  }
  with_type(d, type, [&](auto zero) {
    using T = decltype(zero);
    out.run = lanes<Op, T, T, T>;
  });
}

template <typename Op>
void unary(Decode& d, Instruction& out) {
  const Type type = d.type();
  if (!is_integer(type)) return decode_float_arithmetic(d, type, out);
  operands(d, out, type, type, 1);
  with_type(d, type, [&](auto zero) {
    using T = decltype(zero);
    out.run = lanes<Op, T, T>;
  });
}

Type widened(const Type& type) {
  const std::string name = std::string(1, type.kind) + std::to_string(2 * type.bits);
  return *find_type(name);
}

void decode_mul(Decode& d, Instruction& out) {
  const std::string part = d.take_one_of({"lo", "hi", "wide"});
  const Type type = d.type();
  if (!is_integer(type)) return decode_float_arithmetic(d, type, out);
  if (part.empty()) d.fail(".lo, .hi or .wide is missing");
  operands(d, out, part == "wide" ? widened(type) : type, type, 2);
  with_type(d, type, [&](auto zero) {
    using T = decltype(zero);
    if (part == "lo") {
      out.run = lanes<MulLo, T, T, T>;
    } else if (part == "hi") {
      out.run = lanes<MulHi, T, T, T>;
    } else if constexpr (sizeof(T) < 8) {
      out.run = lanes<MulWide, Wider<T>, T, T>;
    }
  });
}

void decode_mad(Decode& d, Instruction& out) {
  const std::string part = d.take_one_of({"lo", "hi", "wide"});
  const Type type = d.type();
  if (!is_integer(type)) return decode_float_arithmetic(d, type, out);
  if (part.empty()) d.fail(".lo, .hi or .wide is missing");
  const Type to = part == "wide" ? widened(type) : type;
  operands(d, out, to, type, 2);
  out.op[3] = d.source(3, to);
  with_type(d, type, [&](auto zero) {
    using T = decltype(zero);
    if (part == "lo") {
      out.run = lanes<MadLo, T, T, T, T>;
    } else if (part == "hi") {
      out.run = lanes<MadHi, T, T, T, T>;
    } else if constexpr (sizeof(T) < 8) {
      out.run = lanes<MadWide, Wider<T>, T, T, Wider<T>>;
    }
  });
}

void decode_sad(Decode& d, Instruction& out) {
  const Type type = d.type();
  operands(d, out, type, type, 3);
  with_type(d, type, [&](auto zero) {
    using T = decltype(zero);
    out.run = lanes<Sad, T, T, T, T>;
  });
}

// Carries: one bit a lane, between neighbouring instructions.
template <bool subtract, bool carry_in, bool carry_out, typename T>
Step with_carry(Warp& warp, const Instruction& in, Mask mask) {
  const T *a = warp.in<T>(in.op[1]), *b = warp.in<T>(in.op[2]);
  T* out = warp.out<T>(in.op[0]);
  const Mask before = warp.predicate(in.op[3]);
  Mask carries = 0;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const T carry = carry_in ? static_cast<T>(before >> i & 1) : 0;
    T value;
    const bool first = subtract ? __builtin_sub_overflow(a[i], b[i], &value)
                                : __builtin_add_overflow(a[i], b[i], &value);
    T sum;
    const bool second = subtract ? __builtin_sub_overflow(value, carry, &sum)
                                 : __builtin_add_overflow(value, carry, &sum);
    out[i] = sum;
    carries |= static_cast<Mask>(first || second) << i;
  }
  if (carry_out) set_predicate(warp, in.op[3], carries, mask);
  return Step::kNext;
}

template <bool subtract, bool carry_in>
void carry(Decode& d, Instruction& out) {
  const bool carry_out = d.take("cc");
  const Type type = d.type({t::u32, t::s32, t::b32, t::u64, t::s64, t::b64});
  operands(d, out, type, type, 2);
  Operand& flag = d.kernel().carry;
  if (!flag.present()) flag = d.scratch(1);
  out.op[3] = flag;
  if (type.bits == 32) {
    out.run = carry_out ? with_carry<subtract, carry_in, true, uint32_t>
                        : with_carry<subtract, carry_in, false, uint32_t>;
  } else {
    out.run = carry_out ? with_carry<subtract, carry_in, true, uint64_t>
                        : with_carry<subtract, carry_in, false, uint64_t>;
  }
}

struct Dp4a {
  template <typename A, typename B>
  static uint32_t sum(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 32; i += 8) {
      c += static_cast<uint32_t>(int32_t{static_cast<A>(a >> i)} * int32_t{static_cast<B>(b >> i)});
    }
    return c;
  }
};
template <typename A, typename B>
struct Dp4aOf {
  static uint32_t run(uint32_t a, uint32_t b, uint32_t c) { return Dp4a::sum<A, B>(a, b, c); }
};

void decode_dp4a(Decode& d, Instruction& out) {
  const Type a = d.type({t::u32, t::s32}), b = d.type({t::u32, t::s32});
  operands(d, out, t::b32, t::b32, 3);
  using U = uint8_t;
  using S = int8_t;
  using W = uint32_t;
  if (a.is_signed()) {
    out.run = b.is_signed() ? lanes<Dp4aOf<S, S>, W, W, W, W> : lanes<Dp4aOf<S, U>, W, W, W, W>;
  } else {
    out.run = b.is_signed() ? lanes<Dp4aOf<U, S>, W, W, W, W> : lanes<Dp4aOf<U, U>, W, W, W, W>;
  }
}

const Opcode opcodes[] = {
    {"add", binary<Add>},
    {"sub", binary<Sub>},
    {"mul", decode_mul},
    {"mad", decode_mad},
    {"div", binary<Div>},
    {"rem", binary<Rem>},
    {"min", binary<Min>},
    {"max", binary<Max>},
    {"neg", unary<Neg>},
    {"abs", unary<Abs>},
    {"sad", decode_sad},
    {"dp4a", decode_dp4a},
    {"add", carry<false, false>, "cc"},
    {"addc", carry<false, true>},
    {"sub", carry<true, false>, "cc"},
    {"subc", carry<true, true>},
};

}  // namespace
}  // namespace tiercel::emulator
