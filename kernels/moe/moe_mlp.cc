// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/moe_mlp.h"

#include <algorithm>
#include <string>

#include "kernels/moe/moe_mlp_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of neighbouring elements at multiples of 16 bytes, as the copies take them.
Status check_rows(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  bool fits = view.strides[last] == 1 || view.shape[last] <= 1;
  for (int i = 0; i < last; ++i) {
    fits = fits && (view.shape[i] <= 1 || view.strides[i] * dtype_bytes(view.dtype) % 16 == 0);
  }
  fits = fits && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  if (fits) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows of neighbouring elements at multiples of 16 bytes",
               "strides " + shape_text(view.strides, view.ndim)));
}

struct Call {
  const char* op;
  MoeMlpArgs args{};
  const Kernel* kernel = nullptr;
  LaunchConfig config;
  int64_t units = 0;
};

Status check_routing(const char* op, const Argument& x, const MoeRouting& routing) {
  const Argument sorted{op, "sorted_token_ids", routing.sorted_token_ids};
  const Argument experts{op, "expert_ids", routing.expert_ids};
  const Argument used{op, "num_tokens_post_padded", routing.num_tokens_post_padded};
  for (const Argument* argument : {&sorted, &experts, &used}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 1));
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(used, {1}, "[1]"));
  const int64_t block = routing.block_size;
  if (block != 8 && block != 16 && block != 32) {
    return Status::Unimplemented(std::string(op) +
                                 ": `block_size` must be 8, 16 or 32 for the kernels, got " +
                                 std::to_string(block));
  }
  const int64_t slots = routing.sorted_token_ids.shape[0];
  return check_shape(experts, {ceil_div(slots, block)}, "[slots / block_size]");
}

