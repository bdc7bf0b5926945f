// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
#ifndef KERNELS_SAMPLING_PHILOX_CUH_
#define KERNELS_SAMPLING_PHILOX_CUH_

#include <cstdint>

namespace tiercel {

// 64 random bits of a key and a counter: the first two of its four words.
__device__ __forceinline__ uint64_t philox(uint64_t key, uint64_t counter, uint64_t stream) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_PHILOX_CUH_
