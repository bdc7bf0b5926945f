// SPDX-License-Identifier: Apache-2.0
// What the bindings of tuned ops share: a configuration as an argument, tables of them, the hint.
#ifndef PYTHON_BINDINGS_TUNED_H_
#define PYTHON_BINDINGS_TUNED_H_

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
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

// (dtype, N, K, [(tokens, fields)])
template <size_t kCount>
using TunedProblems =
    std::vector<std::tuple<std::string, int64_t, int64_t,
                           std::vector<std::pair<int64_t, std::array<int, kCount>>>>>;

inline DType DTypeNamed(const std::string& name) {
  for (int i = 0; i < static_cast<int>(DType::kUnknown); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw pybind11::value_error("no dtype is named '" + name + "'");
}

template <typename Config, size_t kCount>
void SetTuned(TunedTable<Config>& table, int device, const TunedProblems<kCount>& problems,
              Config (*make)(const std::array<int, kCount>&)) {
  typename TunedTable<Config>::Problems all;
  for (const auto& [dtype, n, k, entries] : problems) {
    typename TunedTable<Config>::ByTokens configs;
    for (const auto& [tokens, fields] : entries) {
      if (tokens < 1) throw pybind11::value_error("a number of tokens must be positive");
      configs.emplace_back(tokens, make(fields));
    }
    all[{device, DTypeNamed(dtype), n, k}] = std::move(configs);
  }
  table.set(device, all);
}

// Says once, through tiercel's logging, that a problem has no tuned configuration.
template <typename Config>
void HintOnce(TunedTable<Config>& table, const char* op) {
  TunedProblem problem;
  if (!table.take_miss(&problem)) return;
  try {
    pybind11::module_::import("tiercel._tuned")
        .attr("hint")(op, problem.device, dtype_name(problem.dtype), problem.n, problem.k);
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable(op);  // a hint fails no launch
  }
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TUNED_H_
