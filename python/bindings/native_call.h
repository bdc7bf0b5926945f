// SPDX-License-Identifier: Apache-2.0
// An operator that C++ calls without Python, as data, and one call of it.
#ifndef PYTHON_BINDINGS_NATIVE_CALL_H_
#define PYTHON_BINDINGS_NATIVE_CALL_H_

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings/eager_rules.h"
#include "python/bindings/native_launch.h"
#include "python/bindings/torch_shim.h"

namespace tiercel::python {

// An argument as the dispatcher passes it.
struct Argument {
  enum Kind : uint8_t { kTensor, kInt, kFloat, kBool, kDType, kText } kind;
  bool optional;
  size_t index;  // on the stack
};

// A value that outlives calls.
struct Constant {
  NativeValue value;
  std::string text;
};

struct NativeSlot {
  Slot::Kind kind;
  Py_ssize_t index;
  NativeValue constant;
  std::vector<std::pair<Constant, NativeValue>> table;
};

// torch's codes for the dtypes of an Output.
struct OutputDTypes {
  int32_t dtype, other, unwanted, instead;
};

struct NativeOp {
  std::string name;
  EagerCall* call;
  PyObject* native;  // what `call` launched when the operator was registered
  const NativeLaunch* launch;
  bool autograd;  // comes before autograd
  bool emulated;  // takes tensors on the CPU for a GPU's
  std::vector<Argument> arguments;
  std::vector<NativeSlot> slots;
  std::vector<OutputDTypes> outputs;
  std::vector<Py_ssize_t> mutated;
};

inline constexpr int kMostDevices = 64;

// Sets whether calls may use a CUDA device; -1 stands for all devices that were named.
void SetNativeDevice(int device, bool ready);

// Runs a call whose arguments are on the stack and puts the results there; throws torch's
// exception.
void RunNativeOp(const NativeOp& op, StackValue* stack, uint64_t results);

// Where an argument's own value lies: an optional one is in a box.
inline StackValue* StackValueOf(const Argument& argument, StackValue* stack) {
  StackValue* at = stack + argument.index;
  return argument.optional ? reinterpret_cast<StackValue*>(*at) : at;
}

inline void FreeBox(const TorchShim& shim, const Argument& argument, StackValue* stack) {
  if (!argument.optional || stack[argument.index] == 0) return;
  auto* box = reinterpret_cast<StackValue*>(stack[argument.index]);
  if (shim.torch_delete_stable_ivalue != nullptr) {
    shim.torch_delete_stable_ivalue(box);
  } else {
    delete box;
  }
}

// How a call goes on to Python.
struct PythonHooks {
  PyObject* tensors_of_handles;  // (list) -> list; takes the handles
  PyObject* handle_of_tensor;    // gives a new one
  std::map<int32_t, PyObject*> dtypes;
};

// Before the first call of an operator; they are never freed, for Python may be gone at exit.
void SetPythonHooks(PythonHooks* hooks);
bool HasPythonHooks();

// The call in Python. False with a Python exception; the arguments are gone then, too. Wants the
// GIL.
bool CallPython(const TorchShim& shim, const NativeOp& op, StackValue* stack, uint64_t results);

// How many calls there were.
int64_t CallsThroughPython();

// Takes the pending Python exception and returns its text. Whoever called the dispatcher from
// Python gets the exception as it was.
std::string TakeError();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NATIVE_CALL_H_
