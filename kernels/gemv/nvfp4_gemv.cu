// SPDX-License-Identifier: Apache-2.0
// nvfp4_gemv: c[m] = sum over k of a[m, k] * b[k], a and b in NVFP4, for each of l batches.
//
// Bound by the bytes of a: at M = 7168, K = 16384, 58.7 MB and 7.3 MB of scales take 15 us at 4.4
// TB/s. At that rate an SM multiplies 34 values per cycle, so every instruction counts:
//  - e2m1 values are halves of integers from -12 to 12. One byte permutation looks up four of them.
//    It interprets a code's sign bit as "repeat the byte's sign", which gives 0 for negative
//    values, or for positive ones with the bit flipped. Two integer dot products of four (dp4a)
//    then add the positive and subtract the negative values; a group of 16 is exact.
//  - The integer sum is converted to float by accumulating it onto the bits of 1.5 * 2^23. The
//    product with both scales is exact in float32; only the sum over groups rounds.
//  - b is decoded once per block, into shared memory.
// A warp processes rows m, m + 32, m + 64 and m + 96 of an atom of 128, because one 16-byte load of
// permuted scales serves these, and 1024 values of K per step: 16 adjacent bytes of each row per
// lane. The five loads of the next step are in flight during the multiplications of this one.
// `parts` warps split K of the four rows and add their sums in shared memory.
#include <cstdint>

#include "kernels/gemv/nvfp4_gemv_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

// Twice the magnitude of each e2m1 code.
constexpr uint32_t kLowMagnitudes = 0x03020100u;
constexpr uint32_t kHighMagnitudes = 0x0c080604u;
constexpr uint32_t kSigns = 0x88888888u;
constexpr int kMagic = 0x4b400000;  // 1.5 * 2^23
constexpr float kMagicFloat = 12582912.0f;

// Looks up the lowest four codes as bytes; a code with the sign bit gives 0. (__byte_perm would
// drop that bit.)
__device__ __forceinline__ uint32_t magnitudes(uint32_t codes) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(bytes)
      : "r"(kLowMagnitudes), "r"(kHighMagnitudes), "r"(codes));
  return bytes;
}

// Eight codes as signed bytes.
__device__ __forceinline__ uint2 signed_bytes(uint32_t codes) {
  const uint32_t flipped = codes ^ kSigns;
  return make_uint2(__vsub4(magnitudes(codes), magnitudes(flipped)),
                    __vsub4(magnitudes(codes >> 16), magnitudes(flipped >> 16)));
}

// Four times the dot product of 16 codes with 16 bytes of b.
__device__ __forceinline__ float dot_of_group(uint32_t codes0, uint32_t codes1,
                                              const uint32_t* bytes) {
  int positive = kMagic;
  int negative = 0;
  const uint32_t codes[2] = {codes0, codes1};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t flipped = codes[i] ^ kSigns;
    const int b0 = static_cast<int>(bytes[2 * i]);
    const int b1 = static_cast<int>(bytes[2 * i + 1]);
    positive = __dp4a(static_cast<int>(magnitudes(codes[i])), b0, positive);
    negative = __dp4a(static_cast<int>(magnitudes(flipped)), b0, negative);
    positive = __dp4a(static_cast<int>(magnitudes(codes[i] >> 16)), b1, positive);
    negative = __dp4a(static_cast<int>(magnitudes(flipped >> 16)), b1, negative);
  }
  return __int_as_float(positive - negative) - kMagicFloat;
}

__device__ __forceinline__ uint4 load_once(const char* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// A lane's operands of one step.
struct Step {
  uint4 codes[4];  // 32 per row
  uint4 scales;    // four per row, two of which this lane uses

  // Bit j of `valid` is set if row j exists.
  __device__ __forceinline__ void load(const char* a, int64_t row32, const char* scale, bool real,
                                       int valid) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      codes[j] = make_uint4(0, 0, 0, 0);
      if (real && valid >> j & 1) codes[j] = load_once(a + j * row32);
    }
    scales = make_uint4(0, 0, 0, 0);
    if (real) scales = __ldg(reinterpret_cast<const uint4*>(scale));
  }
};

