// SPDX-License-Identifier: Apache-2.0
// One launch for all kernels: right context, first-use loading that a stream capture allows, errors
// that name the kernel.
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
  // runs. Only for kernels whose every thread executes grid_dependency_wait() before it touches
  // global memory, but for what is known to be older or to be waited for otherwise.
  bool dependent = false;
  // All blocks run at the same time, so that they may wait for each other; a grid that has no room
  // for that is refused as unimplemented. Not together with `dependent`.
  bool cooperative = false;
};

// A __global__ function compiled into this library, or a kernel of an embedded cubin. Make one
// static object of it in the kernel's .cu file; it registers nothing and touches no CUDA library
// until its first launch.
class Kernel {
 public:
  // `max_dynamic_smem`, `max_cluster`: the most that any launch of it asks for.
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

  // The kernel as a CUfunction of one device: that takes a little less time to launch than the
  // CUkernel, which any device takes.
  struct Function;

  const char* name_;
  const void* entry_ = nullptr;
  const CubinSymbol* cubin_ = nullptr;
  uint32_t max_dynamic_smem_;
  uint32_t max_cluster_ = 8;  // blocks; more than 8 is allowed per device at first use
  mutable std::atomic<void*> handle_{nullptr};              // CUkernel
  mutable std::atomic<const Function*> function_{nullptr};  // of the device loaded on last
  mutable std::atomic<uint64_t> ready_devices_{0};          // bit d: loaded on device d
};

}  // namespace tiercel

#endif  // KERNELS_SM90_LAUNCH_H_
