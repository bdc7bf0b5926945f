// SPDX-License-Identifier: Apache-2.0
// What linear_act's launcher and its compiled kernels (linear_cute.py) agree on.
#ifndef KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
#define KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_

#include "kernels/linear/linear_act.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

// As linear_act_cute.py has them. A split-K kernel takes residual and sums without being kExtra.
enum class LinearKind { kPlain, kExtra, kGated, kGradX, kGradWeight };

struct LinearActVariant {
  LinearKind kind;
  DType dtype;
  Activation activation;
  int tile_m;
  int tile_n;
  bool pingpong;
  int cluster;  // of a kernel that multicasts; a split-K kernel takes any
  int stages;   // of the ring
  bool split_k;
};

using LinearActKernel = CubinKernel<LinearActVariant>;

// All kernels, as compiled.
const CubinKernel<LinearActVariant>* linear_act_kernels(int* count);

// A kernel and how to launch it.
struct LinearActChoice {
  const LinearActKernel* kernel;
  int splits;
  int rows;   // of a split-K kernel's tile: at most tile_m
  int group;  // rows of clusters that are worked on together, for the L2's sake
  unsigned blocks;
};

// What a kernel is wanted for; m, n and k as the kernel has them.
struct LinearProblem {
  LinearKind kind;
  DType dtype;
  Activation activation;
  int64_t m, n, k;
};

// How one kernel would be launched for a problem; its expected time in microseconds.
double linear_act_estimate(const LinearActKernel& kernel, const LinearProblem& problem,
                           int multiprocessors, LinearActChoice* choice);

// The kernel that has the least.
LinearActChoice linear_act_choose(const LinearProblem& problem, int multiprocessors);

// A given configuration for a problem; not ok where no kernel has it or it cannot run.
Status linear_act_configure(const LinearActConfig& config, const LinearProblem& problem,
                            int multiprocessors, LinearActChoice* choice);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
