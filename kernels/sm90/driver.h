// SPDX-License-Identifier: Apache-2.0
// The CUDA driver library, opened on first use and never linked, so that the package imports
// without one.
#ifndef KERNELS_SM90_DRIVER_H_
#define KERNELS_SM90_DRIVER_H_

#include <cuda.h>

#include "kernels/sm90/status.h"

namespace tiercel {

// The oldest driver that the kernels run on, as cuDriverGetVersion counts (13.0: driver R580).
inline constexpr int kMinDriverVersion = 13000;

// Ok once the driver library is open, new enough and initialised; otherwise the error says what is
// missing. Thread-safe; two loads after the first success. TIERCEL_LIBCUDA names another library
// file.
Status driver_status();

// The value of cuDriverGetVersion (13000 is 13.0); 0 without a driver library.
int driver_version();

// The device's compute capability, 9 and 0 on an H100 or H200.
Status device_capability(int device, int* major, int* minor);

// The device's number of multiprocessors, 132 on an H100 SXM or H200.
Status multiprocessor_count(int device, int* count);

// The driver functions that launches need. Valid only after driver_status() returned ok.
struct DriverApi {
  decltype(&cuInit) init;
  decltype(&cuDriverGetVersion) driver_get_version;
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetCount) device_get_count;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDevicePrimaryCtxRetain) primary_ctx_retain;
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxPushCurrent) ctx_push_current;
  decltype(&cuCtxPopCurrent) ctx_pop_current;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&cuStreamGetId) stream_get_id;
  decltype(&cuStreamIsCapturing) stream_is_capturing;
  decltype(&cuKernelGetFunction) kernel_get_function;
  decltype(&cuKernelSetAttribute) kernel_set_attribute;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;
  decltype(&cuLibraryLoadData) library_load_data;
  decltype(&cuLibraryGetKernel) library_get_kernel;
  decltype(&cuKernelGetParamInfo) kernel_get_param_info;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;
};
const DriverApi& driver_api();

// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string driver_error_text(CUresult result);

}  // namespace tiercel

#endif  // KERNELS_SM90_DRIVER_H_
