// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels of a reduction.
#ifndef KERNELS_REDUCE_REDUCE_CHOOSE_H_
#define KERNELS_REDUCE_REDUCE_CHOOSE_H_

#include <cstdint>

#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/status.h"

namespace tiercel {

struct ReduceLaunch {
  const ReduceKernel* kernel = nullptr;
  ReduceArgs args{};
  unsigned grid = 0;
  unsigned block = 0;
  int vector_bytes = 0;  // of most loads of x
};

// One kernel, or one that writes partial results to a workspace and a second that combines them.
struct ReduceChoice {
  ReduceLaunch first;
  ReduceLaunch second;
  int64_t workspace = 0;  // floats
};

// `args` describes the problem, with at least one output; parts and cluster are not yet set. The
// caller sets the workspace's address in `first.args.out` and `second.args.x`.
Status reduce_choose(const ReduceArgs& args, DType dtype, bool max, ReduceChoice* choice);

}  // namespace tiercel

#endif  // KERNELS_REDUCE_REDUCE_CHOOSE_H_
