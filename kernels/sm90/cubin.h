// SPDX-License-Identifier: Apache-2.0
// Cubins embedded in this library: how kernels of the CuTe DSL, compiled ahead of time, are loaded.
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

// Loaded once a process, on first use; never unloaded.
class Cubin {
 public:
  explicit constexpr Cubin(const void* image) : image_(image) {}

  // The kernel of that name, loading the cubin if it is not yet. Callers hold a lock and allow
  // loading in a stream capture; Kernel does both.
  CUresult get_kernel(const char* symbol, CUkernel* kernel) const;

 private:
  const void* image_;
  mutable std::atomic<CUlibrary> library_{nullptr};
};

// What a launcher and a kernel's compiled form must agree on.
struct CubinSymbol {
  const Cubin* cubin;
  const char* symbol;
  const CubinParameter* parameters;
  int parameter_count;
};

// Compares the parameters that the driver sees with the declared ones; empty where they agree.
std::string parameter_mismatch(const CubinSymbol& symbol, CUkernel kernel);

}  // namespace tiercel

#endif  // KERNELS_SM90_CUBIN_H_
