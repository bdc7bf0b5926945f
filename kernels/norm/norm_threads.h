// SPDX-License-Identifier: Apache-2.0
// How the norms' host code divides a row among threads.
#ifndef KERNELS_NORM_NORM_THREADS_H_
#define KERNELS_NORM_NORM_THREADS_H_

#include <cstdint>

#include "kernels/sm90/math.h"

namespace tiercel {

// Threads of a block that share a row of `vectors` vectors, `per_thread` each: a power of two
// within a warp, or whole warps.
inline int threads_for(int64_t vectors, int per_thread, int fewest = 8) {
  const int64_t threads = ceil_div(vectors, per_thread);
  if (threads > 32) return static_cast<int>(round_up(threads, 32));
  int lanes = fewest;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_THREADS_H_
