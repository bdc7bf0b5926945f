// SPDX-License-Identifier: Apache-2.0
// Memory that a kernel needs while it runs.
#ifndef PYTHON_BINDINGS_WORKSPACE_H_
#define PYTHON_BINDINGS_WORKSPACE_H_

#include <Python.h>

#include <cstdint>

#include "python/bindings/reference.h"

namespace tiercel::python {

// Floats for the launches of one call. A stream keeps its own, for its launches follow each other.
// A graph, whose launches follow the rest of no stream, gets new ones; so does a call while another
// thread launches on the same stream, since the GIL is released between a call's launches.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();  // under the GIL, after the launches

  // False with a Python exception. `like` is a tensor on the device.
  bool Get(PyObject* like, int device, void* stream, int64_t floats);

  float* data() const { return data_; }

 private:
  Reference tensor_;  // until the launches are in the stream
  float* data_ = nullptr;
  bool* taken_ = nullptr;  // of the stream's floats, if these are those
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_WORKSPACE_H_
