// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/topk_softmax.h"
#include "kernels/routing/topk_softmax_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace py = pybind11;

namespace tiercel::python {
namespace {

constexpr char kTopkSoftmax[] = "topk_softmax";

// What both functions below take: (scores, weights, indices, softmax_first, renormalize).
struct TopkSoftmaxCall {
  PythonTensor scores, weights, indices;
  TopkSoftmaxOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kTopkSoftmax, values, count);
    return arguments.Expect(5) && arguments.NextTensor("scores", &scores) &&
           arguments.NextTensor("weights", &weights) && arguments.NextTensor("indices", &indices) &&
           arguments.NextBool("softmax_first", &options.softmax_first) &&
           arguments.NextBool("renormalize", &options.renormalize);
  }
};

PyObject* TopkSoftmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkSoftmaxCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.scores, [&](void* stream) {
    return topk_softmax(call.scores.view(), call.weights.view(), call.indices.view(), call.options,
                        stream);
  });
}

PyObject* TopkSoftmaxPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkSoftmaxCall call;
  if (!call.Parse(values, count)) return nullptr;
  TopkSoftmaxPlan plan{};
  const Status status = topk_softmax_plan(call.scores.view(), call.weights.view(),
                                          call.indices.view(), call.options, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I}", "kernel", plan.kernel ? plan.kernel : "",
                       "rows_per_block", plan.rows_per_block, "lanes_per_row", plan.lanes_per_row,
                       "vector_bytes", plan.vector_bytes, "grid", plan.grid, "block", plan.block);
}

Status LoadTopkSoftmax(int device) {
  int count = 0;
  const TopkSoftmaxKernel* kernels = topk_softmax_kernels(&count);
  for (int i = 0; i < count; ++i) {
    TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* TopkSoftmaxLoad(PyObject*, PyObject* device) { return Load(device, LoadTopkSoftmax); }

PyMethodDef functions[] = {
    {"topk_softmax", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(TopkSoftmax)),
     METH_FASTCALL,
     "topk_softmax(scores, weights, indices, softmax_first, renormalize, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `weights` and `indices`."},
    {"topk_softmax_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(TopkSoftmaxPlanOf)), METH_FASTCALL,
     "topk_softmax_plan(scores, weights, indices, softmax_first, renormalize, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"topk_softmax_load", TopkSoftmaxLoad, METH_O,
     "topk_softmax_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void AddRouting(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace tiercel::python
