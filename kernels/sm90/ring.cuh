// SPDX-License-Identifier: Apache-2.0
// A ring of shared memory stages that the copy engine fills: rows arrive far ahead of the threads
// that read them, and cost those no registers.
#ifndef KERNELS_SM90_RING_CUH_
#define KERNELS_SM90_RING_CUH_

#include <cuda.h>

#include <cstdint>

namespace tiercel {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t times = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(times)
               : "memory");
}

// `barrier` is as shared_address() has it.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

// For what other blocks of a cluster have sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The same, of bytes that are read once: they leave the L2 before all others.
__device__ __forceinline__ void bulk_load_once(void* to, const void* from, uint32_t bytes,
                                               uint64_t* barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // as createpolicy makes it, of all bytes
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// By one of a warp's threads, which all come here with the same values: then these may be in
// uniform registers, as the copy engine wants them.
__device__ __forceinline__ void elected_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

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

// Two times `bytes`, announced to the barrier and asked for by the same thread. Shared memory's
// addresses are as shared_address() has them.
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

// The same bytes to the L2 only, as a hint.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same bytes to the L2 only, as a hint; and the map itself to where the copy engine reads it.
__device__ __forceinline__ void box_prefetch(const CUtensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column),
               "r"(row)
               : "memory");
}

__device__ __forceinline__ void map_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of a tensor map at `column` and `row`, zeros where it is outside of the tensor.
__device__ __forceinline__ void box_load(void* to, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_RING_CUH_
