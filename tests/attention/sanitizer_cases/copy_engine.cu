// SPDX-License-Identifier: Apache-2.0
// Right programs that compute-sanitizer reports: what it does not know of the copy engine.
#include <cstdint>

namespace {

constexpr int kStages = 2, kReaders = 2, kFloats = 32, kBytes = kFloats * 4;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void set_up(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Releases what the thread did before to those who wait.
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ void wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

}  // namespace

// Warp 0 brings rows of 32 floats through a ring of two stages, the other warps add them up: the
// order of attention's backward with its rows' sums. A copy's write comes before the reads, which
// wait for the barrier that counts its bytes. A later write of the stage comes after them: a warp's
// reads before its __syncwarp, that before its arrival, those of all warps before the producer's
// wait, and that before the copy is issued. With kByEngine false warp 0 writes by itself, in the
// same order.
template <bool kByEngine, int kSteps>
__global__ void sums_through_a_ring(const float* in, float* out) {
  __shared__ alignas(128) float stage[kStages][kFloats];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      set_up(&full[i], 1);
      set_up(&empty[i], kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float sum = 0.0f;
  for (int step = 0; step < kSteps; ++step) {
    const int at = step % kStages, round = step / kStages;
    if (warp == 0) {
      wait(&empty[at], (round + 1) % 2);
      if constexpr (kByEngine) {
        if (lane == 0) {
          arrive_and_expect(&full[at], kBytes);
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
              "[%3];" ::"r"(shared_address(stage[at])),
              "l"(in + step * kFloats), "r"(kBytes), "r"(shared_address(&full[at]))
              : "memory");
        }
      } else {
        stage[at][lane] = in[step * kFloats + lane];
        __syncwarp();
        if (lane == 0) arrive(&full[at]);
      }
    } else {
      wait(&full[at], round % 2);
      sum += stage[at][lane];
      __syncwarp();
      if (lane == 0) arrive(&empty[at]);
    }
  }
  if (warp != 0) out[threadIdx.x - 32] = sum;
}

template __global__ void sums_through_a_ring<true, 64>(const float*, float*);
template __global__ void sums_through_a_ring<false, 64>(const float*, float*);

// 32 floats from shared memory to where a tensor map says, as attention's forward stores its
// result. The map was written by the host.
template <bool kByEngine>
__global__ void store_floats(const unsigned char* map, float* out) {
  __shared__ alignas(128) float tile[kFloats];
  tile[threadIdx.x] = static_cast<float>(threadIdx.x);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if constexpr (kByEngine) {
    if (threadIdx.x == 0) {
      asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
      asm volatile(
          "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(map),
          "r"(0), "r"(shared_address(tile))
          : "memory");
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
  } else {
    out[threadIdx.x] = tile[threadIdx.x];
  }
}

template __global__ void store_floats<true>(const unsigned char*, float*);
template __global__ void store_floats<false>(const unsigned char*, float*);

// A later kernel's read of them.
__global__ void read_floats(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }
