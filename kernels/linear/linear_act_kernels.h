// SPDX-License-Identifier: Apache-2.0
// What linear_act's launcher and its compiled kernels (linear_cute.py) agree on.
#ifndef KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
#define KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_

#include "kernels/linear/linear_act.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct LinearActVariant {
  DType dtype;
  Activation activation;
  int tile_m;
  int tile_n;
  bool pingpong;
  int cluster;  // of a kernel that multicasts; a split-K kernel takes any
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

// How one kernel would be launched for a problem; its expected time in microseconds.
double linear_act_estimate(const LinearActKernel& kernel, int64_t m, int64_t n, int64_t k,
                           int multiprocessors, LinearActChoice* choice);

// The kernel that linear_act() takes.
LinearActChoice linear_act_choose(DType dtype, Activation activation, int64_t m, int64_t n,
                                  int64_t k, int multiprocessors);

// A given configuration for a problem; not ok where no kernel has it or it cannot run.
Status linear_act_configure(const LinearActConfig& config, DType dtype, Activation activation,
                            int64_t m, int64_t n, int64_t k, int multiprocessors,
                            LinearActChoice* choice);

// Launches a choice. The arguments have passed linear_act's checks.
Status linear_act_launch(const LinearActChoice& choice, const TensorView& x, const TensorView& w,
                         const TensorView* bias, const TensorView& y, void* stream);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_ACT_KERNELS_H_
