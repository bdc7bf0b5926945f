// SPDX-License-Identifier: Apache-2.0
#include "kernels/transpose/copy_transpose.h"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace tiercel::python {
namespace {

constexpr char kCopyTranspose[] = "copy_transpose";

// What both functions below take: (x, out, tile_size), 0 for a tile that is chosen.
struct CopyTransposeCall {
  PythonTensor x, out;
  int64_t tile_size = 0;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kCopyTranspose, values, count);
    if (!arguments.Expect(3) || !arguments.NextTensor("x", &x) ||
        !arguments.NextTensor("out", &out)) {
      return false;
    }
    tile_size = PyLong_AsLongLong(values[2]);
    return tile_size != -1 || !PyErr_Occurred();
  }
};

PyObject* CopyTranspose(PyObject*, PyObject* const* values, Py_ssize_t count) {
  CopyTransposeCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.x, [&](void* stream) {
    return copy_transpose(call.x.view(), call.out.view(), call.tile_size, stream);
  });
}

PyObject* CopyTransposePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  CopyTransposeCall call;
  if (!call.Parse(values, count)) return nullptr;
  CopyTransposePlan plan{};
  const Status status = copy_transpose_plan(call.x.view(), call.out.view(), call.tile_size, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I}", "kernel", plan.kernel, "tile_rows",
                       plan.tile_rows, "tile_columns", plan.tile_columns, "vector_bytes",
                       plan.vector_bytes, "grid", plan.grid, "block", plan.block);
}

Status LoadCopyTranspose(int device) {
  int count = 0;
  const CopyTransposeKernel* kernels = copy_transpose_kernels(&count);
  for (int i = 0; i < count; ++i) {
    TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* CopyTransposeLoad(PyObject*, PyObject* device) { return Load(device, LoadCopyTranspose); }

PyMethodDef functions[] = {
    {"copy_transpose", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(CopyTranspose)),
     METH_FASTCALL,
     "copy_transpose(x, out, tile_size, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`."},
    {"copy_transpose_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(CopyTransposePlanOf)),
     METH_FASTCALL,
     "copy_transpose_plan(x, out, tile_size, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"copy_transpose_load", CopyTransposeLoad, METH_O,
     "copy_transpose_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* TransposeFunctions() { return functions; }

}  // namespace tiercel::python
