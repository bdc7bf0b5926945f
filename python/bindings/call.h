// SPDX-License-Identifier: Apache-2.0
// Calls of host functions from Python: without the GIL, a Status becomes an exception.
#ifndef PYTHON_BINDINGS_CALL_H_
#define PYTHON_BINDINGS_CALL_H_

#include <Python.h>

#include <exception>

#include "kernels/sm90/status.h"
#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {

// Raises the exception that a failed status stands for; returns null, as a failing function does.
PyObject* Raise(const Status& status);

// Runs `work` without the GIL. No exception leaves it: the GIL would not be held again.
template <typename Work>
Status WithoutGil(Work&& work) {
  PyThreadState* state = PyEval_SaveThread();
  Status status;
  try {
    status = work();
  } catch (const std::exception& error) {
    status = Status::RuntimeError(error.what());
  }
  PyEval_RestoreThread(state);
  return status;
}

// Runs a launcher without the GIL: a launch waits when the GPU's queue is full, and a host callback
// in that queue may need Python to go on.
template <typename Launcher>
PyObject* Launch(const PythonTensor& first, Launcher&& launcher) {
  void* stream = nullptr;
  if (!first.CurrentStream(&stream)) return nullptr;
  const Status status = WithoutGil([&] { return launcher(stream); });
  if (!status.ok()) return Raise(status);
  Py_RETURN_NONE;
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// For a PyMethodDef with METH_FASTCALL.
inline PyCFunction AsMethod(FastCall function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Runs a function that loads kernels on a device, without the GIL; `device` is its index.
PyObject* Load(PyObject* device, Status (*load)(int));

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_CALL_H_
