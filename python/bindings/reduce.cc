// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce/reduce.h"

#include "kernels/reduce/reduce_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace tiercel::python {
namespace {

constexpr char kReduce[] = "reduce";

// What both functions below take: (x, out, workspace or None, dim, operation's index).
struct ReduceCall {
  PythonTensor x, out, workspace;
  const TensorView* workspace_view = nullptr;
  int64_t dim = 0;
  ReduceOp op = ReduceOp::kSum;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kReduce, values, count).Expect(5)) return false;
    if (!x.Read(values[0], kReduce, "x") || !out.Read(values[1], kReduce, "out")) return false;
    if (values[2] != Py_None) {
      if (!workspace.Read(values[2], kReduce, "workspace")) return false;
      workspace_view = &workspace.view();
    }
    dim = PyLong_AsLongLong(values[3]);
    if (dim == -1 && PyErr_Occurred()) return false;
    const long index = PyLong_AsLong(values[4]);
    if (index == -1 && PyErr_Occurred()) return false;
    if (index < 0 || index > static_cast<long>(ReduceOp::kMax)) {
      PyErr_Format(PyExc_ValueError, "%s: no operation has the index %ld", kReduce, index);
      return false;
    }
    op = static_cast<ReduceOp>(index);
    return true;
  }
};

// Zero when launched; otherwise the floats of workspace that it needs first.
PyObject* Reduce(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ReduceCall call;
  if (!call.Parse(values, count)) return nullptr;
  int64_t needed = 0;
  PyObject* launched = Launch(call.x, [&](void* stream) {
    return reduce(call.x.view(), call.out.view(), call.workspace_view, call.dim, call.op, stream,
                  &needed);
  });
  if (launched == nullptr) return nullptr;
  Py_DECREF(launched);
  return PyLong_FromLongLong(needed);
}

PyObject* ReducePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ReduceCall call;
  if (!call.Parse(values, count)) return nullptr;
  ReducePlan plan{};
  const Status status = reduce_plan(call.x.view(), call.out.view(), call.dim, call.op, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:s, s:i, s:i, s:i, s:I, s:I, s:L}", "kernel", plan.kernel, "second",
                       plan.second, "vector_bytes", plan.vector_bytes, "parts", plan.parts,
                       "cluster", plan.cluster, "grid", plan.grid, "block", plan.block, "workspace",
                       static_cast<long long>(plan.workspace));
}

Status LoadReduce(int device) {
  for (const auto table : {reduce_rows_kernels, reduce_columns_kernels}) {
    int count = 0;
    const ReduceKernel* kernels = table(&count);
    for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* ReduceLoad(PyObject*, PyObject* device) { return Load(device, LoadReduce); }

PyMethodDef functions[] = {
    {"reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Reduce)), METH_FASTCALL,
     "reduce(x, out, workspace, dim, op, /)\n--\n\n"
     "Launches the kernel on the current stream, fills `out` and returns 0. If it needs a "
     "workspace "
     "and got None, launches nothing and returns its length in floats."},
    {"reduce_plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ReducePlanOf)),
     METH_FASTCALL,
     "reduce_plan(x, out, workspace, dim, op, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"reduce_load", ReduceLoad, METH_O,
     "reduce_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* ReduceFunctions() { return functions; }

}  // namespace tiercel::python
