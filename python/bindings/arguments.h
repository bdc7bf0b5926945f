// SPDX-License-Identifier: Apache-2.0
// Positional arguments of a Python function as a table: one line an argument names the member of a
// call struct that it fills. Parsing, the arity check and the signature follow from the table.
// (pybind11's own dispatch costs more than everything else before a launch.)
#ifndef PYTHON_BINDINGS_ARGUMENTS_H_
#define PYTHON_BINDINGS_ARGUMENTS_H_

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "kernels/sm90/tensor_view.h"
#include "python/bindings/native_value.h"
#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {

// Each reader returns false with a Python exception that names the function and the argument.
bool ReadValue(PyObject* object, const char* op, const char* name, bool* value);
bool ReadValue(PyObject* object, const char* op, const char* name, int64_t* value);
bool ReadValue(PyObject* object, const char* op, const char* name, double* value);
bool ReadValue(PyObject* object, const char* op, const char* name, float* value);

// An enumerator by its index, up to `last`.
bool ReadIndex(PyObject* object, const char* op, const char* name, int last, int* index);

// The name of the object's class, for messages.
const char* ClassName(PyObject* object);

// Raises unless a call has `expected` arguments.
bool ExpectCount(const char* op, Py_ssize_t expected, Py_ssize_t count);

// A type as the stub writes it.
template <typename Value>
constexpr const char* TypeName() {
  return std::is_same_v<Value, bool>                     ? "bool"
         : std::is_integral_v<Value>                     ? "int"
         : std::is_same_v<Value, std::optional<double>>  ? "float | None"
         : std::is_same_v<Value, std::optional<float>>   ? "float | None"
         : std::is_same_v<Value, std::optional<int64_t>> ? "int | None"
         : std::is_floating_point_v<Value>               ? "float"
         : std::is_same_v<Value, const char*>            ? "str"
                                                         : "Any";
}

// The member at the end of a path of member pointers, such as (&Call::options, &Options::left).
template <auto kFirst, auto... kRest, typename Object>
constexpr auto& MemberAt(Object& object) {
  if constexpr (sizeof...(kRest) == 0) {
    return object.*kFirst;
  } else {
    return MemberAt<kRest...>(object.*kFirst);
  }
}

template <typename Member>
struct MemberOf;
template <typename Class_, typename Value_>
struct MemberOf<Value_ Class_::*> {
  using Class = Class_;
};
template <auto... kPath>
struct PathOf;
template <auto kFirst, auto... kRest>
struct PathOf<kFirst, kRest...> {
  using Class = typename MemberOf<decltype(kFirst)>::Class;
};
template <auto... kPath>
using ClassOf = typename PathOf<kPath...>::Class;
template <auto... kPath>
using ValueOf = std::remove_cv_t<
    std::remove_reference_t<decltype(MemberAt<kPath...>(std::declval<ClassOf<kPath...>&>()))>>;

// One argument of a function whose arguments fill a `Call`. Either `tensor` or `value` is set:
// under UBSan, GCC cannot compare them with null at compile time (GCC bug 71962).
template <typename Call>
struct Field {
  const char* name = nullptr;
  const char* type = nullptr;
  bool is_tensor = false;
  void (*tensor)(Call*, const TensorView*) = nullptr;
  bool (*value)(PyObject*, const char* op, const char* name, Call*) = nullptr;
  bool (*native)(const NativeValue&, Call*) = nullptr;  // false for a value of another type
  bool may_be_none = false;                             // a tensor
  bool may_be_absent = false;                           // of the last arguments
  bool stream = false;  // the launch uses this tensor's device and stream
};

template <auto... kPath>
constexpr Field<ClassOf<kPath...>> Tensor(const char* name) {
  using Call = ClassOf<kPath...>;
  Field<Call> field{name, "Any", /*is_tensor=*/true};
  field.tensor = [](Call* call, const TensorView* view) { MemberAt<kPath...>(*call) = view; };
  return field;
}

// A tensor, or None for a null pointer.
template <auto... kPath>
constexpr auto Optional(const char* name) {
  auto field = Tensor<kPath...>(name);
  field.may_be_none = true;
  return field;
}

// A number or bool, read as the member's type wants it.
template <auto... kPath>
constexpr Field<ClassOf<kPath...>> Value(const char* name) {
  using Call = ClassOf<kPath...>;
  Field<Call> field{name, TypeName<ValueOf<kPath...>>()};
  field.value = [](PyObject* object, const char* op, const char* label, Call* call) {
    return ReadValue(object, op, label, &MemberAt<kPath...>(*call));
  };
  field.native = [](const NativeValue& value, Call* call) {
    return value.Read(&MemberAt<kPath...>(*call));
  };
  return field;
}

// A number or bool, or None, which leaves the call's default.
template <auto... kPath>
constexpr Field<ClassOf<kPath...>> ValueOrNone(const char* name) {
  using Call = ClassOf<kPath...>;
  Field<Call> field{name, TypeName<std::optional<ValueOf<kPath...>>>()};
  field.value = [](PyObject* object, const char* op, const char* label, Call* call) {
    return object == Py_None || ReadValue(object, op, label, &MemberAt<kPath...>(*call));
  };
  field.native = [](const NativeValue& value, Call* call) {
    return value.kind == NativeValue::kNone || value.Read(&MemberAt<kPath...>(*call));
  };
  return field;
}

