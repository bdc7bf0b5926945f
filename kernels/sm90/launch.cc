// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/launch.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "kernels/sm90/context.h"
#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

std::mutex g_first_use;

// Blocks; larger clusters need CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED.
constexpr uint32_t kPortableCluster = 8;

// Loading a module is forbidden while this thread captures a stream in the default mode.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope() { driver_api().exchange_capture_mode(&mode_); }
  ~RelaxedCaptureScope() { driver_api().exchange_capture_mode(&mode_); }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

std::string kernel_text(const char* name, int device, const char* action,
                        const std::string& reason) {
  return std::string("kernel ") + name + " could not be " + action + " on CUDA device " +
         std::to_string(device) + ": " + reason;
}

Status kernel_error(const char* name, int device, const char* action, const std::string& reason) {
  return Status::RuntimeError(kernel_text(name, device, action, reason));
}

Status load_error(const char* name, int device, CUresult result, const std::string& reason) {
  int major = 0, minor = 0;
  const bool known = device_capability(device, &major, &minor).ok();
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || (known && (major != 9 || minor != 0))) {
    return kernel_error(name, device, "loaded",
                        "it is compiled for compute capability 9.0 (H100, H200), the device has " +
                            std::to_string(major) + "." + std::to_string(minor));
  }
  return kernel_error(name, device, "loaded", reason);
}

}  // namespace

struct Kernel::Function {
  int device;
  CUfunction handle;
};

Status Kernel::find(int device, CUkernel* kernel) const {
  if (cubin_ != nullptr) {
    const CUresult result = cubin_->cubin->get_kernel(cubin_->symbol, kernel);
    if (result != CUDA_SUCCESS) {
      return load_error(name_, device, result, driver_error_text(result));
    }
    const std::string reason = parameter_mismatch(*cubin_, *kernel);
    return reason.empty() ? Status() : kernel_error(name_, device, "loaded", reason);
  }
  cudaKernel_t found = nullptr;
  const cudaError_t error = cudaGetKernel(&found, entry_);
  if (error != cudaSuccess) {
    const CUresult result = error == cudaErrorNoKernelImageForDevice ? CUDA_ERROR_NO_BINARY_FOR_GPU
                                                                     : CUDA_ERROR_UNKNOWN;
    return load_error(name_, device, result, cudaGetErrorString(error));
  }
  *kernel = reinterpret_cast<CUkernel>(found);
  return Status();
}

// Loads the module and sets the limits, once per device. The device's context is current.
Status Kernel::prepare(int device) const {
  std::lock_guard<std::mutex> lock(g_first_use);
  const uint64_t bit = uint64_t{1} << device;
  if (ready_devices_.load(std::memory_order_acquire) & bit) return Status();
  RelaxedCaptureScope relaxed;
  CUkernel handle = nullptr;
  TIERCEL_RETURN_IF_ERROR(find(device, &handle));
  const DriverApi& api = driver_api();
  CUfunction function = nullptr;
  CUresult result = api.kernel_get_function(&function, handle);
  const bool large = max_dynamic_smem_ > 48 * 1024;
  const bool large_cluster = max_cluster_ > kPortableCluster;
  CUdevice ordinal = 0;
  if (result == CUDA_SUCCESS && (large || large_cluster)) result = api.device_get(&ordinal, device);
  if (result == CUDA_SUCCESS && large) {
    result = api.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      static_cast<int>(max_dynamic_smem_), handle, ordinal);
  }
  if (result == CUDA_SUCCESS && large_cluster) {
    result = api.kernel_set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
                                      handle, ordinal);
  }
  if (result != CUDA_SUCCESS) {
    return load_error(name_, device, result, driver_error_text(result));
  }
  handle_.store(handle, std::memory_order_release);
  // Never freed, because another thread may read it. The limits above are set for the CUkernel
  // only.
  if (!large && !large_cluster) {
    function_.store(new Function{device, function}, std::memory_order_release);
  }
  ready_devices_.fetch_or(bit, std::memory_order_release);
  return Status();
}

Status Kernel::load(int device) const {
  TIERCEL_RETURN_IF_ERROR(driver_status());
  ContextScope context;
  TIERCEL_RETURN_IF_ERROR(context.enter(device));
  return prepare(device);
}

Status Kernel::launch(const LaunchConfig& config, int device, void* stream, void** args) const {
  TIERCEL_RETURN_IF_ERROR(driver_status());
  ContextScope context;
  TIERCEL_RETURN_IF_ERROR(context.enter(device));
  if (!(ready_devices_.load(std::memory_order_acquire) >> device & 1)) {
    TIERCEL_RETURN_IF_ERROR(prepare(device));
  }

  CUlaunchAttribute attributes[3];
  CUlaunchConfig launch{};
  launch.gridDimX = config.grid.x;
  launch.gridDimY = config.grid.y;
  launch.gridDimZ = config.grid.z;
  launch.blockDimX = config.block.x;
  launch.blockDimY = config.block.y;
  launch.blockDimZ = config.block.z;
  launch.sharedMemBytes = config.dynamic_smem;
  launch.hStream = static_cast<CUstream>(stream);
  launch.attrs = attributes;
  const uint32_t cluster = config.cluster.x * config.cluster.y * config.cluster.z;
  if (cluster > 1) {
    CUlaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = config.cluster.x;
    attribute.value.clusterDim.y = config.cluster.y;
    attribute.value.clusterDim.z = config.cluster.z;
  }
  if (cluster > kPortableCluster) {
    // 1 % faster on an H200; no effect on smaller clusters.
    CUlaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    attribute.value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING;
  }
  if (config.dependent) {
    CUlaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cooperative) {
    CUlaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  auto function = static_cast<CUfunction>(handle_.load(std::memory_order_acquire));
  const Function* known = function_.load(std::memory_order_acquire);
  if (known != nullptr && known->device == device) function = known->handle;
  const CUresult result = driver_api().launch_kernel_ex(&launch, function, args, nullptr);
  if (result == CUDA_SUCCESS) return Status();
  if (result == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE) {
    // Not an error of the call: other kernels may do the same.
    return Status::Unimplemented(
        kernel_text(name_, device, "launched",
                    "its " + std::to_string(config.grid.x * config.grid.y * config.grid.z) +
                        " blocks must run at the same time, and fewer multiprocessors are "
                        "available here (a green context, or a share of MPS)"));
  }
  return kernel_error(name_, device, "launched", driver_error_text(result));
}

}  // namespace tiercel
