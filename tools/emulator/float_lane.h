// SPDX-License-Identifier: Apache-2.0
// Floating-point arithmetic of one lane, as PTX rounds and names NaN.
#ifndef TOOLS_EMULATOR_FLOAT_LANE_H_
#define TOOLS_EMULATOR_FLOAT_LANE_H_

#include <immintrin.h>

#include <cmath>
#include <limits>

#include "tools/emulator/lanes.h"
#include "tools/emulator/tensor/formats.h"

namespace tiercel::emulator {

// What arithmetic on a type is done in.
template <typename T>
inline T widen(T value) {
  return value;
}
inline float widen(Half value) { return _cvtsh_ss(value.bits); }
inline float widen(Brain value) { return from_bf16(value.bits); }

template <typename T>
using Wide = decltype(widen(T{}));

// To nearest even; NaN becomes the one that the GPU makes. From double: through one rounding only.
template <typename T>
inline T narrow(Wide<T> value) {
  if constexpr (std::is_same_v<T, float>) {
    return value != value ? float_of(0x7fffffffu) : value;
  } else if constexpr (std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_same_v<T, Half>) {
    return Half{value != value
                    ? uint16_t{0x7fff}
                    : static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
  } else {
    return Brain{to_bf16(value)};
  }
}

inline float flush(float value) {
  const uint32_t bits = bits_of(value);
  return (bits & 0x7f800000u) == 0 ? float_of(bits & 0x80000000u) : value;
}
inline double flush(double value) { return value; }

template <typename T>
inline T saturate(T value) {  // NaN becomes 0
  return value > 0 ? (value < 1 ? value : T{1}) : T{0};
}

// The double nearest to a * b + c, or if that is not exact the neighbour with an odd last bit: safe
// to round again to fewer bits. a and b have at most 26.
inline double fma_to_odd(double a, double b, double c) {
  const double product = a * b, sum = product + c;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  if (error == 0 || (bits_of(sum) & 1) != 0) return sum;
  const uint64_t bits = bits_of(sum);
  return double_of((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

struct FloatAdd {
  template <typename T>
  static T run(T a, T b) {
    return narrow<T>(widen(a) + widen(b));
  }
};
struct FloatSub {
  template <typename T>
  static T run(T a, T b) {
    return narrow<T>(widen(a) - widen(b));
  }
};
struct FloatMul {
  template <typename T>
  static T run(T a, T b) {
    return narrow<T>(widen(a) * widen(b));
  }
};
struct FloatDiv {
  template <typename T>
  static T run(T a, T b) {
    return narrow<T>(widen(a) / widen(b));
  }
};
struct FloatFma {
  static float run(float a, float b, float c) { return narrow<float>(__builtin_fmaf(a, b, c)); }
  static double run(double a, double b, double c) { return __builtin_fma(a, b, c); }
  static Half run(Half a, Half b, Half c) {
    const double sum = fma_to_odd(widen(a), widen(b), widen(c));
    return Half{static_cast<uint16_t>(encode(sum, kFormatF16))};
  }
  static Brain run(Brain a, Brain b, Brain c) {
    const double sum = fma_to_odd(widen(a), widen(b), widen(c));
    return Brain{static_cast<uint16_t>(encode(sum, kFormatBf16))};
  }
};
template <bool less, bool nan>
struct FloatExtreme {
  template <typename T>
  static T run(T a, T b) {
    const auto x = widen(a), y = widen(b);
    if (x != x || y != y) {
      if (nan || (x != x && y != y)) return narrow<T>(std::numeric_limits<Wide<T>>::quiet_NaN());
      return x != x ? b : a;
    }
    if (x == y) return (std::signbit(x) == less) ? a : b;  // -0 is less than +0
    return (x < y) == less ? a : b;
  }
};
struct FloatNeg {
  static float run(float a) { return -a; }
  static double run(double a) { return -a; }
  template <typename T>
  static T run(T a) {
    return T{static_cast<uint16_t>(a.bits ^ 0x8000)};
  }
};
struct FloatAbs {
  static float run(float a) { return std::fabs(a); }
  static double run(double a) { return std::fabs(a); }
  template <typename T>
  static T run(T a) {
    return T{static_cast<uint16_t>(a.bits & 0x7fff)};
  }
};
struct FloatRcp {
  template <typename T>
  static T run(T a) {
    return narrow<T>(1 / a);
  }
};
struct FloatSqrt {
  static float run(float a) { return narrow<float>(std::sqrt(a)); }
  static double run(double a) { return std::sqrt(a); }
};

// Approximations: the value, rounded once. The GPU is within one or two units of it.
#define TIERCEL_APPROXIMATION(name, value)            \
  struct name {                                       \
    template <typename T>                             \
    static T run(T a) {                               \
      const double x = static_cast<double>(widen(a)); \
      return narrow<T>(static_cast<Wide<T>>(value));  \
    }                                                 \
  }
TIERCEL_APPROXIMATION(FloatRsqrt, 1 / std::sqrt(x));
TIERCEL_APPROXIMATION(FloatSin, std::sin(x));
TIERCEL_APPROXIMATION(FloatCos, std::cos(x));
TIERCEL_APPROXIMATION(FloatLg2, std::log2(x));
TIERCEL_APPROXIMATION(FloatEx2, std::exp2(x));
TIERCEL_APPROXIMATION(FloatTanh, std::tanh(x));
#undef TIERCEL_APPROXIMATION

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_FLOAT_LANE_H_