// An enumerator by its index.
template <auto kLast, auto... kPath>
constexpr Field<ClassOf<kPath...>> Index(const char* name) {
  using Call = ClassOf<kPath...>;
  Field<Call> field{name, "int"};
  field.value = [](PyObject* object, const char* op, const char* label, Call* call) {
    int index = 0;
    if (!ReadIndex(object, op, label, static_cast<int>(kLast), &index)) return false;
    MemberAt<kPath...>(*call) = static_cast<decltype(kLast)>(index);
    return true;
  };
  field.native = [](const NativeValue& value, Call* call) {
    int64_t index = 0;
    if (!value.Read(&index) || index < 0 || index > static_cast<int64_t>(kLast)) return false;
    MemberAt<kPath...>(*call) = static_cast<decltype(kLast)>(index);
    return true;
  };
  return field;
}

// An argument with a reader of its own.
template <typename Call>
constexpr Field<Call> Read(const char* name, const char* type,
                           bool (*value)(PyObject*, const char* op, const char* name, Call*)) {
  Field<Call> field{name, type};
  field.value = value;
  return field;
}

template <typename Call>
constexpr Field<Call> OfStream(Field<Call> field) {
  field.stream = true;
  return field;
}

template <typename Call>
constexpr Field<Call> MayBeAbsent(Field<Call> field) {
  field.may_be_absent = true;
  return field;
}

template <typename Call, size_t kCount>
struct Fields {
  Field<Call> fields[kCount];
};

// A copy of the fields in which one has another name.
template <typename Call, size_t kCount>
constexpr Fields<Call, kCount> Renamed(const Field<Call> (&fields)[kCount], size_t index,
                                       const char* name) {
  Fields<Call, kCount> renamed{};
  for (size_t i = 0; i < kCount; ++i) renamed.fields[i] = fields[i];
  renamed.fields[index].name = name;
  return renamed;
}

// The arguments of several tables, one after another.
template <typename Call, size_t... kCounts>
constexpr Fields<Call, (kCounts + ...)> Joined(const Field<Call> (&... tables)[kCounts]) {
  Fields<Call, (kCounts + ...)> joined{};
  size_t place = 0;
  const auto append = [&](const Field<Call>* table, size_t count) {
    for (size_t i = 0; i < count; ++i) joined.fields[place++] = table[i];
  };
  (append(tables, kCounts), ...);
  return joined;
}

// The arguments of a function: their table, and what a call has before they are read.
template <typename Call_>
struct Parameters {
  using Call = Call_;

  template <size_t kFields>
  constexpr Parameters(const char* op_, const Field<Call> (&fields_)[kFields], Call call_ = {},
                       const char* (*op_of_)(const Call&) = nullptr, void (*after_)() = nullptr)
      : op(op_), fields(fields_), count(kFields), call(call_), op_of(op_of_), after(after_) {}

  const char* op;  // in error texts
  const Field<Call>* fields;
  size_t count;
  Call call;
  const char* (*op_of)(const Call&);  // where the name depends on values, which are then read first
  void (*after)();                    // after a launch or plan

  constexpr size_t required() const {
    size_t number = 0;
    while (number < count && !fields[number].may_be_absent) ++number;
    return number;
  }
  constexpr size_t tensors(size_t before) const {
    size_t number = 0;
    for (size_t i = 0; i < before; ++i) number += fields[i].is_tensor ? 1 : 0;
    return number;
  }
  // The tensor whose device and stream a launch uses: the first, if none is marked.
  constexpr size_t stream() const {
    for (size_t i = 0; i < count; ++i) {
      if (fields[i].stream) return tensors(i);
    }
    return 0;
  }
};

// The arguments of one call. Its tensors live as long as this does.
template <const auto& kParameters>
class Parsed {
 public:
  using Call = typename std::decay_t<decltype(kParameters)>::Call;

  // False with a Python exception.
  bool Read(PyObject* const* values, Py_ssize_t count) {
    constexpr auto kRequired = static_cast<Py_ssize_t>(kParameters.required());
    if (count < kRequired || count > static_cast<Py_ssize_t>(kParameters.count)) {
      return ExpectCount(kParameters.op, kRequired, count);
    }
    constexpr auto kAll = std::make_index_sequence<kParameters.count>();
    const char* op = kParameters.op;
    if constexpr (kParameters.op_of != nullptr) {
      if (!ReadAll<false, true>(values, count, op, kAll)) return false;
      op = kParameters.op_of(call);
      return ReadAll<true, false>(values, count, op, kAll);
    }
    return ReadAll<true, true>(values, count, op, kAll);
  }

  const PythonTensor& of_stream() const { return tensors_[kParameters.stream()]; }

  Call call = kParameters.call;

 private:
  template <bool kTensors, bool kValues, size_t... kFields>
  bool ReadAll(PyObject* const* values, Py_ssize_t count, const char* op,
               std::index_sequence<kFields...>) {
    return (ReadOne<kTensors, kValues, kFields>(values, count, op, tensors_, &call) && ...);
  }

  template <bool kTensors, bool kValues, size_t kField>
  static bool ReadOne(PyObject* const* values, Py_ssize_t count, const char* op,
                      PythonTensor* tensors, Call* call) {
    constexpr Field<Call> kOf = kParameters.fields[kField];
    if (kOf.may_be_absent && static_cast<Py_ssize_t>(kField) >= count) return true;
    PyObject* object = values[kField];
    if constexpr (kOf.is_tensor && kTensors) {
      if (kOf.may_be_none && object == Py_None) return true;
      PythonTensor& tensor = tensors[kParameters.tensors(kField)];
      if (!tensor.Read(object, op, kOf.name)) return false;
      kOf.tensor(call, &tensor.view());
    } else if constexpr (!kOf.is_tensor && kValues) {
      return kOf.value(object, op, kOf.name, call);
    }
    return true;
  }

  static constexpr size_t kTensors = kParameters.tensors(kParameters.count);
  PythonTensor tensors_[kTensors == 0 ? 1 : kTensors];
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ARGUMENTS_H_
