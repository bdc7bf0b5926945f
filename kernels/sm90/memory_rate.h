// SPDX-License-Identifier: Apache-2.0
// A device's memory bandwidth.
#ifndef KERNELS_SM90_MEMORY_RATE_H_
#define KERNELS_SM90_MEMORY_RATE_H_

namespace tiercel {

// GB/s from the memory's clock and bus width: 3352 on an H100, 4916 on an H200; 0 if the driver
// does not tell, and for device numbers from 64 on. Cached per process, because the clock is slow
// to read and plan and launch must agree. Thread-safe.
int memory_gbps(int device);

}  // namespace tiercel

#endif  // KERNELS_SM90_MEMORY_RATE_H_
