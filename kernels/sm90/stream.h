// SPDX-License-Identifier: Apache-2.0
// Identifies streams.
#ifndef KERNELS_SM90_STREAM_H_
#define KERNELS_SM90_STREAM_H_

#include <cstdint>

#include "kernels/sm90/status.h"

namespace tiercel {

// A number that no other stream of this process ever has; 0 during graph capture or if the driver
// does not tell.
Status stream_number(int device, void* stream, uint64_t* number);

}  // namespace tiercel

#endif  // KERNELS_SM90_STREAM_H_
