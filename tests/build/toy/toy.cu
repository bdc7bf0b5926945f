// SPDX-License-Identifier: Apache-2.0
// toy_shift: one element a thread.
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/toy/toy_kernels.h"

namespace tiercel {
namespace {

__global__ void __launch_bounds__(256) toy_shift_kernel(const __grid_constant__ ToyShiftArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  if (i < args.count) args.out[i] = args.x[i] + args.amount;
}

const ToyShiftKernel kKernels[] = {
    {Kernel("toy_shift", reinterpret_cast<const void*>(toy_shift_kernel))}};

}  // namespace

const ToyShiftKernel* toy_shift_kernels(int* count) {
  *count = 1;
  return kKernels;
}

}  // namespace tiercel
