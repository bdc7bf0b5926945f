// SPDX-License-Identifier: Apache-2.0
// mla_cache_write: writes each token's latent and rotary key to the token's cache slot.
//
// All data is read once and written once. A warp has a token: each lane 8 elements of either half
// of the latent, the first lanes 8 of the rotary key. All loads are in flight before the warp waits
// for the slot. 16 lanes have the elements that share a scale. To rotate the key, each lane has one
// pair of its elements instead, which it alone reads and writes: the token may be in the cache.
#include <cstdint>

#include "kernels/mla/mla_cache_kernels.h"
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
constexpr int kPairs = kMlaRotary / 2;
static_assert(kMlaLatent == 2 * kHalf && kMlaGroup == 16 * kElements && kPairs == 32);

// The scale of the 128 elements that this lane and its neighbours have.
template <typename Values>
__device__ __forceinline__ float scale_of(const Values& x) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) most = fmaxf(most, fabsf(x[i]));
  most = lanes_reduce<16>(most, Max());
  return fmaxf(__fdiv_rn(most, kE4M3Max), 0x1p-126f);
}

// Cosine and sine of a pair, as they are in memory: whoever loads them does not wait for them.
template <typename Element>
struct Angle {
  uint32_t cosine, sine;

  __device__ __forceinline__ void load(const MlaCacheArgs& args, int64_t row, int pair) {
    const int64_t at = row * kMlaRotary + pair;
    const auto one = [&](int64_t index) -> uint32_t {
      if (args.wide_angles) return reinterpret_cast<const uint32_t*>(args.angles)[index];
      return reinterpret_cast<const typename Element::Bits*>(args.angles)[index];
    };
    cosine = one(at), sine = one(at + kPairs);
  }
  __device__ __forceinline__ float value(uint32_t bits, bool is_float32) const {
    return is_float32 ? __uint_as_float(bits) : Element::low(bits);
  }
};

// A lane's pair of the rotary key, rotated.
template <typename Element>
__device__ __forceinline__ void rotate(const Packed<Element, 1> (&pair)[2],
                                       const Angle<Element>& angle, bool wide,
                                       float (&turned)[2][1]) {
  const float x = pair[0][0], y = pair[1][0];
  const float cosine = angle.value(angle.cosine, wide), sine = angle.value(angle.sine, wide);
  turned[0][0] = x * cosine - y * sine;
  turned[1][0] = y * cosine + x * sine;
}

template <typename Element, MlaLayout kLayout, bool kRotates>
__global__ void __launch_bounds__(32 * kMlaCacheWarps)
    mla_cache_write(const __grid_constant__ MlaCacheArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kMlaCacheWarps + threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_launch();
  if (token >= args.tokens) return;
  Integer number;
  number.load(args.slots, token, args.wide_slots);
  Integer position;
  if constexpr (kRotates) position.load(args.positions, token, args.wide_positions);
  const bool has_rotary = lane < kRotaryLanes;
  Packed<Element, kElements> latent[2], rotary;
  const char* from = args.latent + token * args.latent_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    latent[half].load(from + (half * kHalf + lane * kElements) * Element::kBytes);
  }
  const char* const key = args.rotary + token * args.rotary_stride;
  const int first = args.interleaved ? 2 * lane : lane;  // of the lane's pair
  const int second = first + (args.interleaved ? 1 : kPairs);
  Packed<Element, 1> pair[2];
  Angle<Element> angle;
  if constexpr (kRotates) {
    pair[0].load(key + first * Element::kBytes);
    pair[1].load(key + second * Element::kBytes);
    angle.load(args, position.clamped(args.wide_positions, args.last_position), lane);
  } else {
    rotary.load(key + (has_rotary ? lane : 0) * kElements * Element::kBytes);
  }
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
  constexpr int kBefore = kLayout == MlaLayout::kSame     ? kMlaLatent * Element::kBytes
                          : kLayout == MlaLayout::kFloat8 ? kMlaLatent
                                                          : kMlaPacked - 2 * kMlaRotary;
  if constexpr (kRotates) {
    float turned[2][1];
    rotate(pair, angle, args.wide_angles, turned);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = i == 0 ? first : second;
      if constexpr (kLayout == MlaLayout::kFloat8) {
        store_float8<1>(to + kBefore + column, turned[i], divisor);
      } else {
        pair[i].round(turned[i]);
        pair[i].store(to + kBefore + column * Element::kBytes);
      }
    }
    return;
  }
  if (!has_rotary) return;
  if constexpr (kLayout == MlaLayout::kFloat8) {
    store_float8<kElements>(to + kBefore + lane * kElements, rotary, divisor);
  } else {
    rotary.store(to + kBefore + lane * kElements * Element::kBytes);
  }
}

#define TIERCEL_MLA_CACHE(dtype, layout, rotates, suffix)    \
  {DType::k##dtype, MlaLayout::k##layout, rotates,           \
   Kernel("mla_cache_write<" #dtype ", " #layout suffix ">", \
          reinterpret_cast<const void*>(                     \
              mla_cache_write<dtype##Element, MlaLayout::k##layout, rotates>))}
#define TIERCEL_MLA_CACHE_BOTH(dtype, layout) \
  TIERCEL_MLA_CACHE(dtype, layout, false, ""), TIERCEL_MLA_CACHE(dtype, layout, true, ", Rotated")

const MlaCacheKernel kKernels[] = {
    TIERCEL_MLA_CACHE_BOTH(BFloat16, Same),   TIERCEL_MLA_CACHE_BOTH(Float16, Same),
    TIERCEL_MLA_CACHE_BOTH(BFloat16, Float8), TIERCEL_MLA_CACHE_BOTH(Float16, Float8),
    TIERCEL_MLA_CACHE_BOTH(BFloat16, Packed),
};

}  // namespace

const MlaCacheKernel* mla_cache_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
