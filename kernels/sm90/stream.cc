// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/stream.h"

#include <cuda.h>

#include "kernels/sm90/context.h"
#include "kernels/sm90/driver.h"

namespace tiercel {

Status stream_number(int device, void* stream, uint64_t* number) {
  *number = 0;
  TIERCEL_RETURN_IF_ERROR(driver_status());
  ContextScope context;
  TIERCEL_RETURN_IF_ERROR(context.enter(device));
  const DriverApi& api = driver_api();
  const auto handle = static_cast<CUstream>(stream);
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  unsigned long long id = 0;
  if (api.stream_is_capturing(handle, &capture) != CUDA_SUCCESS ||
      capture != CU_STREAM_CAPTURE_STATUS_NONE || api.stream_get_id(handle, &id) != CUDA_SUCCESS) {
    return Status();
  }
  *number = id + 1;  // an id may be 0
  return Status();
}

}  // namespace tiercel
