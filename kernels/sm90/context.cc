// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/context.h"

#include <cuda.h>

#include <atomic>
#include <mutex>
#include <string>

#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

constexpr int kMaxDevices = 64;

std::atomic<CUcontext> g_primary_contexts[kMaxDevices];
std::mutex g_first_use;

Status device_error(int device, const char* action, CUresult result) {
  return Status::RuntimeError("CUDA device " + std::to_string(device) + ": " + action + ": " +
                              driver_error_text(result));
}

// The primary context, torch's own, retained once and for good.
Status primary_context(int device, CUcontext* context) {
  if (device < 0 || device >= kMaxDevices) {
    return Status::RuntimeError("CUDA device " + std::to_string(device) + " is out of range");
  }
  *context = g_primary_contexts[device].load(std::memory_order_acquire);
  if (*context != nullptr) return Status();
  std::lock_guard<std::mutex> lock(g_first_use);
  *context = g_primary_contexts[device].load(std::memory_order_acquire);
  if (*context != nullptr) return Status();
  const DriverApi& api = driver_api();
  CUdevice handle = 0;
  CUresult result = api.device_get(&handle, device);
  if (result == CUDA_SUCCESS) result = api.primary_ctx_retain(context, handle);
  if (result != CUDA_SUCCESS) return device_error(device, "no primary context", result);
  g_primary_contexts[device].store(*context, std::memory_order_release);
  return Status();
}

}  // namespace

Status ContextScope::enter(int device) {
  CUcontext primary = nullptr;
  TIERCEL_RETURN_IF_ERROR(primary_context(device, &primary));
  CUcontext current = nullptr;
  CUresult result = driver_api().ctx_get_current(&current);
  if (result == CUDA_SUCCESS && current != primary) {
    result = driver_api().ctx_push_current(primary);
    pushed_ = result == CUDA_SUCCESS;
  }
  return result == CUDA_SUCCESS ? Status()
                                : device_error(device, "its context is not usable", result);
}

ContextScope::~ContextScope() {
  CUcontext popped;
  if (pushed_) driver_api().ctx_pop_current(&popped);
}

}  // namespace tiercel
