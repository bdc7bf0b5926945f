// SPDX-License-Identifier: Apache-2.0
// Right programs that compute-sanitizer reports: what it does not know of the copy engine, and
// what it does not see of barriers.
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

__device__ void bulk_load(float* to, const float* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// A float to the same place of a block of the cluster, counted there.
__device__ void send(float* place, int block, float value, uint64_t* barrier) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [counter]; }" ::"r"(
          shared_address(place)),
      "r"(shared_address(barrier)), "r"(block), "f"(value)
      : "memory");
}

}  // namespace

// Warp 0 brings rows of 32 floats through a ring of two stages, the other warps add them up: the
// order of attention's backward with its rows' sums. A copy's write comes before the reads, which
// wait for the barrier that counts its bytes. A later write of the stage comes after them: a warp's
// reads before its __syncwarp, that before its arrival, those of all warps before the producer's
// wait, and that before the copy is issued. With kByEngine false warp 0 writes by itself, in the
// same order; racecheck reports both, but not values_by_an_elected_lane<false, false>, in which
// each lane arrives for itself. With kThroughOther warp 1's reads are ordered as those of
// mla_decode's first warpgroup: bar.arrive after them, bar.sync of warp 2, which then releases the
// stage for both.
template <bool kByEngine, bool kThroughOther, int kSteps>
__global__ void sums_through_a_ring(const float* in, float* out) {
  __shared__ alignas(128) float stage[kStages][kFloats];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      set_up(&full[i], 1);
      set_up(&empty[i], kThroughOther ? 1 : kReaders);
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
          bulk_load(stage[at], in + step * kFloats, kBytes, &full[at]);
        }
      } else {
        stage[at][lane] = in[step * kFloats + lane];
        __syncwarp();
        if (lane == 0) arrive(&full[at]);
      }
    } else {
      wait(&full[at], round % 2);
      sum += stage[at][lane];
      if constexpr (kThroughOther) {
        if (warp == 1) {
          asm volatile("bar.arrive %0, 64;" ::"r"(1 + at) : "memory");
          continue;
        }
        asm volatile("bar.sync %0, 64;" ::"r"(1 + at) : "memory");
      }
      __syncwarp();
      if (lane == 0) arrive(&empty[at]);
    }
  }
  if (warp != 0) out[threadIdx.x - 32] = sum;
}

template __global__ void sums_through_a_ring<true, false, 64>(const float*, float*);
template __global__ void sums_through_a_ring<false, false, 64>(const float*, float*);
template __global__ void sums_through_a_ring<true, true, 64>(const float*, float*);
template __global__ void sums_through_a_ring<false, true, 64>(const float*, float*);

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

// Four of eight warps leave values in shared memory, and all threads read them once an mbarrier has
// counted these warps and one thread that says how many bytes to expect (none): the order of
// linear_act's split_k kernels with a block's own partial sums. A warp's writes come before its
// bar.warp.sync, that before the arrival of an elected lane, that before the waits. The tool knows
// of mbarriers what ptxas lists in the cubin (EIATTR_MBARRIER_INSTR_OFFSETS), in which
// arrive.expect_tx is not; and ptxas elects before bar.warp.sync, of which a NOP is left. With
// kByOne false every lane arrives for itself, with kExpect false nothing is expected.
template <bool kByOne, bool kExpect>
__global__ void values_by_an_elected_lane(const float* in, float* out, int count) {
  __shared__ float values[128];
  __shared__ alignas(8) uint64_t arrived;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    set_up(&arrived, (kByOne ? 4 : 128) + 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp >= 4) {
    const int place = threadIdx.x - 128;
    if (place < count) values[place] = in[place];
    if constexpr (kByOne) {
      asm volatile(
          "{ .reg .pred one;\n"
          "bar.warp.sync 0xffffffff;\n"
          "elect.sync _|one, 0xffffffff;\n"
          "@one mbarrier.arrive.release.cta.shared::cta.b64 _, [%0]; }" ::"r"(
              shared_address(&arrived))
          : "memory");
    } else {
      arrive(&arrived);
    }
  }
  if (threadIdx.x == 0) {
    if constexpr (kExpect) {
      arrive_and_expect(&arrived, 0);
    } else {
      arrive(&arrived);
    }
  }
  wait(&arrived, 0);
  out[threadIdx.x] = values[(threadIdx.x + 33) % 128];
}