Status prepare(bool up, const TensorView& x, const TensorView& w, const MoeRouting& routing,
               const TensorView* weights, const TensorView& out, MoeActivation activation,
               int multiprocessors, Call* call) {
  const char* op = call->op = up ? "moe_up" : "moe_down";
  const Argument x_arg{op, "x", x};
  const Argument w_arg{op, up ? "w_up" : "w_down", w};
  const Argument out_arg{op, "out", out};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(w_arg, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(out_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(w_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {x.dtype}));
  const int64_t experts = w.shape[0], k = x.shape[1];
  const int64_t elements = out.shape[0], rows = out.shape[1];
  if (up) {
    TIERCEL_RETURN_IF_ERROR(check_shape(w_arg, {experts, 2 * rows, k}, "[E, 2 * I, H]"));
    const bool whole = x.shape[0] == 0 ? elements == 0 : elements % x.shape[0] == 0;
    if (!whole) {
      return Status::InvalidArgument(
          mismatch(out_arg, "have a multiple of x's " + std::to_string(x.shape[0]) + " rows",
                   shape_text(out.shape, 2)));
    }
  } else {
    TIERCEL_RETURN_IF_ERROR(check_shape(w_arg, {experts, rows, k}, "[E, H, I]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(x_arg, {elements, k}, "[T * k, I]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  for (const Argument* argument : {&w_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out_arg));
  TIERCEL_RETURN_IF_ERROR(check_routing(op, x_arg, routing));
  if (weights != nullptr) {
    const Argument weights_arg{op, "weights", *weights};
    TIERCEL_RETURN_IF_ERROR(check_dtype(weights_arg, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(weights_arg, {elements}, "[T * k]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(weights_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(weights_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(weights_arg));
  }
  const int64_t slots = routing.sorted_token_ids.shape[0];
  if (elements == 0 || rows == 0 || slots == 0) return Status();
  if (k < kMoeLeastK || k % 8 != 0 || k > INT32_MAX / 2) {
    return Status::Unimplemented(
        mismatch(x_arg, "have a multiple of 8 columns, " + std::to_string(kMoeLeastK) + " or more",
                 shape_text(x.shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows(w_arg));
  const int64_t tiles = ceil_div(rows, up ? kMoeTile : 2 * kMoeTile);
  call->units = slots / routing.block_size * tiles;
  if (elements > INT32_MAX || rows > INT32_MAX || slots > INT32_MAX || call->units > INT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too large for one launch, got " +
                                 shape_text(out.shape, 2) + " from " + shape_text(w.shape, 3));
  }

  MoeMlpArgs& args = call->args;
  args.x = static_cast<const char*>(x.data);
  args.x_row = x.strides[0] * 2;
  args.divide = up ? static_cast<int>(elements / x.shape[0]) : 1;
  args.w = static_cast<const char*>(w.data);
  args.w_expert = w.strides[0] * 2;
  args.w_row = w.strides[1] * 2;
  args.w_second = args.w_row * (up ? rows : kMoeTile);
  args.tiles = static_cast<int>(tiles);
  args.rows = static_cast<int>(rows);
  args.k = static_cast<int>(k);
  args.sorted_ids = static_cast<const int32_t*>(routing.sorted_token_ids.data);
  args.expert_ids = static_cast<const int32_t*>(routing.expert_ids.data);
  args.used = static_cast<const int32_t*>(routing.num_tokens_post_padded.data);
  args.elements = static_cast<int>(elements);
  args.weights = weights != nullptr ? static_cast<const float*>(weights->data) : nullptr;
  args.out = static_cast<uint16_t*>(out.data);
  args.activation = activation;

  const int tokens = static_cast<int>(routing.block_size);
  call->kernel = moe_mlp_kernel(up, x.dtype, tokens);
  // A multiprocessor holds one block; how many units there are is known on the device only.
  call->config.grid.x = static_cast<uint32_t>(std::min<int64_t>(call->units, multiprocessors));
  call->config.block.x = kMoeWarps * 32;
  call->config.dynamic_smem = moe_shared(tokens);
  call->config.dependent = true;
  return Status();
}

Status launch(bool up, const TensorView& x, const TensorView& w, const MoeRouting& routing,
              const TensorView* weights, const TensorView& out, MoeActivation activation,
              void* stream) {
  Call call;
  // Any number will do for the checks, which come before a driver is asked for.
  TIERCEL_RETURN_IF_ERROR(prepare(up, x, w, routing, weights, out, activation, 1, &call));
  if (call.kernel == nullptr) return Status();
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(x.device_index, &multiprocessors));
  call.config.grid.x = static_cast<uint32_t>(std::min<int64_t>(call.units, multiprocessors));
  void* pointers[] = {&call.args};
  return call.kernel->launch(call.config, x.device_index, stream, pointers);
}

}  // namespace

Status moe_mlp_plan(bool up, const TensorView& x, const TensorView& w, const MoeRouting& routing,
                    const TensorView* weights, const TensorView& out, MoeActivation activation,
                    int multiprocessors, MoeMlpPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(
      prepare(up, x, w, routing, weights, out, activation, multiprocessors, &call));
  *plan = {"none", 0, 0, 0, 0, 0, 0};
  if (call.kernel == nullptr) return Status();
  const int tokens = static_cast<int>(routing.block_size);
  *plan = {call.kernel->name(),     tokens,
           moe_stages(tokens),      static_cast<int>(call.units),
           call.config.grid.x,      call.config.block.x,
           call.config.dynamic_smem};
  return Status();
}

Status moe_up(const TensorView& x, const TensorView& w, const MoeRouting& routing,
              const TensorView& out, MoeActivation activation, void* stream) {
  return launch(true, x, w, routing, nullptr, out, activation, stream);
}

Status moe_down(const TensorView& x, const TensorView& w, const MoeRouting& routing,
                const TensorView* weights, const TensorView& out, void* stream) {
  return launch(false, x, w, routing, weights, out, MoeActivation::kSilu, stream);
}

Status moe_mlp_load(int device) {
  for (bool up : {true, false}) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (int tokens : {8, 16, 32}) {
        TIERCEL_RETURN_IF_ERROR(moe_mlp_kernel(up, dtype, tokens)->load(device));
      }
    }
  }
  return Status();
}

}  // namespace tiercel
