// SPDX-License-Identifier: Apache-2.0
// Gated activations of rows that do not begin at multiples of 16 bytes: the second half of a packed
// row with an odd length, or any view.
//
// Moves as many bytes as activation.cuh, 16 at a time in both directions. The result's vectors are
// numbered in each row from the multiple of 16 bytes (8 or 4 for float8) before it; each thread
// takes one. Its input may begin at any byte: the thread loads the two aligned vectors that contain
// it (the neighbour reads one of them too, from L1) and shifts them by whole words and then by
// bytes, 15 instructions for 8 elements. Stores at a row's ends and loads at the tensor's ends are
// element by element.
#ifndef KERNELS_ACTIVATION_ACTIVATION_SHIFTED_CUH_
#define KERNELS_ACTIVATION_ACTIVATION_SHIFTED_CUH_

#include "kernels/activation/activation.cuh"

namespace tiercel {

// 16 bytes of a matrix that begin at any element.
template <typename Format>
struct ShiftedVector {
  const char* aligned;
  uint32_t shift;  // bytes from `aligned`
  bool inside;     // both aligned vectors lie in the matrix
  uint32_t words[8];

  __device__ __forceinline__ ShiftedVector(const ActivationRows& rows, const char* address)
      : shift(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address)) % 16) {
    aligned = address - shift;
    inside = aligned >= rows.data && aligned + 32 <= rows.end;
  }
  __device__ __forceinline__ void load() {
    load_stream(reinterpret_cast<uint32_t (&)[4]>(words[0]), aligned);
    load_stream(reinterpret_cast<uint32_t (&)[4]>(words[4]), aligned + 16);
  }
  __device__ __forceinline__ void get(float (&values)[16 / Format::kBytes]) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    uint32_t shifted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shifted[i] =
          Format::kBytes == 4 ? words[i] : __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
    }
    unpack<Format>(shifted, values);
  }
};

template <typename Function, typename Format, typename OutFormat>
__global__ void __launch_bounds__(kActivationShiftedThreads, 1024 / kActivationShiftedThreads)
    activation_forward_shifted(const __grid_constant__ ActivationArgs args) {
  constexpr int kPerVector = kActivationVectorBytes / Format::kBytes;
  constexpr int kOutBytes = kPerVector * OutFormat::kBytes;
  constexpr bool kScaled = OutFormat::kBytes == 1;
  VectorPlace<kPerVector> place(args, blockIdx.x * blockDim.x + threadIdx.x);
  if (!place.there) return;
  const uintptr_t begin =
      reinterpret_cast<uintptr_t>(args.out.data) + place.row * args.out.row_stride;
  place.column -= static_cast<int>(begin % kOutBytes) / OutFormat::kBytes;
  if (place.column >= args.columns) return;
  const auto has = [&](int i) { return place.column + i >= 0 && place.column + i < args.columns; };
  const bool whole = place.column >= 0 && place.column + kPerVector <= args.columns;
  grid_dependency_wait();

  float values[kPerVector], factors[kPerVector];
  ShiftedVector<Format> x(args.x, place.template in<Format>(args.x));
  ShiftedVector<Format> up(args.up, place.template in<Format>(args.up));
  if (x.inside && up.inside) {
    x.load();
    up.load();
    grid_dependency_launch();
    x.get(values);
    up.get(factors);
  } else {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      values[i] = has(i) ? load_element<Format>(place.template in<Format>(args.x, i)) : 0.0f;
      factors[i] = has(i) ? load_element<Format>(place.template in<Format>(args.up, i)) : 0.0f;
    }
  }
  const float inverse = kScaled ? 1.0f / *args.scale : 1.0f;
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) {
    values[i] = Function::value(values[i]) * factors[i];
    if (kScaled) values[i] *= inverse;
  }
  char* out = place.template in<OutFormat>(args.out);
  if (whole) {
    uint32_t words[kOutBytes / 4];
    pack<OutFormat>(values, words);
    store_vector(out, words);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) {
    if (has(i)) store_element<OutFormat>(out + i * OutFormat::kBytes, values[i]);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_SHIFTED_CUH_
