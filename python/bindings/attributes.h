// SPDX-License-Identifier: Apache-2.0
// The slower way to read a tensor: its Python attributes, for a torch without the exchange table.
// All want the GIL and return false with a Python exception.
#ifndef PYTHON_BINDINGS_ATTRIBUTES_H_
#define PYTHON_BINDINGS_ATTRIBUTES_H_

#include <Python.h>

#include <cstdint>

#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

// Whether the object has the attributes of a torch.Tensor. Never raises.
bool LooksLikeTensor(PyObject* object);

bool ReadShape(PyObject* tensor, int max_dims, int64_t* shape, int64_t* strides, int32_t* ndim);
bool ReadDType(PyObject* tensor, DType* dtype);
bool ReadDevice(PyObject* tensor, DeviceType* type, int32_t* index);
bool ReadPointer(PyObject* tensor, void** data);

// torch's current stream on a device, by its own raw-stream getter (a CPU build has none).
bool TorchRawStream(int32_t device_index, void** stream);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ATTRIBUTES_H_
