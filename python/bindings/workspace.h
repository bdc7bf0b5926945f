// SPDX-License-Identifier: Apache-2.0
// Memory that a kernel needs while it runs.
#ifndef PYTHON_BINDINGS_WORKSPACE_H_
#define PYTHON_BINDINGS_WORKSPACE_H_

#include <Python.h>

#include <cstdint>

#include "python/bindings/reference.h"

namespace tiercel::python {

// Floats for the next launch on this stream. A stream keeps its own, for its launches follow each
// other; a graph, whose launches follow the rest of no stream, gets new ones.
class Workspace {
 public:
  // False with a Python exception. `like` is a tensor on the device.
  bool Get(PyObject* like, int device, void* stream, int64_t floats);

  float* data() const { return data_; }

 private:
  Reference tensor_;  // until the launch is in the stream
  float* data_ = nullptr;
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_WORKSPACE_H_
