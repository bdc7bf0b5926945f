// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/grouped_gemm.h"

#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace tiercel::python {
namespace {

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

// (a, b, offsets, out, kind's index).
struct Parsed {
  PythonTensor a, b, offsets, out;
  GroupedGemmCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    constexpr char kOp[] = "grouped_gemm";
    if (!Arguments(kOp, values, count).Expect(5)) return false;
    if (!a.Read(values[0], kOp, "a") || !b.Read(values[1], kOp, "b") ||
        !offsets.Read(values[2], kOp, "offsets") || !out.Read(values[3], kOp, "out")) {
      return false;
    }
    const long kind = PyLong_AsLong(values[4]);
    if (kind == -1 && PyErr_Occurred()) return false;
    if (kind < 0 || kind > static_cast<long>(GroupedKind::kGradWeight)) {
      PyErr_Format(PyExc_ValueError, "%s: no kind has the index %ld", kOp, kind);
      return false;
    }
    call.kind = static_cast<GroupedKind>(kind);
    call.a = &a.view();
    call.b = &b.view();
    call.offsets = &offsets.view();
    call.out = &out.view();
    return true;
  }
};

PyObject* GroupedGemm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed parsed;
  if (!parsed.Parse(values, count)) return nullptr;
  return Launch(parsed.a, [&](void* stream) { return grouped_gemm(parsed.call, stream); });
}

PyObject* GroupedGemmPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed parsed;
  if (!parsed.Parse(values, count)) return nullptr;
  const TensorView& a = parsed.a.view();
  int multiprocessors = 0;
  if (a.device_type != DeviceType::kCUDA ||
      !multiprocessor_count(a.device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  GroupedGemmPlan plan{};
  const Status status = grouped_gemm_plan(parsed.call, multiprocessors, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "tile_m",
                       plan.tile_m, "tile_n", plan.tile_n, "tiles", plan.tiles, "grid", plan.grid,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

PyObject* GroupedGemmLoad(PyObject*, PyObject* device) { return Load(device, grouped_gemm_load); }

#define TIERCEL_FAST(name, function, text)                                                     \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, \
   name "(a, b, offsets, out, kind, /)\n--\n\n" text}

PyMethodDef functions[] = {
    TIERCEL_FAST("grouped_gemm", GroupedGemm,
                 "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("grouped_gemm_plan", GroupedGemmPlanOf,
                 "Checks as a launch does; the configuration."),
    {"grouped_gemm_load", GroupedGemmLoad, METH_O,
     "grouped_gemm_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* GroupedGemmFunctions() { return functions; }

}  // namespace tiercel::python
