// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/torch_shim.h"

#include <dlfcn.h>

#include <array>
#include <string>

namespace tiercel::python {
namespace {

// Looks in libraries that are loaded, whoever loaded them and with which visibility.
class Libraries {
 public:
  Libraries() {
    for (const char* name : {"libtorch_cpu.so", "libtorch_cuda.so", "libc10.so"}) {
      handles_[count_++] = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    }
  }

  template <typename Function>
  bool Find(const char* name, Function* function) const {
    void* found = nullptr;
    for (size_t i = 0; i < count_ && found == nullptr; ++i) {
      if (handles_[i] != nullptr) found = dlsym(handles_[i], name);
    }
    *function = reinterpret_cast<Function>(found);
    return found != nullptr;
  }

 private:
  std::array<void*, 3> handles_;  // kept: torch is never unloaded
  size_t count_ = 0;
};

struct Found {
  TorchShim shim{};
  std::array<int32_t, static_cast<size_t>(DType::kUnknown)> codes;
  bool complete = false;
};

int32_t CodeOf(const Libraries& libraries, const std::string& dtype) {
  int32_t (*code)() = nullptr;
  const bool known = libraries.Find(("aoti_torch_dtype_" + dtype).c_str(), &code) ||
                     libraries.Find(("torch_dtype_" + dtype).c_str(), &code);
  return known ? code() : -1;
}

Found Find() {
  const Libraries libraries;
  Found found;
  TorchShim& to = found.shim;
#define FIND(name) libraries.Find(#name, &to.name)
  FIND(torch_delete_stable_ivalue);
  FIND(aoti_torch_get_current_cuda_stream);
  libraries.Find("_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb", &to.any_modes_set);
  found.complete = FIND(aoti_torch_library_init_impl) && FIND(torch_library_impl) &&
                   FIND(torch_call_dispatcher) && FIND(aoti_torch_check) &&
                   FIND(aoti_torch_grad_mode_is_enabled) && FIND(aoti_torch_get_data_ptr) &&
                   FIND(aoti_torch_get_dim) && FIND(aoti_torch_get_sizes) &&
                   FIND(aoti_torch_get_strides) && FIND(aoti_torch_get_dtype) &&
                   FIND(aoti_torch_get_layout) && FIND(aoti_torch_get_device_type) &&
                   FIND(aoti_torch_get_device_index) && FIND(aoti_torch_is_defined) &&
                   FIND(aoti_torch_empty_strided) && FIND(aoti_torch_new_tensor_handle) &&
                   FIND(aoti_torch_delete_tensor_object) && FIND(torch_string_c_str) &&
                   FIND(torch_delete_string) && FIND(aoti_torch_layout_strided) &&
                   FIND(aoti_torch_device_type_cpu) && FIND(aoti_torch_device_type_cuda);
#undef FIND
  for (size_t i = 0; i < found.codes.size(); ++i) {
    found.codes[i] = CodeOf(libraries, dtype_name(static_cast<DType>(i)));
  }
  return found;
}

// torch is imported before the first call and stays.
const Found& TheFound() {
  static const Found found = Find();
  return found;
}

}  // namespace

const TorchShim* FindTorchShim() {
  const Found& found = TheFound();
  return found.complete ? &found.shim : nullptr;
}

int32_t TorchCodeOf(const char* dtype) { return CodeOf(Libraries(), dtype); }

DType DTypeOfTorchCode(int32_t code) {
  const auto& codes = TheFound().codes;
  for (size_t i = 0; i < codes.size(); ++i) {
    if (codes[i] == code) return static_cast<DType>(i);
  }
  return DType::kUnknown;
}

}  // namespace tiercel::python
