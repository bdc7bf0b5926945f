// SPDX-License-Identifier: Apache-2.0
// The forward kernels, by dtype, mask and who shares a row.
#include "kernels/softmax/softmax_long.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(type, masked, lanes, vectors, threads, name, ...) \
  {DType::k##type, masked, lanes, vectors, threads,                  \
   Kernel("softmax_forward_" name "<" #type ", masked=" #masked ">", \
          reinterpret_cast<const void*>(__VA_ARGS__))}
#define TIERCEL_LANES(type, masked, lanes, vectors)                                  \
  TIERCEL_KERNEL(type, masked, lanes, vectors, kSoftmaxLaneThreads, "by_lanes_" #lanes "x" #vectors,      \
                 softmax_forward<type, LaneGroup<lanes>, vectors, masked, kSoftmaxLaneThreads>)
#define TIERCEL_WIDEST(type, masked, vectors, threads)                      \
  TIERCEL_KERNEL(type, masked, 0, vectors, threads, "by_blocks_x" #vectors, \
                 softmax_forward<type, BlockGroup, vectors, masked, threads>)
#define TIERCEL_BLOCKS(type, masked, vectors) \
  TIERCEL_WIDEST(type, masked, vectors, kSoftmaxThreads)
#define TIERCEL_FORMS(type, masked)                                                              \
  TIERCEL_LANES(type, masked, 2, 1),  \
  TIERCEL_LANES(type, masked, 2, 2),  \
  TIERCEL_LANES(type, masked, 4, 2),  \
  TIERCEL_LANES(type, masked, 8, 2),  \
  TIERCEL_LANES(type, masked, 16, 2),  \
  TIERCEL_LANES(type, masked, 32, 2),  \
  TIERCEL_LANES(type, masked, 32, 4),  \
  TIERCEL_BLOCKS(type, masked, 1), TIERCEL_BLOCKS(type, masked, 2),                            \
      TIERCEL_BLOCKS(type, masked, 4),                                                           \
      TIERCEL_KERNEL(type, masked, 0, 0, kSoftmaxThreads, "long", softmax_long_forward<type, masked>)
#define TIERCEL_TYPE(type) TIERCEL_FORMS(type, false), TIERCEL_FORMS(type, true)

const SoftmaxKernel kKernels[] = {
    TIERCEL_TYPE(Float32),  TIERCEL_BLOCKS(Float32, false, 8), TIERCEL_BLOCKS(Float32, true, 8),
    TIERCEL_TYPE(BFloat16), TIERCEL_TYPE(Float16),
    TIERCEL_WIDEST(BFloat16, false, 8, kSoftmaxWideThreads),
    TIERCEL_WIDEST(Float16, false, 8, kSoftmaxWideThreads)};

}  // namespace

const SoftmaxKernel* softmax_forward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
