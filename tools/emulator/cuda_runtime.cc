// SPDX-License-Identifier: Apache-2.0
// The few functions of the CUDA runtime that kernels compiled by nvcc refer to, over the driver
// library that the launcher has opened. The real runtime asks the driver for tables that only
// NVIDIA's has; with these linked before it, the package's own objects run on the emulator.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "kernels/sm90/driver.h"

namespace {

struct FatBinary {
  const void* image;
  CUlibrary library = nullptr;
};

struct Function {
  FatBinary* binary;
  const char* name;
};

std::mutex g_lock;

std::map<const void*, Function>& functions() {
  static auto* const all = new std::map<const void*, Function>;
  return *all;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new FatBinary{wrapper});
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(g_lock);
  functions()[host] = {reinterpret_cast<FatBinary*>(binary), name};
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  std::lock_guard<std::mutex> lock(g_lock);
  const auto found = functions().find(entry);
  if (found == functions().end()) return cudaErrorInvalidDeviceFunction;
  const tiercel::DriverApi& api = tiercel::driver_api();
  FatBinary& binary = *found->second.binary;
  if (binary.library == nullptr &&
      api.library_load_data(&binary.library, binary.image, nullptr, nullptr, 0, nullptr, nullptr,
                            0) != CUDA_SUCCESS) {
    return cudaErrorNoKernelImageForDevice;
  }
  CUkernel handle = nullptr;
  if (api.library_get_kernel(&handle, binary.library, found->second.name) != CUDA_SUCCESS) {
    return cudaErrorSymbolNotFound;
  }
  *kernel = reinterpret_cast<cudaKernel_t>(handle);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorSymbolNotFound ? "the emulator was given no PTX of it"
                                          : "the emulator does not know it";
}

// Stubs of kernels refer to these, and nobody calls a stub.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}

}  // extern "C"
