// SPDX-License-Identifier: Apache-2.0
// To e4m3, with float32 scales found on the way or given.
#ifndef KERNELS_QUANT_FP8_QUANTIZE_H_
#define KERNELS_QUANT_FP8_QUANTIZE_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What shares a scale.
enum class Fp8Granularity { kTensor, kRow, kGroup, kBlock };

inline constexpr int kFp8MaxPartials = 1024;

// What a call would launch.
struct Fp8QuantizeCall {
  const TensorView* x = nullptr;
  const TensorView* q = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* partial = nullptr;   // or null
  const TensorView* counters = nullptr;  // or null; fp8_quantize_between only, as the flags are
  Fp8Granularity granularity = Fp8Granularity::kTensor;
  bool x_is_older = false;
  bool starts_next = false;
};

struct Fp8QuantizePlan {
  const char* kernel;  // "none" for an empty tensor
  int launches;
  int vectors;  // eights of values that a thread keeps
  int64_t grid;
  unsigned block;
};

// x [T, K] float32, bfloat16 or float16, rows of K neighbouring values at any distance; q [T, K]
// e4m3, contiguous; scale float32, contiguous: [1, 1] of the tensor, [T, 1] of each row,
// [T, ceil(K / 128)] of each 1x128 group or [ceil(T / 128), ceil(K / 128)] of each 128x128 tile.
// `partial` [kFp8MaxPartials] float32 is memory to work in, asked for with kTensor only; what it
// holds does not matter.
//   scale = max(amax / 448, 2^-126), q = e4m3(x * (1 / scale))
Status fp8_quantize_plan(const Fp8QuantizeCall& call, Fp8QuantizePlan* plan);
Status fp8_quantize(const Fp8QuantizeCall& call, void* stream);

// Of rows or groups, between launches that it overlaps with. `x_is_older`: x was written before the
// launch before this one, which may still run: it has to have waited for its own dependencies, and
// works in other memory than q and scale. `starts_next`: the launch after this one begins with what
// is older than the launch before this one. `counters` [4] int32, contiguous, or null:
// set to zero, unless x is older.
Status fp8_quantize_between(const Fp8QuantizeCall& call, void* stream);

// The same with a scale [1, 1] that is given: q = e4m3(x * (1 / scale)).
Status fp8_quantize_static(const Fp8QuantizeCall& call, void* stream);

// Loads all of its kernels on a device.
Status fp8_quantize_load(int device);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FP8_QUANTIZE_H_
