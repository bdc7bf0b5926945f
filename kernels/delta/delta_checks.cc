// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_checks.h"

#include <cmath>
#include <string>

namespace tiercel {
namespace {

constexpr int64_t kAligned = 16;  // bytes

Status lay_out_heads(const Argument& argument, const Argument& q, DeltaHeads* heads) {
  const TensorView& view = argument.view;
  TIERCEL_RETURN_IF_ERROR(delta_check_place(argument, q));
  const int64_t bytes = dtype_bytes(view.dtype);
  const auto stride = [&](int dim) { return view.shape[dim] > 1 ? view.strides[dim] * bytes : 0; };
  *heads = {static_cast<char*>(view.data), stride(0), stride(1), stride(2)};
  for (int i = 0; i < 4; ++i) {
    if (view.shape[i] == 0) return Status();
  }
  bool fits = view.strides[3] == 1 || view.shape[3] == 1;
  for (int i = 0; i < 3; ++i) fits = fits && stride(i) % kAligned == 0;
  fits = fits && reinterpret_cast<uintptr_t>(view.data) % kAligned == 0;
  if (fits) return Status();
  return Status::Unimplemented(mismatch(argument, "have contiguous heads that lie on 16 bytes",
                                        "strides " + shape_text(view.strides, view.ndim)));
}

}  // namespace

Status delta_check_place(const Argument& argument, const Argument& like) {
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  return check_cuda(argument);
}

Status delta_lay_out(const char* op, const DeltaTensors& tensors,
                     std::initializer_list<DType> dtypes, DeltaSizes* sizes, DeltaHeads* q,
                     DeltaHeads* k, DeltaHeads* v, DeltaHeads* out) {
  const Argument of_q{op, "q", *tensors.q}, of_k{op, "k", *tensors.k}, of_v{op, "v", *tensors.v};
  const Argument of_beta{op, "beta", *tensors.beta}, of_out{op, "out", *tensors.out};
  TIERCEL_RETURN_IF_ERROR(check_dtype(of_q, dtypes));
  TIERCEL_RETURN_IF_ERROR(check_rank(of_q, 4));
  const int64_t* shape = of_q.view.shape;
  const DType dtype = of_q.view.dtype;
  TIERCEL_RETURN_IF_ERROR(check_dtype(of_k, {dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(of_k, {shape[0], shape[1], shape[2], shape[3]}, "[B, T, Hk, K]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(of_v, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(of_v, 4));
  const int64_t v_heads = of_v.view.shape[2], value_size = of_v.view.shape[3];
  TIERCEL_RETURN_IF_ERROR(
      check_shape(of_v, {shape[0], shape[1], v_heads, value_size}, "[B, T, Hv, V]"));
  if (v_heads != 0 && (shape[2] == 0 || v_heads % shape[2] != 0)) {
    return Status::InvalidArgument(
        mismatch(of_v, "have a multiple of " + std::to_string(shape[2]) + " heads",
                 std::to_string(v_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(of_beta, {DType::kFloat32, dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(of_beta, {shape[0], shape[1], v_heads}, "[B, T, Hv]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(of_beta));
  TIERCEL_RETURN_IF_ERROR(check_dtype(of_out, {dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(of_out, {shape[0], shape[1], v_heads, value_size}, "[B, T, Hv, V]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(of_q));
  TIERCEL_RETURN_IF_ERROR(delta_check_place(of_beta, of_q));
  TIERCEL_RETURN_IF_ERROR(lay_out_heads(of_q, of_q, q));
  TIERCEL_RETURN_IF_ERROR(lay_out_heads(of_k, of_q, k));
  TIERCEL_RETURN_IF_ERROR(lay_out_heads(of_v, of_q, v));
  TIERCEL_RETURN_IF_ERROR(lay_out_heads(of_out, of_q, out));
  *sizes = {shape[0], shape[1], shape[2], v_heads, shape[3], value_size};
  return Status();
}

float delta_scale(float given, int64_t key_size) {
  return std::isnan(given) ? 1.0f / std::sqrt(static_cast<float>(key_size)) : given;
}

}  // namespace tiercel
