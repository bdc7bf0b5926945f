// SPDX-License-Identifier: Apache-2.0
// An argument of a native function that comes without Python.
#ifndef PYTHON_BINDINGS_NATIVE_VALUE_H_
#define PYTHON_BINDINGS_NATIVE_VALUE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

struct NativeValue {
  enum Kind { kNone, kTensor, kBool, kInt, kFloat } kind = kNone;
  const TensorView* tensor = nullptr;
  int64_t integer = 0;  // of a bool, too
  double number = 0;

  static NativeValue Of(const TensorView* view) { return {kTensor, view}; }
  static NativeValue Of(bool value) { return {kBool, nullptr, value}; }
  static NativeValue Of(int64_t value) { return {kInt, nullptr, value}; }
  static NativeValue Of(double value) { return {kFloat, nullptr, 0, value}; }

  // False for a value of another type. Ints convert to float, as in Python.
  template <typename Value>
  bool Read(Value* value) const {
    if constexpr (std::is_same_v<Value, bool>) {
      if (kind != kBool) return false;
      *value = integer != 0;
    } else if constexpr (std::is_floating_point_v<Value>) {
      if (kind != kFloat && kind != kInt) return false;
      *value = static_cast<Value>(kind == kFloat ? number : static_cast<double>(integer));
    } else {
      if (kind != kInt && kind != kBool) return false;
      *value = static_cast<Value>(integer);
    }
    return true;
  }
};

// A launch on a stream.
using NativeFunction = Status (*)(const NativeValue* values, size_t count, void* stream);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NATIVE_VALUE_H_
