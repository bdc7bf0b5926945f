// SPDX-License-Identifier: Apache-2.0
// The forward kernels, by dtype, mask and the threads that share a row.
#include "kernels/softmax/softmax_long.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(type, masked, aligned, lanes, vectors, threads, name, ...)          \
  {DType::k##type,                                                                         \
   masked,                                                                                 \
   aligned,                                                                                \
   lanes,                                                                                  \
   vectors,                                                                                \
   threads,                                                                                \
   aligned && vectors == 8 ? kSoftmaxWideBlocks : kSoftmaxBlocks,                          \
   Kernel("softmax_forward_" name "<" #type ", masked=" #masked ", aligned=" #aligned ">", \
          reinterpret_cast<const void*>(__VA_ARGS__), 0,                                   \
          aligned && vectors == 8 ? kSoftmaxWideBlocks : kSoftmaxBlocks)}
#define TIERCEL_LANES(type, masked, aligned, lanes, vectors)                                       \
  TIERCEL_KERNEL(                                                                                  \
      type, masked, aligned, lanes, vectors, kSoftmaxLaneThreads, "by_lanes_" #lanes "x" #vectors, \
      softmax_forward<type, LaneGroup<lanes>, vectors, masked, aligned, kSoftmaxLaneThreads>)
#define TIERCEL_WIDEST(type, masked, aligned, vectors, threads)                      \
  TIERCEL_KERNEL(type, masked, aligned, 0, vectors, threads, "by_blocks_x" #vectors, \
                 softmax_forward<type, BlockGroup, vectors, masked, aligned, threads>)
#define TIERCEL_BLOCKS(type, masked, aligned, vectors) \
  TIERCEL_WIDEST(type, masked, aligned, vectors, kSoftmaxThreads)
#define TIERCEL_FORMS(type, masked)                                                         \
  TIERCEL_LANES(type, masked, false, 2, 1), TIERCEL_LANES(type, masked, false, 2, 2),       \
      TIERCEL_LANES(type, masked, false, 4, 2), TIERCEL_LANES(type, masked, false, 8, 2),   \
      TIERCEL_LANES(type, masked, false, 16, 2), TIERCEL_LANES(type, masked, false, 32, 2), \
      TIERCEL_LANES(type, masked, false, 32, 4), TIERCEL_BLOCKS(type, masked, false, 1),    \
      TIERCEL_BLOCKS(type, masked, false, 2), TIERCEL_BLOCKS(type, masked, false, 4),       \
      TIERCEL_KERNEL(type, masked, false, 0, 0, kSoftmaxThreads, "long",                    \
                     softmax_long_forward<type, masked>)
#define TIERCEL_ALIGNED(type, masked)                                                     \
  TIERCEL_LANES(type, masked, true, 2, 1), TIERCEL_LANES(type, masked, true, 2, 2),       \
      TIERCEL_LANES(type, masked, true, 4, 2), TIERCEL_LANES(type, masked, true, 8, 2),   \
      TIERCEL_LANES(type, masked, true, 16, 2), TIERCEL_LANES(type, masked, true, 32, 2), \
      TIERCEL_LANES(type, masked, true, 32, 4), TIERCEL_BLOCKS(type, masked, true, 1),    \
      TIERCEL_BLOCKS(type, masked, true, 2), TIERCEL_BLOCKS(type, masked, true, 4)
#define TIERCEL_TYPE(type)                                                                         \
  TIERCEL_ALIGNED(type, false), TIERCEL_BLOCKS(type, false, true, 8), TIERCEL_ALIGNED(type, true), \
      TIERCEL_FORMS(type, false), TIERCEL_FORMS(type, true)

const SoftmaxKernel kKernels[] = {TIERCEL_TYPE(Float32),
                                  TIERCEL_BLOCKS(Float32, false, false, 8),
                                  TIERCEL_BLOCKS(Float32, true, false, 8),
                                  TIERCEL_TYPE(BFloat16),
                                  TIERCEL_TYPE(Float16),
                                  TIERCEL_WIDEST(BFloat16, false, false, 8, kSoftmaxWideThreads),
                                  TIERCEL_WIDEST(Float16, false, false, 8, kSoftmaxWideThreads)};

}  // namespace

const SoftmaxKernel* softmax_forward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
