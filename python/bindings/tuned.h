// SPDX-License-Identifier: Apache-2.0
// What the bindings of tuned ops share: a configuration as an argument, tables of them, the hint.
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
#include "python/bindings/call.h"

namespace tiercel::python {

// A configuration crosses as a tuple of whole numbers (and bools), in the order of its fields.
template <size_t kCount>
bool ReadConfig(PyObject* value, const char* op, std::array<int, kCount>* fields) {
  if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "%s: a configuration must be a tuple of %d whole numbers", op,
                 static_cast<int>(kCount));
    return false;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const long field = PyLong_AsLong(PyTuple_GET_ITEM(value, static_cast<Py_ssize_t>(i)));
    if (field == -1 && PyErr_Occurred()) return false;
    if (field < 0 || field > INT32_MAX) {
      PyErr_Format(PyExc_ValueError, "%s: a configuration's fields are small and not negative", op);
      return false;
    }
    (*fields)[i] = static_cast<int>(field);
  }
  return true;
}

// kUnknown with a Python exception.
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
    PyErr_Format(PyExc_TypeError, "%s: expected a list, got %s", op, Py_TYPE(items)->tp_name);
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items, i);
    if (!PyTuple_Check(item)) {
      PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %s", op, Py_TYPE(item)->tp_name);
      return false;
    }
    if (!take(item)) return false;
  }
  return true;
}

// A function (device, [(dtype, N, K, [(tokens, configuration)])]) that sets what was tuned.
template <typename Config, size_t kCount>
PyObject* SetTuned(TunedTable<Config>& table, const char* op, PyObject* const* values,
                   Py_ssize_t count, Config (*make)(const std::array<int, kCount>&)) {
  if (!Arguments(op, values, count).Expect(2)) return nullptr;
  const long device = PyLong_AsLong(values[0]);
  if (device == -1 && PyErr_Occurred()) return nullptr;
  if (device < 0 || device > INT_MAX) {
    PyErr_Format(PyExc_ValueError, "%s: no CUDA device has the index %ld", op, device);
    return nullptr;
  }
  typename TunedTable<Config>::Problems all;
  const bool read = EachTuple(values[1], op, [&](PyObject* problem) {
    const char* dtype = nullptr;
    long long n = 0, k = 0;
    PyObject* entries = nullptr;
    if (!PyArg_ParseTuple(problem, "sLLO", &dtype, &n, &k, &entries)) return false;
    const DType type = DTypeNamed(dtype);
    if (type == DType::kUnknown) return false;
    auto& configs = all[{static_cast<int>(device), type, n, k}];
    configs.clear();
    return EachTuple(entries, op, [&](PyObject* entry) {
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

// Says once, through tiercel's logging, that a problem has no tuned configuration.
template <typename Config>
void HintOnce(TunedTable<Config>& table, const char* op) {
  TunedProblem problem;
  if (!table.take_miss(&problem)) return;
  PyObject* tuned = PyImport_ImportModule("tiercel.core.tuned");
  PyObject* none = tuned == nullptr
                       ? nullptr
                       : PyObject_CallMethod(
                             tuned, "hint", "sisLL", op, problem.device, dtype_name(problem.dtype),
                             static_cast<long long>(problem.n), static_cast<long long>(problem.k));
  if (none == nullptr) PyErr_WriteUnraisable(tuned);  // a hint fails no launch
  Py_XDECREF(none);
  Py_XDECREF(tuned);
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TUNED_H_
