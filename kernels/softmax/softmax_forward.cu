// SPDX-License-Identifier: Apache-2.0
// The forward kernels, by dtype, mask and who shares a row.
#include "kernels/softmax/softmax_long.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(type, masked, lanes, vectors, name, ...)           \
  {DType::k##type, false, masked, lanes, vectors,                         \
   Kernel("softmax_" name "<" #type ", masked=" #masked ">",              \
          reinterpret_cast<const void*>(__VA_ARGS__))}
#define TIERCEL_LANES(type, masked, lanes, vectors)                                            \
  TIERCEL_KERNEL(type, masked, lanes, vectors,                                                 \
                 "forward_by_lanes_" #lanes "x" #vectors,                                      \
                 softmax_forward<type, LaneGroup<lanes>, vectors, masked, kSoftmaxLaneThreads>)
#define TIERCEL_BLOCKS(type, masked, vectors)                                          \
  TIERCEL_KERNEL(type, masked, 0, vectors, "forward_by_blocks_x" #vectors,             \
                 softmax_forward<type, BlockGroup, vectors, masked, kSoftmaxThreads>)
// Shortest rows first: the first that covers a row is taken.
#define TIERCEL_FORMS(type, masked)                                                            \
  TIERCEL_LANES(type, masked, 2, 1), TIERCEL_LANES(type, masked, 4, 1),                        \
      TIERCEL_LANES(type, masked, 8, 1), TIERCEL_LANES(type, masked, 16, 1),                   \
      TIERCEL_LANES(type, masked, 32, 1), TIERCEL_LANES(type, masked, 32, 2),                  \
      TIERCEL_LANES(type, masked, 32, 4), TIERCEL_BLOCKS(type, masked, 1),                     \
      TIERCEL_BLOCKS(type, masked, 2), TIERCEL_BLOCKS(type, masked, 4),                        \
      TIERCEL_BLOCKS(type, masked, 8),                                                         \
      TIERCEL_KERNEL(type, masked, 0, 0, "forward_long", softmax_long_forward<type, masked>)
#define TIERCEL_MASKS(type) TIERCEL_FORMS(type, false), TIERCEL_FORMS(type, true)

const SoftmaxKernel kKernels[] = {TIERCEL_MASKS(Float32), TIERCEL_MASKS(BFloat16),
                                  TIERCEL_MASKS(Float16)};

}  // namespace

const SoftmaxKernel* softmax_forward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
