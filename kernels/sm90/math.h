// SPDX-License-Identifier: Apache-2.0
// Arithmetic of launch shapes.
#ifndef KERNELS_SM90_MATH_H_
#define KERNELS_SM90_MATH_H_

#include <cstdint>

namespace tiercel {

// Multiprocessors of an H100 SXM or H200; used when there is no device to ask.
inline constexpr int kDefaultMultiprocessors = 132;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace tiercel

#endif  // KERNELS_SM90_MATH_H_
