// SPDX-License-Identifier: Apache-2.0
// A block of mla_sparse: its shared memory, and its share of all steps.
#ifndef KERNELS_MLA_SPARSE_CUH_
#define KERNELS_MLA_SPARSE_CUH_

#include <cstdint>

#include "kernels/mla/mla_kernels.h"

namespace tiercel {

// Each query has as many steps as any other; lanes have equal runs of them, in pairs of steps.
struct SparseShare {
  int each;         // steps of a lane
  int end;          // of the lane, among all steps
  int b;            // the query
  int origin;       // its first step, among all steps
  int count;        // steps of a query
  int first, last;  // the lane's steps of the query

  // False if the lane has no steps.
  __device__ __forceinline__ bool begin(const MlaDecodeArgs& args, int lane) {
    count = max((args.capacity + 2 * kMlaStep - 1) / (2 * kMlaStep), 1) * 2;
    const int total = args.batch * count;
    each = (total / 2 + args.lanes - 1) / args.lanes * 2;
    const int from = lane * each;
    end = min(from + each, total);
    if (from >= end) return false;
    b = from / count;
    origin = b * count;
    first = from - origin;
    last = min(count, end - origin);
    return true;
  }

  // The next query; false behind the last.
  __device__ __forceinline__ bool next(const MlaDecodeArgs&) {
    if (origin + last >= end) return false;
    origin += count;
    ++b;
    first = 0;
    last = min(count, end - origin);
    return true;
  }

  __device__ __forceinline__ int steps() const { return count; }

  // True if other lanes have steps of the query, too.
  __device__ __forceinline__ bool shared() const { return first > 0 || last < count; }

  __device__ __forceinline__ int lane_of(int step) const { return (origin + step) / each; }
};

}  // namespace tiercel

#endif  // KERNELS_MLA_SPARSE_CUH_
