// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/invariant.h"

#include "kernels/sm90/invariant.h"

namespace tiercel::python {
namespace {

PyObject* IsOn(PyObject*, PyObject*) { return PyBool_FromLong(batch_invariant()); }

PyObject* SetOfProcess(PyObject*, PyObject* on) {
  const int truth = PyObject_IsTrue(on);
  if (truth < 0) return nullptr;
  set_batch_invariant(truth != 0);
  Py_RETURN_NONE;
}

PyObject* SetOfThread(PyObject*, PyObject* mode) {
  const long value = PyLong_AsLong(mode);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(set_thread_batch_invariant(value < 0 ? -1 : value != 0));
}

PyMethodDef functions[] = {
    {"batch_invariant", IsOn, METH_NOARGS,
     "batch_invariant()\n--\n\nWhether the batch-invariant mode is on for this thread."},
    {"set_batch_invariant", SetOfProcess, METH_O,
     "set_batch_invariant(on, /)\n--\n\nFor all threads that have no mode of their own."},
    {"set_thread_batch_invariant", SetOfThread, METH_O,
     "set_thread_batch_invariant(mode, /)\n--\n\n"
     "This thread's mode: 1 on, 0 off, -1 the process's. Returns the one before."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* InvariantFunctions() { return functions; }

}  // namespace tiercel::python