__device__ __forceinline__ void stage_b(uint4* bytes, float2* scales, const Nvfp4GemvArgs& args,
                                        int batch, int steps) {
  const char* b = args.b + batch * args.b_batch;
  const char* scale = args.scale_b + batch * args.scale_b_batch;
  for (int i = threadIdx.x; i < steps * 32; i += blockDim.x) {  // 32 values each
    uint4 codes = make_uint4(0, 0, 0, 0);
    uint32_t pair = 0;
    if (i * 32 < args.k) {
      codes = *reinterpret_cast<const uint4*>(b + i * 16);
      pair = *reinterpret_cast<const uint16_t*>(scale + i / 2 * 512 + i % 2 * 2);
    }
    const uint2 v0 = signed_bytes(codes.x), v1 = signed_bytes(codes.y);
    const uint2 v2 = signed_bytes(codes.z), v3 = signed_bytes(codes.w);
    bytes[i / 32 * 64 + i % 32] = make_uint4(v0.x, v0.y, v1.x, v1.y);
    bytes[i / 32 * 64 + 32 + i % 32] = make_uint4(v2.x, v2.y, v3.x, v3.y);
    const float2 both = e4m3x2_to_float2(pair);
    scales[i] = make_float2(both.x * 0.25f, both.y * 0.25f);  // both factors were doubled
  }
}

__global__ void __launch_bounds__(kGemvMaxThreads)
    nvfp4_gemv(const __grid_constant__ Nvfp4GemvArgs args) {
  extern __shared__ uint4 shared[];
  const int steps = (args.k + kGemvStep - 1) / kGemvStep;
  uint4* b_bytes = shared;
  float2* b_scales = reinterpret_cast<float2*>(b_bytes + steps * 64);
  float* part_sums = reinterpret_cast<float*>(b_scales + steps * 32);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int batch = blockIdx.y;
  const int parts = args.parts;
  const int part = warp % parts;
  const int quad = blockIdx.x * (blockDim.x / 32 / parts) + warp / parts;
  const int row = quad / 32 * 128 + quad % 32;
  int valid = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) valid |= (quad < args.quads && row + 32 * j < args.rows) << j;

  grid_dependency_wait();
  const char* a = args.a + batch * args.a_batch + row * args.a_row + lane * 16;
  const char* scale = args.scale_a + batch * args.scale_a_batch +
                      (static_cast<int64_t>(quad / 32) * args.scale_atoms + lane / 2) * 512 +
                      quad % 32 * 16;
  const int64_t row32 = 32 * args.a_row;
  a += static_cast<int64_t>(part) * (kGemvStep / 2);
  scale += static_cast<int64_t>(part) * (kGemvStep / 64 * 512);
  int left = valid != 0 ? args.k - part * kGemvStep - lane * 32 : 0;  // of K
  Step next;
  const auto load = [&] {
    next.load(a, row32, scale, left > 0, valid);
    a += parts * (kGemvStep / 2);
    scale += parts * (kGemvStep / 64 * 512);
    left -= parts * kGemvStep;
  };
  load();
  stage_b(b_bytes, b_scales, args, batch, steps);
  __syncthreads();

  float sums[4] = {};
#pragma unroll 2
  for (int step = part; step < steps; step += parts) {
    const Step now = next;
    load();
    const uint4 low = b_bytes[step * 64 + lane];
    const uint4 high = b_bytes[step * 64 + 32 + lane];
    const uint32_t bytes[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float2 b_scale = b_scales[step * 32 + lane];
    const uint32_t scales[4] = {now.scales.x, now.scales.y, now.scales.z, now.scales.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a_scale = e4m3x2_to_float2(lane % 2 ? scales[j] >> 16 : scales[j]);
      const uint4& codes = now.codes[j];
      sums[j] = fmaf(dot_of_group(codes.x, codes.y, bytes), a_scale.x * b_scale.x, sums[j]);
      sums[j] = fmaf(dot_of_group(codes.z, codes.w, bytes + 4), a_scale.y * b_scale.y, sums[j]);
    }
  }

  float sum = 0.0f;  // lane j: row j's
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float all = lanes_reduce<32>(sums[j], Sum());
    sum = lane == j ? all : sum;
  }
  if (parts > 1) {
    if (lane < 4) part_sums[warp * 4 + lane] = sum;
    __syncthreads();
    if (part != 0) return;
    if (lane < 4) {
      for (int p = 1; p < parts; ++p) sum += part_sums[(warp + p) * 4 + lane];
    }
  }
  grid_dependency_launch();
  if (lane < 4 && valid >> lane & 1) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(sum));
    args.c[batch * args.c_batch + (row + 32 * lane) * args.c_row] = bits;
  }
}

const Kernel kKernel("nvfp4_gemv", reinterpret_cast<const void*>(nvfp4_gemv),
                     gemv_shared_bytes(kGemvMaxK, kGemvMaxThreads / 32));

}  // namespace

const Kernel* nvfp4_gemv_kernel() { return &kKernel; }

}  // namespace tiercel
