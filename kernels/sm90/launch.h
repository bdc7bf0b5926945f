// SPDX-License-Identifier: Apache-2.0
// Launches every kernel: sets the context, loads on first use even during stream capture, and names
// the kernel in errors.
#ifndef KERNELS_SM90_LAUNCH_H_
#define KERNELS_SM90_LAUNCH_H_

#include <atomic>
#include <cstdint>

#include "kernels/sm90/cubin.h"
#include "kernels/sm90/status.h"

namespace tiercel {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid;
  Dim3 block;
  uint32_t dynamic_smem = 0;  // bytes; more than 48 KiB is allowed per device at first use
  Dim3 cluster;               // 1x1x1: no cluster
  // Programmatic dependent launch: the grid may start while its predecessor in the stream still
  // runs. Only for kernels in which every thread executes grid_dependency_wait() before it accesses
  // global memory that the previous grid may use.
  bool dependent = false;
  // All blocks are resident at once, so that they may wait for each other; a grid too large for
  // that is Unimplemented. Not together with `dependent`.
  bool cooperative = false;
};

// A __global__ function compiled into this library, or a kernel of an embedded cubin. Define it as
// a static object in the kernel's .cu file; it registers nothing and calls no CUDA library before
// its first launch.
class Kernel {
 public:
  // `max_dynamic_smem`, `max_cluster`: the maxima over all launches.
  constexpr Kernel(const char* name, const void* entry, uint32_t max_dynamic_smem = 0,
                   uint32_t max_cluster = 8)
      : name_(name),
        entry_(entry),
        max_dynamic_smem_(max_dynamic_smem),
        max_cluster_(max_cluster) {}

  // `cubin` must outlive this.
  constexpr Kernel(const char* name, const CubinSymbol* cubin, uint32_t max_dynamic_smem)
      : name_(name), cubin_(cubin), max_dynamic_smem_(max_dynamic_smem) {}

  const char* name() const { return name_; }

  // Launches on `stream` (a CUstream) of the CUDA device `device`. `args` points to the kernel's
  // arguments in order. Thread-safe, capturable from the very first call, never synchronises.
  Status launch(const LaunchConfig& config, int device, void* stream, void** args) const;

  // Loads the kernel on `device` without launching it.
  Status load(int device) const;

 private:
  Status prepare(int device) const;

  Status find(int device, CUkernel* kernel) const;

  // The kernel as a CUfunction, which is for one device and launches slightly faster than the
  // CUkernel, which is for all.
  struct Function;

  const char* name_;
  const void* entry_ = nullptr;
  const CubinSymbol* cubin_ = nullptr;
  uint32_t max_dynamic_smem_;
  uint32_t max_cluster_ = 8;  // blocks; more than 8 is allowed per device at first use
  mutable std::atomic<void*> handle_{nullptr};              // CUkernel
  mutable std::atomic<const Function*> function_{nullptr};  // of the last device loaded on
  mutable std::atomic<uint64_t> ready_devices_{0};          // bit d: loaded on device d
};

}  // namespace tiercel

#endif  // KERNELS_SM90_LAUNCH_H_
