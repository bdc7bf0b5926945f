// SPDX-License-Identifier: Apache-2.0
// The backward kernels, by dtype, mask and who shares a row.
#include "kernels/softmax/softmax_long.cuh"
#include "kernels/softmax/softmax_ring.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(type, masked, lanes, vectors, ring, smem, name, ...) \
  {DType::k##type,                                                          \
   masked,                                                                  \
   lanes,                                                                   \
   vectors,                                                                 \
   ring,                                                                    \
   Kernel("softmax_backward_" name "<" #type ", masked=" #masked ">",        \
          reinterpret_cast<const void*>(__VA_ARGS__), smem)}
#define TIERCEL_LANES(type, masked, lanes, vectors)                                         \
  TIERCEL_KERNEL(type, masked, lanes, vectors, false, 0, "by_lanes_" #lanes "x" #vectors,   \
                 softmax_backward<type, LaneGroup<lanes>, vectors, masked, kSoftmaxLaneThreads>)
#define TIERCEL_BLOCKS(type, masked, vectors)                                 \
  TIERCEL_KERNEL(type, masked, 0, vectors, false, 0, "by_blocks_x" #vectors,  \
                 softmax_backward<type, BlockGroup, vectors, masked, kSoftmaxThreads>)
#define TIERCEL_RING(type, vectors)                                                             \
  TIERCEL_KERNEL(type, false, 0, vectors, true, kSoftmaxRingBytes, "ring_x" #vectors,           \
                 softmax_backward_ring<type, vectors>)
#define TIERCEL_FORMS(type, masked)                                                             \
  TIERCEL_LANES(type, masked, 2, 1), TIERCEL_LANES(type, masked, 2, 2),                         \
      TIERCEL_LANES(type, masked, 4, 2), TIERCEL_LANES(type, masked, 8, 2),                     \
      TIERCEL_LANES(type, masked, 16, 2), TIERCEL_LANES(type, masked, 32, 1),                   \
      TIERCEL_LANES(type, masked, 32, 2), TIERCEL_LANES(type, masked, 32, 4),                   \
      TIERCEL_BLOCKS(type, masked, 1), TIERCEL_BLOCKS(type, masked, 2),                         \
      TIERCEL_BLOCKS(type, masked, 4),                                                          \
      TIERCEL_KERNEL(type, masked, 0, 0, false, 0, "long", softmax_long_backward<type, masked>)
#define TIERCEL_TYPE(type) TIERCEL_FORMS(type, false), TIERCEL_FORMS(type, true)

const SoftmaxKernel kKernels[] = {
    TIERCEL_TYPE(Float32),   TIERCEL_BLOCKS(Float32, false, 8), TIERCEL_BLOCKS(Float32, true, 8),
    TIERCEL_RING(Float32, 8), TIERCEL_TYPE(BFloat16),            TIERCEL_RING(BFloat16, 4),
    TIERCEL_TYPE(Float16),   TIERCEL_RING(Float16, 4)};

}  // namespace

const SoftmaxKernel* softmax_backward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
