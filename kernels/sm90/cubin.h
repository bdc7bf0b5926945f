// SPDX-License-Identifier: Apache-2.0
// Cubins embedded in this library: CuTe DSL kernels that were compiled ahead of time.
#ifndef KERNELS_SM90_CUBIN_H_
#define KERNELS_SM90_CUBIN_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace tiercel {

// Where one kernel parameter lies in the parameter block, in bytes.
struct CubinParameter {
  uint16_t offset;
  uint16_t size;
};

// Loaded once per process, on first use; never unloaded.
class Cubin {
 public:
  explicit constexpr Cubin(const void* image) : image_(image) {}

  // Finds the kernel of that name and loads the cubin if needed. Callers hold a lock and allow
  // loading during stream capture; Kernel does both.
  CUresult get_kernel(const char* symbol, CUkernel* kernel) const;

 private:
  const void* image_;
  mutable std::atomic<CUlibrary> library_{nullptr};
};

// A kernel of a cubin and the parameters that the host code passes to it.
struct CubinSymbol {
  const Cubin* cubin;
  const char* symbol;
  const CubinParameter* parameters;
  int parameter_count;
};

// Compares the parameters that the driver reports with the declared ones; empty if they agree.
std::string parameter_mismatch(const CubinSymbol& symbol, CUkernel kernel);

}  // namespace tiercel

#endif  // KERNELS_SM90_CUBIN_H_
