// SPDX-License-Identifier: Apache-2.0
// Shared by the bindings of tuned ops: a configuration as an argument, the tables, the hint.
#ifndef PYTHON_BINDINGS_TUNED_H_
#define PYTHON_BINDINGS_TUNED_H_

#include <Python.h>

#include <array>
#include <climits>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/sm90/tuned.h"
#include "python/bindings/arguments.h"
#include "python/bindings/call.h"
#include "python/bindings/reference.h"

namespace tiercel::python {

// Reads a configuration: a tuple of whole numbers and bools, in the order of its fields.
template <size_t kCount>
bool ReadConfig(PyObject* value, const char* op, std::array<int, kCount>* fields) {
  if (!PyTuple_Check(value) || PyTuple_Size(value) != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "%s: a configuration must be a tuple of %d whole numbers", op,
                 static_cast<int>(kCount));
    return false;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const long field = PyLong_AsLong(PyTuple_GetItem(value, static_cast<Py_ssize_t>(i)));
    if (field == -1 && PyErr_Occurred()) return false;
    if (field < 0 || field > INT32_MAX) {
      PyErr_Format(PyExc_ValueError, "%s: a configuration's fields are small and not negative", op);
      return false;
    }
    (*fields)[i] = static_cast<int>(field);
  }
  return true;
}

// Tells `tiercel.core.tuned` about a problem that has no tuned configuration.
void Hint(const char* op, const TunedProblem& problem);

// Reads the measured ranges of norm_backward from the package's files, once per process. Needs the
// GIL; a file that cannot be read is logged and left out.
void LoadNormBackwardRanges();

// The dtype of a name; kUnknown with a Python exception.
inline DType DTypeNamed(const char* name) {
  for (int i = 0; i < static_cast<int>(DType::kUnknown); ++i) {
    if (std::strcmp(name, dtype_name(static_cast<DType>(i))) == 0) return static_cast<DType>(i);
  }
  PyErr_Format(PyExc_ValueError, "no dtype is named '%s'", name);
  return DType::kUnknown;
}

// Calls `take` for each item of a list or tuple of tuples. False with a Python exception.
template <typename Take>
bool EachTuple(PyObject* items, const char* op, Take&& take) {
  if (!PyList_Check(items) && !PyTuple_Check(items)) {
    PyErr_Format(PyExc_TypeError, "%s: expected a list, got %s", op, ClassName(items));
    return false;
  }
  const Reference all(PySequence_Tuple(items));
  if (!all) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(all.get()); ++i) {
    PyObject* item = PyTuple_GetItem(all.get(), i);
    if (!PyTuple_Check(item)) {
      PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %s", op, ClassName(item));
      return false;
    }
    if (!take(item)) return false;
  }
  return true;
}

// Reads (dtype, size, ...) from the first `count` items of a tuple. False with a Python exception.
inline bool ReadProblem(PyObject* items, Py_ssize_t count, const char* op, TunedProblem* problem) {
  if (count < 2 || count > 1 + static_cast<Py_ssize_t>(problem->sizes.size())) {
    PyErr_Format(PyExc_TypeError, "%s: expected a dtype and one to four sizes", op);
    return false;
  }
  const char* dtype = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(items, 0), nullptr);
  if (dtype == nullptr) return false;
  problem->dtype = DTypeNamed(dtype);
  if (problem->dtype == DType::kUnknown) return false;
  for (Py_ssize_t i = 1; i < count; ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GetItem(items, i));
    if (size == -1 && PyErr_Occurred()) return false;
    problem->sizes[i - 1] = size;
  }
  return true;
}

inline constexpr char kTunedArguments[] = "device: int, problems: _TunedProblems";

// The function (device, [(dtype, size, ..., [(tokens, configuration)])]) that fills a table.
template <typename Config, size_t kCount>
PyObject* SetTuned(TunedTable<Config>& table, const char* op, PyObject* const* values,
                   Py_ssize_t count, Config (*make)(const std::array<int, kCount>&)) {
  if (!ExpectCount(op, 2, count)) return nullptr;
  const long device = PyLong_AsLong(values[0]);
  if (device == -1 && PyErr_Occurred()) return nullptr;
  if (device < 0 || device > INT_MAX) {
    PyErr_Format(PyExc_ValueError, "%s: no CUDA device has the index %ld", op, device);
    return nullptr;
  }
  typename TunedTable<Config>::Problems all;
  const bool read = EachTuple(values[1], op, [&](PyObject* problem) {
    const Py_ssize_t last = PyTuple_Size(problem) - 1;
    TunedProblem key{static_cast<int>(device), DType::kUnknown, {}};
    if (!ReadProblem(problem, last, op, &key)) return false;
    auto& configs = all[key];
    configs.clear();
    return EachTuple(PyTuple_GetItem(problem, last), op, [&](PyObject* entry) {
      long long tokens = 0;
      PyObject* config = nullptr;
      std::array<int, kCount> fields;
      if (!PyArg_ParseTuple(entry, "LO", &tokens, &config)) return false;
      if (tokens < 1) {
        PyErr_Format(PyExc_ValueError, "%s: a number of tokens must be positive", op);
        return false;
      }
      if (!ReadConfig(config, op, &fields)) return false;
      configs.emplace_back(tokens, make(fields));
      return true;
    });
  });
  if (!read) return nullptr;
  table.set(static_cast<int>(device), all);
  Py_RETURN_NONE;
}

// Says once, through tiercel's logging, that a problem has no tuned configuration. Needs no GIL.
template <typename Config>
void HintOnce(TunedTable<Config>& table, const char* op) {
  TunedProblem problem;
  if (!table.take_miss(&problem)) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  Hint(op, problem);
  PyGILState_Release(state);
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TUNED_H_
