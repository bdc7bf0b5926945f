// SPDX-License-Identifier: Apache-2.0
// How fast a device's memory is.
#ifndef KERNELS_SM90_MEMORY_RATE_H_
#define KERNELS_SM90_MEMORY_RATE_H_

namespace tiercel {

// Gigabytes a second, by the memory's clock and width: 3352 of an H100, 4916 of an H200; 0 where
// the driver does not say, and of the 65th device on. What a process was told stays: the clock can
// take long to read, and plan and launch have to agree. Thread-safe.
int memory_gbps(int device);

}  // namespace tiercel

#endif  // KERNELS_SM90_MEMORY_RATE_H_
