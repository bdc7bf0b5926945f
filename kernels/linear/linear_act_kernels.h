// SPDX-License-Identifier: Apache-2.0
// The interface of linear_act's host code and its compiled kernels (linear_cute.py).
#ifndef KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
#define KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_

#include "kernels/linear/linear_act.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

// The values of linear_act_cute.py. Split-K kernels support residual and sums without kExtra.
// kBlocks, kGatedBlocks: float8 with scales of blocks; the activation is chosen at run time.
enum class LinearKind { kPlain, kExtra, kGated, kGradX, kGradWeight, kBlocks, kGatedBlocks };

constexpr bool has_block_scales(LinearKind kind) {
  return kind == LinearKind::kBlocks || kind == LinearKind::kGatedBlocks;
}

struct LinearActVariant {
  LinearKind kind;
  DType dtype;
  Activation activation;
  int tile_m;
  int tile_n;
  bool pingpong;
  int cluster;  // for kernels that multicast; split-K kernels take any
  int stages;   // in the ring
  bool split_k;
  bool whole;  // split-K kernels for a K that is not split, for the batch-invariant mode
};

using LinearActKernel = CubinKernel<LinearActVariant>;

// All compiled kernels.
const CubinKernel<LinearActVariant>* linear_act_kernels(int* count);

// A kernel and its launch.
struct LinearActChoice {
  const LinearActKernel* kernel;
  int splits;
  int rows;   // per tile of a split-K kernel: at most tile_m
  int group;  // rows of clusters that are processed together, for reuse in L2
  unsigned blocks;
};

// The problem to choose a kernel for; m, n and k are the kernel's.
struct LinearProblem {
  LinearKind kind;
  DType dtype;
  Activation activation;
  int64_t m, n, k;
};

// Sets the launch of a kernel for a problem and returns its estimated time in microseconds.
double linear_act_estimate(const LinearActKernel& kernel, const LinearProblem& problem,
                           int multiprocessors, LinearActChoice* choice);

// The kernel with the least estimated time.
LinearActChoice linear_act_choose(const LinearProblem& problem, int multiprocessors);

// The launch of a given configuration; an error if no kernel has it or it cannot run.
Status linear_act_configure(const LinearActConfig& config, const LinearProblem& problem,
                            int multiprocessors, LinearActChoice* choice);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
