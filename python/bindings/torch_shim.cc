// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/torch_shim.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

namespace tiercel::python {
namespace {

constexpr char kLibrary[] = "libtorch_cpu.so";
constexpr char kCudaLibrary[] = "libtorch_cuda.so";

// Looks symbols up in one of torch's libraries, which the process has loaded.
class Symbols {
 public:
  explicit Symbols(const char* library)
      : library_(dlopen(library, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD)) {
    const char* first = std::getenv("TIERCEL_LIBTORCH");
    if (first != nullptr && *first != 0) first_ = dlopen(first, RTLD_LAZY | RTLD_LOCAL);
  }

  bool loaded() const { return library_ != nullptr; }
  // The first name that was not found, empty if all were.
  const std::string& missing() const { return missing_; }

  template <typename Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(Address(name));
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }

  void* Address(const char* name) const {
    void* found = first_ != nullptr ? dlsym(first_, name) : nullptr;
    if (found == nullptr && library_ != nullptr) found = dlsym(library_, name);
    return found;
  }

 private:
  void* library_;
  void* first_ = nullptr;
  std::string missing_;
};

// The getters of torch's dtypes, in the order of DType.
constexpr const char* kDTypes[] = {
    "aoti_torch_dtype_float32",       "aoti_torch_dtype_float16",
    "aoti_torch_dtype_bfloat16",      "aoti_torch_dtype_int32",
    "aoti_torch_dtype_int64",         "aoti_torch_dtype_int16",
    "aoti_torch_dtype_int8",          "aoti_torch_dtype_uint8",
    "aoti_torch_dtype_bool",          "aoti_torch_dtype_float64",
    "aoti_torch_dtype_float8_e4m3fn", "aoti_torch_dtype_float8_e5m2",
    "torch_dtype_float4_e2m1fn_x2",
};
static_assert(sizeof kDTypes / sizeof *kDTypes == static_cast<size_t>(DType::kUnknown));

struct Found {
  TorchShim torch{};
  Status status;

  Found() {
    Symbols symbols(kLibrary);
    if (!symbols.loaded()) {
      status = Status::RuntimeError(
          std::string("tiercel: ") + kLibrary +
          " is not loaded in this process; load PyTorch before its ops are registered");
      return;
    }
    symbols.Find("aoti_torch_library_init_fragment", &torch.library_init_fragment);
    symbols.Find("aoti_torch_library_init_impl", &torch.library_init_impl);
    symbols.Find("aoti_torch_library_def", &torch.library_def);
    symbols.Find("torch_library_impl", &torch.library_impl);
    symbols.Find("aoti_torch_get_dim", &torch.get_dim);
    symbols.Find("aoti_torch_get_sizes", &torch.get_sizes);
    symbols.Find("aoti_torch_get_strides", &torch.get_strides);
    symbols.Find("aoti_torch_get_dtype", &torch.get_dtype);
    symbols.Find("aoti_torch_get_device_type", &torch.get_device_type);
    symbols.Find("aoti_torch_get_device_index", &torch.get_device_index);
    symbols.Find("aoti_torch_get_data_ptr", &torch.get_data_ptr);
    symbols.Find("aoti_torch_delete_tensor_object", &torch.delete_tensor_object);
    symbols.Find("aoti_torch_empty_strided", &torch.empty_strided);
    symbols.Find("aoti_torch_as_strided", &torch.as_strided);
    symbols.Find("aoti_torch_zero_", &torch.zero_);
    symbols.Find("torch_string_length", &torch.string_length);
    symbols.Find("torch_string_c_str", &torch.string_c_str);
    symbols.Find("torch_delete_string", &torch.delete_string);
    symbols.Find("aoti_torch_check", &torch.check);
    int32_t (*cuda)() = nullptr;
    symbols.Find("aoti_torch_device_type_cuda", &cuda);
    if (!symbols.missing().empty()) {
      status = Status::RuntimeError("tiercel: this PyTorch lacks " + symbols.missing() +
                                    "; ops are registered without Python from PyTorch 2.10 on");
      return;
    }
    torch.cuda = cuda();
    torch.delete_stable_ivalue = reinterpret_cast<decltype(torch.delete_stable_ivalue)>(
        symbols.Address("torch_delete_stable_ivalue"));
    for (int i = 0; i < static_cast<int>(DType::kUnknown); ++i) {
      const auto number = reinterpret_cast<int32_t (*)()>(symbols.Address(kDTypes[i]));
      torch.dtypes[i] = number != nullptr ? number() : -1;
    }
    torch.dtypes[static_cast<int>(DType::kUnknown)] = -1;
  }
};

// libtorch_cuda is there by the first launch.
using CurrentCudaStream = int (*)(int32_t device, void** stream);
CurrentCudaStream current_cuda_stream() {
  static const auto found = reinterpret_cast<CurrentCudaStream>(
      Symbols(kCudaLibrary).Address("aoti_torch_get_current_cuda_stream"));
  return found;
}

}  // namespace

int32_t TorchShim::DTypeNamed(const std::string& name) const {
  for (int i = 0; i < static_cast<int>(DType::kUnknown); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return dtypes[i];
  }
  return -1;
}

DType TorchShim::DTypeOf(int32_t dtype) const {
  int i = 0;
  while (i < static_cast<int>(DType::kUnknown) && dtypes[i] != dtype) ++i;
  return static_cast<DType>(i);
}

Status TorchShim::CurrentStream(int32_t device, void** stream) const {
  const CurrentCudaStream current = current_cuda_stream();
  if (current == nullptr || current(device, stream) != 0) {
    return Status::RuntimeError("tiercel: this PyTorch has no CUDA stream to launch on");
  }
  return Status();
}

Status FindTorch(const TorchShim** torch) {
  auto* found = new Found;  // kept: torch may call until the process ends
  *torch = &found->torch;
  return found->status;
}

}  // namespace tiercel::python
