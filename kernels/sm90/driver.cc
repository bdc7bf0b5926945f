// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace tiercel {
namespace {

std::atomic<bool> g_ready{false};
std::atomic<bool> g_forked{false};  // set in the child of a process in which the driver was ready

Status fork_error() {
  return Status::RuntimeError(
      "CUDA cannot be used in a forked child process; use the 'spawn' start method");
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

struct Library {
  DriverApi api{};
  int version = 0;
  std::string missing;  // the first entry point that the library lacks
  Status status;        // of opening it and asking its version

  Library() {
    const char* override_path = std::getenv("TIERCEL_LIBCUDA");
    const char* path = override_path && *override_path ? override_path : "libcuda.so.1";
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* reason = dlerror();
      status = Status::RuntimeError(std::string("no NVIDIA driver: ") + path +
                                    " could not be loaded (" + (reason ? reason : "no reason") +
                                    "); tiercel's kernels need an H100 or H200 with driver R580 "
                                    "or newer");
      return;
    }
    resolve(handle);
    if (api.driver_get_version == nullptr || api.driver_get_version(&version) != CUDA_SUCCESS) {
      version = 0;
      status = Status::RuntimeError(std::string("the driver library ") + path +
                                    " does not tell its version");
    } else if (version < kMinDriverVersion) {
      status = Status::RuntimeError("the NVIDIA driver supports CUDA " + version_text(version) +
                                    ", tiercel needs CUDA " + version_text(kMinDriverVersion) +
                                    " (driver R580 or newer)");
    } else if (!missing.empty()) {
      status =
          Status::RuntimeError(std::string("the driver library ") + path + " lacks " + missing);
    }
  }

  template <typename Function>
  void get(void* handle, const char* symbol, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, symbol));
    if (*function == nullptr && missing.empty()) missing = symbol;
  }

  void resolve(void* handle) {
// cuda.h renames some functions (cuCtxPushCurrent_v2): the macro's expansion is the symbol's name.
#define TIERCEL_STRING_(symbol) #symbol
#define TIERCEL_GET(symbol, member) get(handle, TIERCEL_STRING_(symbol), &api.member)
    TIERCEL_GET(cuInit, init);
    TIERCEL_GET(cuDriverGetVersion, driver_get_version);
    TIERCEL_GET(cuGetErrorName, get_error_name);
    TIERCEL_GET(cuGetErrorString, get_error_string);
    TIERCEL_GET(cuDeviceGet, device_get);
    TIERCEL_GET(cuDeviceGetCount, device_get_count);
    TIERCEL_GET(cuDeviceGetAttribute, device_get_attribute);
    TIERCEL_GET(cuDevicePrimaryCtxRetain, primary_ctx_retain);
    TIERCEL_GET(cuCtxGetCurrent, ctx_get_current);
    TIERCEL_GET(cuCtxPushCurrent, ctx_push_current);
    TIERCEL_GET(cuCtxPopCurrent, ctx_pop_current);
    TIERCEL_GET(cuThreadExchangeStreamCaptureMode, exchange_capture_mode);
    TIERCEL_GET(cuStreamGetId, stream_get_id);
    TIERCEL_GET(cuStreamIsCapturing, stream_is_capturing);
    TIERCEL_GET(cuKernelGetFunction, kernel_get_function);
    TIERCEL_GET(cuKernelSetAttribute, kernel_set_attribute);
    TIERCEL_GET(cuLaunchKernelEx, launch_kernel_ex);
    TIERCEL_GET(cuLibraryLoadData, library_load_data);
    TIERCEL_GET(cuLibraryGetKernel, library_get_kernel);
    TIERCEL_GET(cuKernelGetParamInfo, kernel_get_param_info);
    TIERCEL_GET(cuTensorMapEncodeTiled, tensor_map_encode_tiled);
#undef TIERCEL_GET
#undef TIERCEL_STRING_
  }
};

const Library& library() {
  static const Library* const opened = new Library;  // never closed: kernels may outlive statics
  return *opened;
}

Status initialise() {
  TIERCEL_RETURN_IF_ERROR(library().status);
  const CUresult result = driver_api().init(0);
  // cuInit's answer in a child whose parent had initialised the driver before the fork.
  if (result == CUDA_ERROR_NOT_INITIALIZED) return fork_error();
  if (result == CUDA_ERROR_NO_DEVICE) {
    return Status::RuntimeError(
        "no CUDA device: the NVIDIA driver is there, but shows no GPU to this process "
        "(CUDA_ERROR_NO_DEVICE; see CUDA_VISIBLE_DEVICES)");
  }
  if (result != CUDA_SUCCESS) {
    return Status::RuntimeError("the NVIDIA driver could not be initialised: cuInit returned " +
                                driver_error_text(result));
  }
  pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
  g_ready.store(true, std::memory_order_release);
  return Status();
}

}  // namespace

Status driver_status() {
  if (g_ready.load(std::memory_order_acquire)) {
    return g_forked.load(std::memory_order_relaxed) ? fork_error() : Status();
  }
  static const Status* const first = new Status(initialise());
  return *first;
}

int driver_version() { return library().version; }

const DriverApi& driver_api() { return library().api; }

std::string driver_error_text(CUresult result) {
  const DriverApi& api = driver_api();
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.get_error_name) api.get_error_name(result, &name);
  if (api.get_error_string) api.get_error_string(result, &text);
  std::string message = name ? name : "CUDA error " + std::to_string(static_cast<int>(result));
  if (text) message += std::string(" (") + text + ")";
  return message;
}

Status device_capability(int device, int* major, int* minor) {
  TIERCEL_RETURN_IF_ERROR(driver_status());
  const DriverApi& api = driver_api();
  CUdevice handle = 0;
  CUresult result = api.device_get(&handle, device);
  if (result == CUDA_SUCCESS) {
    result = api.device_get_attribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
  }
  if (result == CUDA_SUCCESS) {
    result = api.device_get_attribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle);
  }
  if (result == CUDA_SUCCESS) return Status();
  return Status::RuntimeError(
      "CUDA device " + std::to_string(device) +
      " could not be asked for its compute capability: " + driver_error_text(result));
}

Status multiprocessor_count(int device, int* count) {
  TIERCEL_RETURN_IF_ERROR(driver_status());
  const DriverApi& api = driver_api();
  CUdevice handle = 0;
  CUresult result = api.device_get(&handle, device);
  if (result == CUDA_SUCCESS) {
    result = api.device_get_attribute(count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle);
  }
  if (result == CUDA_SUCCESS) return Status();
  return Status::RuntimeError(
      "CUDA device " + std::to_string(device) +
      " could not be asked for its multiprocessors: " + driver_error_text(result));
}

}  // namespace tiercel
