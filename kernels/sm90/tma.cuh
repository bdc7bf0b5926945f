// SPDX-License-Identifier: Apache-2.0
// Copies and prefetches by TMA: contiguous bytes (bulk_) and boxes of tensor maps (box_). Loads
// complete on a barrier, so data arrives far ahead of its use and costs no registers.
#ifndef KERNELS_SM90_TMA_CUH_
#define KERNELS_SM90_TMA_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// bulk_load for bytes that are read once: L2 evicts them first.
__device__ __forceinline__ void bulk_load_once(void* to, const void* from, uint32_t bytes,
                                               uint64_t* barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // the policy that createpolicy makes
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// bulk_load by one elected thread, as elected_expect().
__device__ __forceinline__ void elected_load(void* to, const void* from, uint32_t bytes,
                                             uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n"
      "}" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// One elected thread announces 2 * `bytes` to the barrier and starts two loads of `bytes` each.
// Shared memory addresses are from shared_address().
__device__ __forceinline__ void elected_load_pair(uint32_t to, const void* from, uint32_t second_to,
                                                  const void* second_from, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%5], %6;\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %4, "
      "[%5];\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %4, "
      "[%5];\n"
      "}" ::"r"(to),
      "l"(from), "r"(second_to), "l"(second_from), "r"(bytes), "r"(barrier), "r"(2 * bytes)
      : "memory");
}

// bulk_prefetch by one elected thread.
__device__ __forceinline__ void elected_prefetch(const void* from, uint32_t bytes) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.prefetch.L2.global [%0], %1;\n"
      "}" ::"l"(from),
      "r"(bytes)
      : "memory");
}

// A hint to bring the bytes to L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// A hint to bring a box of a tensor map to L2.
__device__ __forceinline__ void box_prefetch(const CUtensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column),
               "r"(row)
               : "memory");
}

// Brings the tensor map itself to the cache that TMA reads it from.
__device__ __forceinline__ void map_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box of a tensor map at `column` and `row`; elements outside the tensor are zero.
__device__ __forceinline__ void box_load(void* to, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// box_load of a tensor of three dimensions, the innermost first.
__device__ __forceinline__ void box_load(void* to, const CUtensorMap* map, int x, int y, int z,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// Loads a box to one place of each block of the cluster in `ranks` (a bit each), and signals the
// barrier of each.
__device__ __forceinline__ void box_multicast(void* to, const CUtensorMap* map, int column, int row,
                                              uint64_t* barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_TMA_CUH_
