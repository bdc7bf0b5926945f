// SPDX-License-Identifier: Apache-2.0
// Handlers from plain functions of one lane.
#ifndef TOOLS_EMULATOR_LANES_H_
#define TOOLS_EMULATOR_LANES_H_

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tools/emulator/state.h"

namespace tiercel::emulator {

// 16-bit floating point as it lies in registers.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

template <typename T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
inline T from_slot(Slot<T> slot) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(slot);
  } else {
    T value;
    std::memcpy(&value, &slot, sizeof(T));
    return value;
  }
}

template <typename T>
inline Slot<T> to_slot(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Slot<T>>(value);
  } else {
    Slot<T> slot = 0;
    std::memcpy(&slot, &value, sizeof(T));
    return slot;
  }
}

// Registers are the same or disjoint, so lanes never depend on each other.
template <typename D, typename F>
inline void for_lanes(Mask mask, D* out, F&& f) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int i = 0; i < kLanes; ++i) out[i] = f(i);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      if (mask >> i & 1) out[i] = f(i);
    }
  }
}

namespace lanes_detail {
template <typename Op, typename D, typename... S, size_t... k>
inline Step run(Warp& warp, const Instruction& in, Mask mask, std::index_sequence<k...>) {
  Slot<D>* out = warp.out<Slot<D>>(in.op[0]);
  const std::tuple<const Slot<S>*...> from(warp.in<Slot<S>>(in.op[k + 1])...);
  for_lanes(mask, out, [&](int i) {
    return to_slot<D>(static_cast<D>(Op::run(from_slot<S>(std::get<k>(from)[i])...)));
  });
  return Step::kNext;
}
}  // namespace lanes_detail

// op[0] = Op::run(op[1], ...), D and S being the types.
template <typename Op, typename D, typename... S>
Step lanes(Warp& warp, const Instruction& in, Mask mask) {
  return lanes_detail::run<Op, D, S...>(warp, in, mask, std::index_sequence_for<S...>());
}

// Fills the operands: `to` and then `count` of `from`.
inline void operands(Decode& d, Instruction& out, const Type& to, const Type& from, int count) {
  out.op[0] = d.destination(0, to);
  for (int i = 1; i <= count; ++i) out.op[i] = d.source(i, from);
}

// One mask from 32 tests.
template <typename F>
inline Mask collect(F&& f) {
  uint32_t all[kLanes];
  for (int i = 0; i < kLanes; ++i) all[i] = f(i) ? 1u << i : 0;
  Mask made = 0;
  for (int i = 0; i < kLanes; ++i) made |= all[i];
  return made;
}

inline void set_predicate(Warp& warp, Operand operand, Mask value, Mask mask) {
  Mask* out = warp.out<Mask>(operand);
  *out = (*out & ~mask) | (value & mask);
}

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_LANES_H_
