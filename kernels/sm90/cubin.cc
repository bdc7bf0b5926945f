// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/cubin.h"

#include "kernels/sm90/driver.h"

namespace tiercel {

CUresult Cubin::get_kernel(const char* symbol, CUkernel* kernel) const {
  const DriverApi& api = driver_api();
  CUlibrary library = library_.load(std::memory_order_acquire);
  if (library == nullptr) {
    const CUresult result =
        api.library_load_data(&library, image_, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != CUDA_SUCCESS) return result;
    library_.store(library, std::memory_order_release);
  }
  return api.library_get_kernel(kernel, library, symbol);
}

std::string parameter_mismatch(const CubinSymbol& symbol, CUkernel kernel) {
  const DriverApi& api = driver_api();
  for (int i = 0; i < symbol.parameter_count; ++i) {
    size_t offset = 0, size = 0;
    const CubinParameter& declared = symbol.parameters[i];
    if (api.kernel_get_param_info(kernel, i, &offset, &size) != CUDA_SUCCESS ||
        offset != declared.offset || size != declared.size) {
      return "its parameter " + std::to_string(i) + " is not the " + std::to_string(declared.size) +
             " bytes at offset " + std::to_string(declared.offset) + " that the launcher passes";
    }
  }
  return std::string();
}

}  // namespace tiercel
