// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a grid may start while the previous grid in the stream still runs.
#ifndef KERNELS_SM90_GRID_DEPENDENCY_CUH_
#define KERNELS_SM90_GRID_DEPENDENCY_CUH_

#include <type_traits>

namespace tiercel {

// Returns once all grids before this one have finished and their writes are visible. A kernel
// launched with LaunchConfig::dependent calls it in every thread before it reads or writes global
// memory.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Allows the dependent grid to be scheduled; its grid_dependency_wait() still waits for this grid's
// end.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Keeps the compiler from sinking the computation of `values` below this point, so that it overlaps
// the previous grid.
template <typename... Values>
__device__ __forceinline__ void materialize_now(Values&... values) {
  const auto one = [](auto& value) {
    using Value = std::remove_reference_t<decltype(value)>;
    static_assert(sizeof(Value) == 4 || (sizeof(Value) == 8 && !std::is_floating_point_v<Value>));
    if constexpr (sizeof(value) == 8) {
      asm volatile("" : "+l"(value));
    } else if constexpr (std::is_floating_point_v<Value>) {
      asm volatile("" : "+f"(value));
    } else {
      asm volatile("" : "+r"(value));
    }
  };
  (one(values), ...);
}

}  // namespace tiercel

#endif  // KERNELS_SM90_GRID_DEPENDENCY_CUH_
