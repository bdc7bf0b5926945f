// SPDX-License-Identifier: Apache-2.0
// torch's stable C interface, 2.10 and newer, declared here and looked up at run time: the module
// includes and links nothing of torch's. core/native.py names the releases that it is used with.
#ifndef PYTHON_BINDINGS_TORCH_SHIM_H_
#define PYTHON_BINDINGS_TORCH_SHIM_H_

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

// A value on the stack of an operator's call: a number, a tensor's or a string's handle, or for an
// optional argument null or the address of such a value. Who takes one from the stack owns it.
using StackValue = uint64_t;
using BoxedFunction = void (*)(StackValue* stack, uint64_t arguments, uint64_t results);

struct TensorOpaque;
struct StringOpaque;
struct LibraryOpaque;
using TensorHandle = TensorOpaque*;
using StringHandle = StringOpaque*;
using LibraryHandle = LibraryOpaque*;

// Functions that return an int32_t return 0 for success, but for the codes of dtypes and devices.
struct TorchShim {
  int32_t (*aoti_torch_library_init_impl)(const char* ns, const char* key, const char* file,
                                          uint32_t line, LibraryHandle* library);
  int32_t (*torch_library_impl)(LibraryHandle library, const char* name, BoxedFunction function,
                                uint64_t version);
  int32_t (*torch_call_dispatcher)(const char* name, const char* overload, StackValue* stack,
                                   uint64_t version);
  void (*aoti_torch_check)(bool condition, const char* function, const char* file, uint32_t line,
                           const char* message);
  bool (*aoti_torch_grad_mode_is_enabled)();
  int32_t (*aoti_torch_get_data_ptr)(TensorHandle tensor, void** data);
  int32_t (*aoti_torch_get_dim)(TensorHandle tensor, int64_t* dim);
  int32_t (*aoti_torch_get_sizes)(TensorHandle tensor, int64_t** sizes);
  int32_t (*aoti_torch_get_strides)(TensorHandle tensor, int64_t** strides);
  int32_t (*aoti_torch_get_dtype)(TensorHandle tensor, int32_t* dtype);
  int32_t (*aoti_torch_get_layout)(TensorHandle tensor, int32_t* layout);
  int32_t (*aoti_torch_get_device_type)(TensorHandle tensor, int32_t* type);
  int32_t (*aoti_torch_get_device_index)(TensorHandle tensor, int32_t* index);
  int32_t (*aoti_torch_is_defined)(TensorHandle tensor, bool* defined);
  int32_t (*aoti_torch_empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                      int32_t dtype, int32_t device_type, int32_t device_index,
                                      TensorHandle* tensor);
  int32_t (*aoti_torch_new_tensor_handle)(TensorHandle tensor, TensorHandle* copy);
  int32_t (*aoti_torch_delete_tensor_object)(TensorHandle tensor);
  int32_t (*torch_string_c_str)(StringHandle string, const char** text);
  int32_t (*torch_delete_string)(StringHandle string);
  int32_t (*aoti_torch_layout_strided)();
  int32_t (*aoti_torch_device_type_cpu)();
  int32_t (*aoti_torch_device_type_cuda)();
  // Null where torch lacks it: before 2.13 an optional value comes from operator new; builds for
  // the CPU have no streams.
  int32_t (*torch_delete_stable_ivalue)(StackValue* value);
  int32_t (*aoti_torch_get_current_cuda_stream)(int32_t device, void** stream);
  // c10::impl::TorchDispatchModeTLS::any_modes_set, which has no C name; null where it is not
  // found.
  bool (*any_modes_set)(bool skip_infra_modes);
};

// The version whose interface this is: 2.10. torch converts values as that one does.
inline constexpr uint64_t kShimVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

// Null without torch or in one that is older.
const TorchShim* FindTorchShim();

// torch's code for the dtype of a name; -1 where it has none.
int32_t TorchCodeOf(const char* dtype);

// kUnknown for a code that is none of ours.
DType DTypeOfTorchCode(int32_t code);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TORCH_SHIM_H_
