// SPDX-License-Identifier: Apache-2.0
// The ops as native functions of torch's dispatcher, for programs without Python: C++ programs and
// AOTInductor's packages.
//
//   native_ops.txt  the ops' declarations as text; tests/support/native_ops.py writes it from them
//   native_table.cc reads that text
//   native_op.cc    runs a call, from torch's stack of values to the launch
//   torch_shim.h    torch's C interface
#ifndef PYTHON_BINDINGS_NATIVE_OP_H_
#define PYTHON_BINDINGS_NATIVE_OP_H_

#include <string>
#include <utility>
#include <vector>

#include "python/bindings/call_layout.h"
#include "python/bindings/native_value.h"

namespace tiercel::python {

struct NativeArgument {
  enum Kind { kTensor, kString, kBool, kInt, kFloat, kDType } kind;
  bool optional;
  bool written;
  std::string name;
};

// One argument of the native function.
struct NativeSlot {
  enum Kind { kArgument, kOutput, kLookup, kConstant } kind = kConstant;
  ptrdiff_t index = 0;
  NativeValue constant;
  std::vector<std::pair<std::string, NativeValue>> table;  // by the argument's text, see KeyOf
};

struct NativeOp {
  std::string name;  // "rms_norm" or "rms_norm.out"
  std::string schema;
  NativeFunction function = nullptr;
  std::vector<NativeArgument> arguments;  // in the schema's order
  Layout layout{};
  std::vector<OutputOf<const char*>> outputs;  // dtypes by their names
  std::vector<NativeSlot> slots;
};

// The ops that run without Python, as native_ops.txt has them.
const std::vector<NativeOp>& NativeOps();

// Only one of Python and C++ registers the ops of a process: null for the first to ask, else the
// name of that owner.
const char* ClaimOps(const char* owner);

}  // namespace tiercel::python

// Registers the ops with the dispatcher of the libtorch that the process has loaded. Returns null,
// or the text of an error, which lives as long as the process. Another call returns an error.
extern "C" __attribute__((visibility("default"))) const char* tiercel_register_torch_ops();

#endif  // PYTHON_BINDINGS_NATIVE_OP_H_
