// SPDX-License-Identifier: Apache-2.0
// How the norms' launchers divide a row.
#ifndef KERNELS_NORM_NORM_THREADS_H_
#define KERNELS_NORM_NORM_THREADS_H_

#include <cstdint>

#include "kernels/sm90/math.h"

namespace tiercel {

// Threads that share a row of so many vectors in a block, `per_thread` each: part of a warp, a
// power of two, or whole warps.
inline int threads_for(int64_t vectors, int per_thread, int fewest = 8) {
  const int64_t threads = ceil_div(vectors, per_thread);
  if (threads > 32) return static_cast<int>(round_up(threads, 32));
  int lanes = fewest;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_THREADS_H_