template __global__ void values_by_an_elected_lane<true, true>(const float*, float*, int);
template __global__ void values_by_an_elected_lane<true, false>(const float*, float*, int);
template __global__ void values_by_an_elected_lane<false, true>(const float*, float*, int);
template __global__ void values_by_an_elected_lane<false, false>(const float*, float*, int);

// Thread 0 sets a barrier up, and then tells it what to expect, as reduce_rows_packed does with a
// wait for the kernel before in between: one thread's accesses, in its order. The first is an
// instruction of the whole warp, and the tool takes the second, which ptxas does not list among the
// mbarrier's, for a read of shared memory. With kAtOnce false a barrier of the block is between.
template <bool kAtOnce>
__global__ void set_up_and_expect(const float* in, float* out) {
  __shared__ alignas(16) float staged[128];
  __shared__ alignas(8) uint64_t arrived;
  if (threadIdx.x == 0) {
    set_up(&arrived, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (!kAtOnce) __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    arrive_and_expect(&arrived, sizeof(staged));
    bulk_load(staged, in, sizeof(staged), &arrived);
  }
  __syncthreads();
  wait(&arrived, 0);
  out[threadIdx.x] = staged[127 - threadIdx.x];
}

template __global__ void set_up_and_expect<true>(const float*, float*);
template __global__ void set_up_and_expect<false>(const float*, float*);

// Warps leave two values each step, in one of two places by turns; warp 0 adds them up and sends
// the sum to the blocks of the cluster, each of which waits until all have: norm_backward's order.
// A place is written again two steps later, after a wait for what was sent, which depends on what
// was read there. With kBySending false there is a barrier of the block instead, and a sum for each
// block; racecheck reports both.
template <bool kBySending, int kSteps>
__global__ void __cluster_dims__(2, 1, 1) sums_through_one_warp(const float* in, float* out) {
  constexpr int kWarps = 8;
  __shared__ float of_warps[2][kWarps * 2];
  __shared__ float of_blocks[2][2];
  __shared__ alignas(8) uint64_t arrived[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % 2, name = 1 + blockIdx.x / 2;
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : arrived) set_up(&barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  float result = 0.0f;
  for (int step = 0; step < kSteps; ++step) {
    const int at = step % 2;
    if (lane < 2) of_warps[at][warp * 2 + lane] = in[(step * kWarps + warp) * 2 + lane];
    if (warp == 0) {
      asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(blockDim.x) : "memory");
      float sum = lane < 2 * kWarps ? of_warps[at][lane] : 0.0f;
      for (int offset = 1; offset < 32; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if constexpr (kBySending) {
        if (lane == 0) arrive_and_expect(&arrived[at], 2 * sizeof(float));
        if (lane < 2) send(&of_blocks[at][rank], lane, sum, &arrived[at]);
      } else if (lane < 2) {
        of_blocks[at][lane] = sum;
      }
    } else {
      asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(blockDim.x) : "memory");
    }
    if constexpr (kBySending) {
      wait(&arrived[at], step / 2 % 2);
    } else {
      __syncthreads();
    }
    result += of_blocks[at][0] + of_blocks[at][1];
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = result;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template __global__ void sums_through_one_warp<true, 16>(const float*, float*);
template __global__ void sums_through_one_warp<false, 16>(const float*, float*);

// Roles of a block meet at the barrier of their cluster, and read what the others wrote: the blocks
// of linear_act with split K. Where a cluster has one block, which only the hardware knows, ptxas
// waits with a barrier of the block. With kApart each role has an instruction of its own for it;
// synccheck reports that threads diverge, although all of them arrive. Otherwise all warps run the
// same instruction.
template <bool kApart>
__global__ void cluster_barrier_in_roles(const float* in, float* out, int steps) {
  __shared__ float values[256];
  const int thread = threadIdx.x;
  values[thread] = in[thread];
  __syncthreads();
  float result = 0.0f;
  const auto meet = [] {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                     : "memory");
  };
  if (thread < 32) {
    for (int step = 0; step < steps; ++step) result += values[(thread + step) % 32];
    if constexpr (kApart) meet();
  } else {
    for (int step = 0; step < steps; ++step) result -= values[(3 * thread + step) % 256];
    if constexpr (kApart) meet();
  }
  if constexpr (!kApart) meet();
  out[thread] = result + values[255 - thread];
}

template __global__ void cluster_barrier_in_roles<true>(const float*, float*, int);
template __global__ void cluster_barrier_in_roles<false>(const float*, float*, int);
