// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/tuned.h"

#include <utility>
#include <vector>

#include "kernels/norm/norm_backward_config.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

using MoeConfig = std::array<int, 5>;

TunedTable<MoeConfig>& fused_moe_tuned() {
  static auto* table = new TunedTable<MoeConfig>();  // never destroyed: threads may look it up
  return *table;
}

MoeConfig MoeConfigOf(const MoeConfig& fields) { return fields; }

PyObject* FusedMoeTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(fused_moe_tuned(), "fused_moe_tuned", values, count, MoeConfigOf);
}

PyObject* FusedMoeConfig(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr const char* kName = "fused_moe_config";
  if (!ExpectCount(kName, 3, count)) return nullptr;
  const int device = static_cast<int>(PyLong_AsLong(values[0]));
  const long long tokens = PyLong_AsLongLong(values[2]);
  if (PyErr_Occurred()) return nullptr;
  if (!PyTuple_Check(values[1])) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %s", kName, ClassName(values[1]));
    return nullptr;
  }
  TunedProblem problem{device, DType::kUnknown, {}};
  if (!ReadProblem(values[1], PyTuple_Size(values[1]), kName, &problem)) return nullptr;
  const MoeConfig* config = fused_moe_tuned().find(problem, tokens);
  HintOnce(fused_moe_tuned(), "fused_moe");
  if (config == nullptr) Py_RETURN_NONE;
  const auto& [block, up_tile, up_cluster, down_tile, down_cluster] = *config;
  return Py_BuildValue("iiiii", block, up_tile, up_cluster, down_tile, down_cluster);
}

template <NormKind kKind>
PyObject* NormBackwardTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(norm_backward_tuned(kKind), "norm_backward_tuned", values, count,
                  norm_backward_config_of);
}

// Reads the first `count` numbers of a row: a list of whole numbers and bools, then anything.
bool ReadRow(PyObject* row, int* fields, Py_ssize_t count) {
  if (!PyList_Check(row) || PyList_Size(row) < count) {
    PyErr_Format(PyExc_TypeError, "norm_backward_ranges: a range must be a list of %zd numbers",
                 count);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long field = PyLong_AsLong(PyList_GetItem(row, i));
    if (field == -1 && PyErr_Occurred()) return false;
    if (field < 0 || field > 1 << 30) {
      PyErr_Format(PyExc_ValueError, "norm_backward_ranges: a number is out of range: %ld", field);
      return false;
    }
    fields[i] = static_cast<int>(field);
  }
  return true;
}

bool ReadRanges(PyObject* rows, NormKind kind, int element,
                std::vector<NormBackwardRange>* ranges) {
  constexpr int kFields = 14;
  if (!PyList_Check(rows)) {
    PyErr_Format(PyExc_TypeError, "norm_backward_ranges: expected a list of ranges");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_Size(rows); ++i) {
    int f[kFields];
    if (!ReadRow(PyList_GetItem(rows, i), f, kFields)) return false;
    const NormBackwardConfig config{f[5],  f[6],       f[7],       f[8], f[9],
                                    f[10], f[11] != 0, f[12] != 0, f[13]};
    const int max_megabytes = f[3] > 0 ? f[3] : INT_MAX;  // 0: no limit
    const NormBackwardRange range{f[0], f[1], f[2], max_megabytes, f[4] != 0, config};
    const Status status = norm_backward_check(range, kind, element);
    if (!status.ok()) return Raise(status) != nullptr;
    ranges->push_back(range);
  }
  return true;
}

PyObject* SetNormBackwardRanges(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr const char* kName = "norm_backward_ranges";
  if (!ExpectCount(kName, 4, count)) return nullptr;
  const long below = PyLong_AsLong(values[0]);
  NormBackwardRanges ranges;
  ranges.rows_per_multiprocessor = PyLong_AsLong(values[1]);
  ranges.megabytes = PyLong_AsLong(values[2]);
  if (PyErr_Occurred()) return nullptr;
  if (values[3] == Py_None) {
    clear_norm_backward_ranges();
    Py_RETURN_NONE;
  }
  const bool read = EachTuple(values[3], kName, [&](PyObject* table) {
    int layer = 0;
    const char* dtype = nullptr;
    PyObject* rows = nullptr;
    if (!PyArg_ParseTuple(table, "psO", &layer, &dtype, &rows)) return false;
    const DType type = DTypeNamed(dtype);
    if (type == DType::kUnknown) return false;
    const NormKind kind = layer ? NormKind::kLayer : NormKind::kRms;
    const int element = static_cast<int>(dtype_bytes(type));
    return ReadRanges(rows, kind, element, &ranges.of(kind, element));
  });
  if (!read) return nullptr;
  set_norm_backward_ranges(below > 0 && below < INT_MAX ? static_cast<int>(below) : INT_MAX,
                           std::move(ranges));
  Py_RETURN_NONE;
}

constexpr char kSets[] = "Sets what was tuned: [(dtype, N, [(rows, configuration)])].";

constexpr Function kFunctions[] = {
    Other("fused_moe_tuned", FusedMoeTuned, kTunedArguments, "None",
          "Sets what was tuned: [(dtype, E, k, H, I, [(tokens, configuration)])]."),
    Other("fused_moe_config", FusedMoeConfig, "device: int, problem: tuple[Any, ...], tokens: int",
          "tuple[int, int, int, int, int] | None",
          "The configuration that was tuned for (dtype, E, k, H, I) and the nearest number of "
          "tokens, or None."),
    Other("layer_norm_backward_tuned", NormBackwardTuned<NormKind::kLayer>, kTunedArguments, "None",
          kSets),
    Other("rms_norm_backward_tuned", NormBackwardTuned<NormKind::kRms>, kTunedArguments, "None",
          kSets),
    Other("norm_backward_ranges", SetNormBackwardRanges,
          "memory_gbps_below: int, rows_per_multiprocessor: int, megabytes: int, "
          "tables: Sequence[tuple[bool, str, list[list[Any]]]] | None",
          "None",
          "Sets what was measured on devices whose memory is slower than that, or on all others "
          "for 0: [(is layer_norm, dtype, ranges)]. None instead removes all."),
};
const Family kFamily(kFunctions);

}  // namespace

void Hint(const char* op, const TunedProblem& problem) {
  PyObject* tuned = PyImport_ImportModule("tiercel.core.tuned");
  PyObject* sizes = Py_BuildValue(
      "LLLL", static_cast<long long>(problem.sizes[0]), static_cast<long long>(problem.sizes[1]),
      static_cast<long long>(problem.sizes[2]), static_cast<long long>(problem.sizes[3]));
  PyObject* none = tuned == nullptr || sizes == nullptr
                       ? nullptr
                       : PyObject_CallMethod(tuned, "hint", "sisO", op, problem.device,
                                             dtype_name(problem.dtype), sizes);
  if (none == nullptr) PyErr_WriteUnraisable(tuned);  // a hint fails no launch
  Py_XDECREF(none);
  Py_XDECREF(sizes);
  Py_XDECREF(tuned);
}

void LoadNormBackwardRanges() {
  static bool loaded = false;  // guarded by the GIL; two threads may load, with the same result
  if (loaded) return;
  PyObject* tuned = PyImport_ImportModule("tiercel.core.tuned");
  PyObject* none = tuned == nullptr ? nullptr : PyObject_CallMethod(tuned, "load_ranges", nullptr);
  if (none == nullptr) PyErr_WriteUnraisable(tuned);  // without them a heuristic chooses
  Py_XDECREF(none);
  Py_XDECREF(tuned);
  loaded = true;
}

}  // namespace tiercel::python
