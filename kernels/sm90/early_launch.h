// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch, earlier than grid_dependency_launch() after the wait: a grid that
// has little to do lets the next one start while the grids before it still run.
#ifndef KERNELS_SM90_EARLY_LAUNCH_H_
#define KERNELS_SM90_EARLY_LAUNCH_H_

#include <cstdint>

#include "kernels/sm90/math.h"
#ifdef __CUDACC__
#include "kernels/sm90/grid_dependency.cuh"
#endif

namespace tiercel {

// True if a grid leaves the next one's blocks so much room that they may wait beside it.
inline bool launches_early(int64_t blocks) { return blocks <= kDefaultMultiprocessors; }

#ifdef __CUDACC__
// Waits for the grids before this one, and allows the next one to be scheduled. With `early` that
// may start, and prefetch, before those have ended; its wait is for this grid's end, and so for
// theirs. Kernels that read before they wait, because they know the grid before them (moe_down),
// must not follow such a one.
__device__ __forceinline__ void grid_dependency_wait_and_launch(bool early) {
  if (early) grid_dependency_launch();
  grid_dependency_wait();
  if (!early) grid_dependency_launch();
}
#endif

}  // namespace tiercel

#endif  // KERNELS_SM90_EARLY_LAUNCH_H_
