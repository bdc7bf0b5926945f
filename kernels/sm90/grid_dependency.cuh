// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a grid may start while the grid before it in the stream still
// runs.
#ifndef KERNELS_SM90_GRID_DEPENDENCY_CUH_
#define KERNELS_SM90_GRID_DEPENDENCY_CUH_

namespace tiercel {

// Returns once all grids before this one have finished and their writes are visible. A kernel
// launched with LaunchConfig::dependent calls it in every thread before it reads or writes global
// memory.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets a dependent grid be scheduled from here on; it still waits for this grid's end where it
// calls the above.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_GRID_DEPENDENCY_CUH_
