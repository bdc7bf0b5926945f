// SPDX-License-Identifier: Apache-2.0
// The backward kernels, by dtype, mask and the threads that share a row.
#include "kernels/softmax/softmax_long.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(type, masked, aligned, lanes, vectors, threads, name, ...)           \
  {DType::k##type,                                                                          \
   masked,                                                                                  \
   aligned,                                                                                 \
   lanes,                                                                                   \
   vectors,                                                                                 \
   threads,                                                                                 \
   kSoftmaxBlocks,                                                                          \
   Kernel("softmax_backward_" name "<" #type ", masked=" #masked ", aligned=" #aligned ">", \
          reinterpret_cast<const void*>(__VA_ARGS__))}
#define TIERCEL_LANES(type, masked, aligned, lanes, vectors)                                       \
  TIERCEL_KERNEL(                                                                                  \
      type, masked, aligned, lanes, vectors, kSoftmaxLaneThreads, "by_lanes_" #lanes "x" #vectors, \
      softmax_backward<type, LaneGroup<lanes>, vectors, masked, aligned, kSoftmaxLaneThreads>)
#define TIERCEL_BLOCKS(type, masked, aligned, vectors)                                       \
  TIERCEL_KERNEL(type, masked, aligned, 0, vectors, kSoftmaxThreads, "by_blocks_x" #vectors, \
                 softmax_backward<type, BlockGroup, vectors, masked, aligned, kSoftmaxThreads>)
#define TIERCEL_FORMS(type, masked)                                                         \
  TIERCEL_LANES(type, masked, false, 2, 1), TIERCEL_LANES(type, masked, false, 4, 1),       \
      TIERCEL_LANES(type, masked, false, 8, 1), TIERCEL_LANES(type, masked, false, 16, 1),  \
      TIERCEL_LANES(type, masked, false, 32, 1), TIERCEL_LANES(type, masked, false, 32, 2), \
      TIERCEL_BLOCKS(type, masked, false, 1), TIERCEL_BLOCKS(type, masked, false, 2),       \
      TIERCEL_BLOCKS(type, masked, false, 4),                                               \
      TIERCEL_KERNEL(type, masked, false, 0, 0, kSoftmaxThreads, "long",                    \
                     softmax_long_backward<type, masked>)
#define TIERCEL_ALIGNED(type)                                                           \
  TIERCEL_LANES(type, false, true, 2, 1), TIERCEL_LANES(type, false, true, 4, 1),       \
      TIERCEL_LANES(type, false, true, 8, 1), TIERCEL_LANES(type, false, true, 16, 1),  \
      TIERCEL_LANES(type, false, true, 32, 1), TIERCEL_LANES(type, false, true, 32, 2), \
      TIERCEL_BLOCKS(type, false, true, 1), TIERCEL_BLOCKS(type, false, true, 2),       \
      TIERCEL_BLOCKS(type, false, true, 4), TIERCEL_BLOCKS(type, false, true, 8)
#define TIERCEL_TYPE(type) \
  TIERCEL_ALIGNED(type), TIERCEL_FORMS(type, false), TIERCEL_FORMS(type, true)

const SoftmaxKernel kKernels[] = {TIERCEL_TYPE(Float32), TIERCEL_BLOCKS(Float32, false, false, 8),
                                  TIERCEL_BLOCKS(Float32, true, false, 8), TIERCEL_TYPE(BFloat16),
                                  TIERCEL_TYPE(Float16)};

}  // namespace

const SoftmaxKernel* softmax_backward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
