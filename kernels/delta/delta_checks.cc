// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_checks.h"

#include <cmath>
#include <string>

#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

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
  return Status::Unimplemented(mismatch(argument, "have contiguous heads aligned to 16 bytes",
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
  const Argument of_beta{op, "beta", *tensors.beta};
  const Argument of_out{op, tensors.out_name, *tensors.out};
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

Status delta_check_gates(const char* op, const TensorView& view, const DeltaSizes& sizes,
                         const Argument& q) {
  const Argument g{op, "g", view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(g, {DType::kFloat32}));
  if (view.ndim == 4) {
    TIERCEL_RETURN_IF_ERROR(check_shape(
        g, {sizes.batch, sizes.tokens, sizes.v_heads, sizes.key_size}, "[B, T, Hv, K]"));
  } else {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(g, {sizes.batch, sizes.tokens, sizes.v_heads}, "[B, T, Hv]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(g));
  return delta_check_place(g, q);
}

Status delta_check_state(const char* op, const char* name, const TensorView* view, int64_t count,
                         const DeltaSizes& sizes, const Argument& q) {
  if (view == nullptr) return Status();
  const Argument state{op, name, *view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(state, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(
      state, {count, sizes.v_heads, sizes.key_size, sizes.value_size}, "[N, Hv, K, V]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(state));
  return delta_check_place(state, q);
}

Status delta_lay_out_sequences(const char* op, const TensorView* cu_seqlens,
                               const DeltaSizes& sizes, const Argument& q, DeltaRuleArgs* args) {
  int64_t count = sizes.batch;
  args->length = sizes.tokens;
  args->tokens = sizes.batch * sizes.tokens;
  if (cu_seqlens != nullptr) {
    const Argument starts{op, "cu_seqlens", *cu_seqlens};
    TIERCEL_RETURN_IF_ERROR(check_dtype(starts, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_rank(starts, 1));
    if (starts.view.shape[0] == 0) {
      return Status::InvalidArgument(mismatch(starts, "have at least one element", "none"));
    }
    if (sizes.batch != 1) {
      return Status::InvalidArgument(
          mismatch(q, "have a batch of 1 with `cu_seqlens`", std::to_string(sizes.batch)));
    }
    TIERCEL_RETURN_IF_ERROR(delta_check_place(starts, q));
    count = starts.view.shape[0] - 1;
    args->starts = static_cast<const int*>(starts.view.data);
    args->start_step = starts.view.strides[0];
  }
  if (args->tokens > INT32_MAX || count > INT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too many tokens or sequences");
  }
  args->count = static_cast<int>(count);
  return Status();
}

Status delta_check_workspace(const char* op, const TensorView& view, int64_t size,
                             const Argument& q) {
  const Argument workspace{op, "workspace", view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(workspace, 1));
  if (view.shape[0] < size) {
    return Status::InvalidArgument(mismatch(workspace, "have " + std::to_string(size) + " elements",
                                            std::to_string(view.shape[0])));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  return delta_check_place(workspace, q);
}

const Kernel* delta_find_kernel(DeltaPart part, int64_t key_size, DType dtype, bool channels) {
  const auto fits = [&](const DeltaRuleKernel& one) {
    return one.part == part &&
           (one.key_size == 0 ||
            (one.key_size == key_size && one.dtype == dtype && one.channels == channels));
  };
  for (auto* list :
       {delta_chunks_kernels, delta_channels_kernels, delta_rule_kernels, delta_back_kernels,
        delta_gradients_kernels, delta_channel_gradients_kernels}) {
    const DeltaRuleKernel* found = KernelTable(list).find(fits);
    if (found != nullptr) return &found->kernel;
  }
  return nullptr;
}

int64_t delta_chunk_rows(const DeltaSizes& sizes, int64_t places) {
  // Blocks of the heads that share keys multiply these each, but run at once.
  const int64_t group = sizes.v_heads / sizes.k_heads;
  int64_t sharing = group;
  const int64_t most = kDefaultMultiprocessors * kDeltaChunkBlocks;
  while (group % sharing != 0 || (sharing > 1 && places * sizes.k_heads * sharing > most)) {
    --sharing;
  }
  return sizes.k_heads * sharing;
}

float delta_scale(float given, int64_t key_size) {
  return std::isnan(given) ? 1.0f / std::sqrt(static_cast<float>(key_size)) : given;
}

}  // namespace tiercel
