// SPDX-License-Identifier: Apache-2.0
// mla_cache_write: writes each token's latent and rotary key to the token's cache slot.
//
// All data is read once and written once. A warp has a token: each lane 8 elements of either half
// of the latent, the first lanes 8 of the rotary key. All loads are in flight before the warp waits
// for the slot. 16 lanes have the elements that share a scale.
#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/float8_store.cuh"
#include "kernels/rotary/integers.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kElements = 8;  // of a lane at once
constexpr int kHalf = 32 * kElements;
constexpr int kRotaryLanes = kMlaRotary / kElements;
static_assert(kMlaLatent == 2 * kHalf && kMlaGroup == 16 * kElements);

// The scale of the 128 elements that this lane and its neighbours have.
template <typename Values>
__device__ __forceinline__ float scale_of(const Values& x) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) most = fmaxf(most, fabsf(x[i]));
  most = lanes_reduce<16>(most, Max());
  return fmaxf(__fdiv_rn(most, kE4M3Max), 0x1p-126f);
}

template <typename Element, MlaLayout kLayout>
__global__ void __launch_bounds__(32 * kMlaCacheWarps)
    mla_cache_write(const __grid_constant__ MlaCacheArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kMlaCacheWarps + threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_launch();
  if (token >= args.tokens) return;
  Integer number;
  number.load(args.slots, token, args.wide_slots);
  const bool has_rotary = lane < kRotaryLanes;
  Packed<Element, kElements> latent[2], rotary;
  const char* from = args.latent + token * args.latent_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    latent[half].load(from + (half * kHalf + lane * kElements) * Element::kBytes);
  }
  rotary.load(args.rotary + token * args.rotary_stride +
              (has_rotary ? lane : 0) * kElements * Element::kBytes);
  const int64_t slot = number.value(args.wide_slots);
  if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(args.slot_count)) return;
  const int64_t block = slot / args.block_size, place = slot - block * args.block_size;
  char* const to = args.cache + block * args.block_stride + place * args.place_stride;

  const Divisor divisor = divisor_of(args.scale, false, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = half * kHalf + lane * kElements;
    if constexpr (kLayout == MlaLayout::kSame) {
      latent[half].store(to + column * Element::kBytes);
    } else if constexpr (kLayout == MlaLayout::kFloat8) {
      store_float8<kElements>(to + column, latent[half], divisor);
    } else {
      const float scale = scale_of(latent[half]);
      store_float8<kElements>(to + column, latent[half], divisor_by(scale));
      if (lane % 16 == 0) {
        *reinterpret_cast<float*>(to + kMlaLatent + column / kMlaGroup * 4) = scale;
      }
    }
  }
  if (!has_rotary) return;
  if constexpr (kLayout == MlaLayout::kFloat8) {
    store_float8<kElements>(to + kMlaLatent + lane * kElements, rotary, divisor);
  } else {
    constexpr int kBefore =
        kLayout == MlaLayout::kSame ? kMlaLatent * Element::kBytes : kMlaPacked - 2 * kMlaRotary;
    rotary.store(to + kBefore + lane * kElements * Element::kBytes);
  }
}

#define TIERCEL_MLA_CACHE(dtype, layout)              \
  {DType::k##dtype, MlaLayout::k##layout,             \
   Kernel("mla_cache_write<" #dtype ", " #layout ">", \
          reinterpret_cast<const void*>(mla_cache_write<dtype##Element, MlaLayout::k##layout>))}

const MlaCacheKernel kKernels[] = {
    TIERCEL_MLA_CACHE(BFloat16, Same),   TIERCEL_MLA_CACHE(Float16, Same),
    TIERCEL_MLA_CACHE(BFloat16, Float8), TIERCEL_MLA_CACHE(Float16, Float8),
    TIERCEL_MLA_CACHE(BFloat16, Packed),
};

}  // namespace

const MlaCacheKernel* mla_cache_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
