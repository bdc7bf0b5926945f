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

// How an argument gets to its member of a call struct.
struct FieldRule {
  FieldKind kind = FieldKind::kOther;
  bool may_be_none = false;    // a tensor
  bool keeps_default = false;  // None leaves the call's default
  uint8_t bytes = 0;           // of an enumerator; `last` is the largest one
  int last = 0;
  void* (*member)(void* call) = nullptr;  // null where it has a reader of its own
};

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

// The rules of a launch's arguments; the next one is `step` bytes on.
struct FieldRules {
  const FieldRule& operator[](size_t argument) const {
    const char* at = reinterpret_cast<const char*>(first) + argument * step;
    return *reinterpret_cast<const FieldRule*>(at);
  }

  const FieldRule* first;
  size_t step;
};

// Writes values to a call struct. False where one does not fit: a conversion is left to Python.
bool FillCall(const FieldRules& rules, const NativeValue* values, size_t count, void* call);

// What a launch says of values that do not fit.
Status Unfit();

// A launch of LaunchOf, for NativeValues.
struct NativeLaunch {
  FieldRules rules;
  size_t required, count;  // of its arguments
  size_t stream;           // the argument whose device and stream it uses
  // kUnimplemented where the arguments do not fit. Needs no GIL.
  Status (*run)(const NativeValue* values, size_t count, void* stream);
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NATIVE_LAUNCH_H_
