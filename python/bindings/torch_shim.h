// SPDX-License-Identifier: Apache-2.0
// PyTorch's stable C interface (torch/csrc/stable/c/shim.h), looked up at run time in the libtorch
// that the process has loaded: nothing of torch is included or linked. The types are ours; every
// function but `check` returns 0 if it succeeds.
#ifndef PYTHON_BINDINGS_TORCH_SHIM_H_
#define PYTHON_BINDINGS_TORCH_SHIM_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

struct TensorOfTorch;   // AtenTensorHandle is a pointer to it
struct LibraryOfTorch;  // TorchLibraryHandle
struct StringOfTorch;   // StringHandle

// StableIValue: an argument or result. An optional one is 0 or a pointer to the value.
using StackValue = uint64_t;
using BoxedFunction = void (*)(StackValue* stack, uint64_t arguments, uint64_t results);

// The version of the interface that this code is written to: 2.10, the first with strings.
inline constexpr uint64_t kTorchInterface = (uint64_t{2} << 56) | (uint64_t{10} << 48);

struct TorchShim {
  // The dispatcher's libraries.
  int (*library_init_fragment)(const char* name, const char* file, uint32_t line,
                               LibraryOfTorch** library);
  int (*library_init_impl)(const char* name, const char* key, const char* file, uint32_t line,
                           LibraryOfTorch** library);
  int (*library_def)(LibraryOfTorch*, const char* schema);
  int (*library_impl)(LibraryOfTorch*, const char* name, BoxedFunction, uint64_t interface);

  // Tensors. Handles own a reference; the pointers to sizes and strides live as long as the tensor.
  int (*get_dim)(TensorOfTorch*, int64_t* dim);
  int (*get_sizes)(TensorOfTorch*, int64_t** sizes);
  int (*get_strides)(TensorOfTorch*, int64_t** strides);
  int (*get_dtype)(TensorOfTorch*, int32_t* dtype);
  int (*get_device_type)(TensorOfTorch*, int32_t* type);
  int (*get_device_index)(TensorOfTorch*, int32_t* index);
  int (*get_data_ptr)(TensorOfTorch*, void** data);
  int (*delete_tensor_object)(TensorOfTorch*);
  int (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                       int32_t device_type, int32_t device_index, TensorOfTorch** tensor);
  int (*as_strided)(TensorOfTorch*, const int64_t* sizes, const int64_t* strides,
                    TensorOfTorch** view);
  int (*zero_)(TensorOfTorch*);

  // Strings and optional values of a stack.
  int (*string_length)(StringOfTorch*, size_t* length);
  int (*string_c_str)(StringOfTorch*, const char** text);
  int (*delete_string)(StringOfTorch*);
  int (*delete_stable_ivalue)(StackValue*);  // null before 2.13: `delete` frees them

  // Throws torch's exception with this text unless `condition`.
  void (*check)(bool condition, const char* function, const char* file, uint32_t line,
                const char* text);

  int32_t cuda;                                           // the device type
  int32_t dtypes[static_cast<int>(DType::kUnknown) + 1];  // torch's number of each; -1: it has none

  // torch's number of a dtype by its name, -1 if it has none.
  int32_t DTypeNamed(const std::string& name) const;
  DType DTypeOf(int32_t dtype) const;

  // The stream that torch works on now.
  Status CurrentStream(int32_t device, void** stream) const;
};

// Finds the interface in the libtorch of this process; the error says what is missing.
// TIERCEL_LIBTORCH names a library that is asked before it.
Status FindTorch(const TorchShim** torch);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TORCH_SHIM_H_
