// SPDX-License-Identifier: Apache-2.0
// The functions of a kernel family, as a table: launches, plans and loads, each bound to a host
// function of kernels/. Docstrings, signatures and the module's stub follow from it.
#ifndef PYTHON_BINDINGS_FUNCTIONS_H_
#define PYTHON_BINDINGS_FUNCTIONS_H_

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/status.h"
#include "python/bindings/arguments.h"
#include "python/bindings/call.h"

namespace tiercel::python {

PyObject* ToPython(const char* text);  // null reads ""
PyObject* ToPython(bool value);
PyObject* ToPython(int value);
PyObject* ToPython(unsigned value);
PyObject* ToPython(int64_t value);

// One entry of the dict that a plan becomes.
template <typename Plan>
struct PlanField {
  const char* name;
  const char* type;
  PyObject* (*get)(const Plan&);
};

template <auto... kPath>
constexpr PlanField<ClassOf<kPath...>> Entry(const char* name) {
  using Plan = ClassOf<kPath...>;
  return {name, TypeName<ValueOf<kPath...>>(),
          [](const Plan& plan) { return ToPython(MemberAt<kPath...>(plan)); }};
}

// Two members as a tuple.
template <auto kFirst, auto kSecond>
constexpr PlanField<ClassOf<kFirst>> Pair(const char* name) {
  using Plan = ClassOf<kFirst>;
  return {name, "tuple[int, int]",
          [](const Plan& plan) { return Py_BuildValue("(II)", plan.*kFirst, plan.*kSecond); }};
}

// `name` is the dict's type in the stub.
template <typename Plan_>
struct PlanDict {
  using Plan = Plan_;

  template <size_t kFields>
  constexpr PlanDict(const char* name_, const PlanField<Plan> (&fields_)[kFields])
      : name(name_), fields(fields_), count(kFields) {}

  const char* name;
  const PlanField<Plan>* fields;
  size_t count;

  PyObject* Make(const Plan& plan) const {
    PyObject* dict = PyDict_New();
    for (size_t i = 0; dict != nullptr && i < count; ++i) {
      PyObject* value = fields[i].get(plan);
      if (value == nullptr || PyDict_SetItemString(dict, fields[i].name, value) != 0) {
        Py_CLEAR(dict);
      }
      Py_XDECREF(value);
    }
    return dict;
  }
};

// One function of the module. `describe` appends "name: type" of each argument; where it is null,
// `arguments` has them. `returns` is a type; a plan's also has a class to be declared.
struct Function {
  const char* name;
  FastCall call;  // null for a function of one argument, which is `call_one` then
  const char* text;
  const char* returns;
  void (*describe)(std::string*) = nullptr;
  const char* arguments = "";
  void (*declare)(std::string*) = nullptr;
  PyCFunction call_one = nullptr;
  NativeFunction native = nullptr;  // a launch of the same arguments without Python
};

void DescribeArgument(std::string* text, const char* name, const char* type, bool may_be_absent);
void DeclareField(std::string* text, const char* name, const char* type);

template <const auto& kParameters>
void Describe(std::string* text) {
  for (size_t i = 0; i < kParameters.count; ++i) {
    const auto& field = kParameters.fields[i];
    DescribeArgument(text, field.name, field.type, field.may_be_absent);
  }
}

template <const auto& kDict>
void Declare(std::string* text) {
  for (size_t i = 0; i < kDict.count; ++i) {
    DeclareField(text, kDict.fields[i].name, kDict.fields[i].type);
  }
}

template <const auto& kParameters, auto kLaunch, auto kCheck>
PyObject* RunLaunch(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kParameters> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  if constexpr (!std::is_null_pointer_v<decltype(kCheck)>) {
    if (const Status status = kCheck(parsed.call); !status.ok()) return Raise(status);
  }
  using Call = typename Parsed<kParameters>::Call;
  PyObject* result;
  if constexpr (std::is_invocable_v<decltype(kLaunch), const Call&, void*, int64_t*>) {
    int64_t needed = 0;
    result = Launch(parsed.of_stream(),
                    [&](void* stream) { return kLaunch(parsed.call, stream, &needed); });
    if (result != nullptr) {
      Py_DECREF(result);
      result = PyLong_FromLongLong(needed);
    }
  } else {
    result = Launch(parsed.of_stream(), [&](void* stream) { return kLaunch(parsed.call, stream); });
  }
  if constexpr (kParameters.after != nullptr) {
    if (result != nullptr) kParameters.after();
  }
  return result;
}

// True if the arguments can be read without Python.
template <const auto& kParameters>
constexpr bool IsNative() {
  for (size_t i = 0; i < kParameters.count; ++i) {
    const auto& field = kParameters.fields[i];
    if (!field.is_tensor && field.native == nullptr && !field.may_be_absent) return false;
  }
  return true;
}

Status WrongCount(const char* op, size_t expected, size_t count);
Status WrongValue(const char* op, const char* name, const char* type);

template <const auto& kParameters, auto kLaunch>
Status RunNative(const NativeValue* values, size_t count, void* stream) {
  constexpr size_t kRequired = kParameters.required();
  if (count < kRequired || count > kParameters.count) {
    return WrongCount(kParameters.op, kRequired, count);
  }
  auto call = kParameters.call;
  for (size_t i = 0; i < count; ++i) {
    const auto& field = kParameters.fields[i];
    const NativeValue& value = values[i];
    const bool is_none = value.kind == NativeValue::kNone;
    if (!field.is_tensor) {
      if (field.native == nullptr || !field.native(value, &call)) {
        return WrongValue(kParameters.op, field.name, field.type);
      }
    } else if (value.kind == NativeValue::kTensor) {
      field.tensor(&call, value.tensor);
    } else if (!is_none || !field.may_be_none) {
      return WrongValue(kParameters.op, field.name, "Tensor");
    }
  }
  return kLaunch(call, stream);
}

// The multiprocessors of the device that a tensor is on; an H100's where there is none to ask.
int MultiprocessorsOf(const TensorView& tensor);

template <const auto& kParameters, auto kPlan, const auto& kDict>
PyObject* RunPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kParameters> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  using Call = typename Parsed<kParameters>::Call;
  typename std::decay_t<decltype(kDict)>::Plan plan{};
  Status status;
  if constexpr (std::is_invocable_v<decltype(kPlan), const Call&, decltype(&plan)>) {
    status = kPlan(parsed.call, &plan);
  } else {
    status = kPlan(parsed.call, MultiprocessorsOf(parsed.of_stream().view()), &plan);
  }
  if (!status.ok()) return Raise(status);
  if constexpr (kParameters.after != nullptr) kParameters.after();
  return kDict.Make(plan);
}

