// SPDX-License-Identifier: Apache-2.0
// Launches of kernels with arguments that are no Python objects: for calls that torch's dispatcher
// makes from C++.
#ifndef PYTHON_BINDINGS_NATIVE_LAUNCH_H_
#define PYTHON_BINDINGS_NATIVE_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

// What a member of a call struct holds.
enum class FieldKind : uint8_t { kTensor, kBool, kInt, kFloat32, kFloat64, kIndex, kOther };

// An argument's value.
struct NativeValue {
  enum Kind : uint8_t { kNone, kTensor, kBool, kInt, kFloat, kText } kind = kNone;
  union {
    const TensorView* tensor;
    int64_t number;  // of a bool too
    double real;
    const char* text;
  };
};

// Writes a value to a member of this kind, of so many bytes if it is an enumerator. False where
// the value does not fit: a conversion is left to Python.
bool StoreValue(const NativeValue& value, FieldKind kind, int last, size_t bytes, void* member);

// What a launch says of values that do not fit.
Status Unfit();

// A launch of LaunchOf, for NativeValues.
struct NativeLaunch {
  FieldKind Kind(size_t argument) const {
    const char* at = reinterpret_cast<const char*>(kinds) + argument * step;
    return *reinterpret_cast<const FieldKind*>(at);
  }

  const FieldKind* kinds;  // the first argument's; the next one is `step` bytes on
  size_t step;
  size_t required, count;  // of its arguments
  size_t stream;           // the argument whose device and stream it uses
  // kUnimplemented where the arguments do not fit. Needs no GIL.
  Status (*run)(const NativeValue* values, size_t count, void* stream);
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NATIVE_LAUNCH_H_