template <const auto& kParameters, auto kFunction>
PyObject* RunFunction(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kParameters> parsed;
  return parsed.Read(values, count) ? kFunction(parsed.call) : nullptr;
}

// Loads what one of these names: a host function, a table of kernels, a kernel.
inline Status LoadAll(Status (*load)(int), int device) { return load(device); }
inline Status LoadAll(const Kernel& (*kernel)(), int device) { return kernel().load(device); }
template <typename Entry>
Status LoadAll(const Entry* (*table)(int*), int device) {
  return KernelTable(table).load_all(device);
}

template <auto... kLoads>
Status LoadEach(int device) {
  Status status;
  static_cast<void>(((status = LoadAll(kLoads, device)).ok() && ...));
  return status;
}

// A launch on the current stream: `kLaunch` is a Status (const Call&, void* stream), or one with an
// int64_t* for the length of a workspace that it needs first, which is returned then. `kCheck`, a
// Status (const Call&), comes before the stream is asked for.
template <const auto& kParameters, auto kLaunch, auto kCheck = nullptr>
constexpr Function LaunchOf(const char* name, const char* text) {
  using Call = typename Parsed<kParameters>::Call;
  constexpr bool kReturns = std::is_invocable_v<decltype(kLaunch), const Call&, void*, int64_t*>;
  constexpr bool kChecks = !std::is_null_pointer_v<decltype(kCheck)>;
  Function function{name, RunLaunch<kParameters, kLaunch, kCheck>, text, kReturns ? "int" : "None",
                    Describe<kParameters>};
  if constexpr (!kReturns && !kChecks && IsNative<kParameters>()) {
    function.native = RunNative<kParameters, kLaunch>;
  }
  return function;
}

inline constexpr char kPlanText[] =
    "Checks the arguments as a launch does and returns the configuration. Needs no GPU.";
inline constexpr char kPlanWithoutWorkspace[] =
    "Checks the arguments but `workspace`, which may be None; returns the configuration. Needs no "
    "GPU.";

// A plan: `kPlan` is a Status (const Call&, [int multiprocessors,] Plan*).
template <const auto& kParameters, auto kPlan, const auto& kDict>
constexpr Function PlanOf(const char* name, const char* text = kPlanText) {
  return {name,
          RunPlan<kParameters, kPlan, kDict>,
          text,
          kDict.name,
          Describe<kParameters>,
          "",
          Declare<kDict>};
}

// Loads all kernels of some tables.
template <auto... kLoads>
constexpr Function LoadOf(const char* name) {
  return {name,
          nullptr,
          "Loads the kernels on a CUDA device, by its index.",
          "None",
          nullptr,
          "device: int",
          nullptr,
          [](PyObject*, PyObject* device) { return Load(device, LoadEach<kLoads...>); }};
}

// Anything else with a table of arguments; `kFunction` is a PyObject* (const Call&).
template <const auto& kParameters, auto kFunction>
constexpr Function FunctionOf(const char* name, const char* returns, const char* text) {
  return {name, RunFunction<kParameters, kFunction>, text, returns, Describe<kParameters>};
}

// Anything else; `arguments` is such as "device: int, problems: Sequence[int]".
constexpr Function Other(const char* name, FastCall call, const char* arguments,
                         const char* returns, const char* text) {
  return {name, call, text, returns, nullptr, arguments};
}

// The functions of one family. Each family's file has one of these, which puts itself in a list.
class Family {
 public:
  template <size_t kFunctions>
  explicit Family(const Function (&functions)[kFunctions]) : Family(functions, kFunctions) {}
  Family(const Function* functions, size_t count);

 private:
  friend int AddFamilies(PyObject* module);
  friend std::string StubOfFamilies();
  friend NativeFunction FindNative(const char* name);

  const Function* functions_;
  size_t count_;
  const Family* next_;
};

// The launch of that name without Python; null where there is none.
NativeFunction FindNative(const char* name);

// Adds all functions of all families. Not zero with a Python exception.
int AddFamilies(PyObject* module);

// Their declarations in the module's stub.
std::string StubOfFamilies();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_FUNCTIONS_H_
