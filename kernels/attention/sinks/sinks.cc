// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sinks/sinks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/attention/common/problem.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention_sinks_backward";
constexpr int64_t kMaxHeadDimension = 256;
constexpr int64_t kRowsOfPart = 512;            // at least, before there are more parts
constexpr int64_t kMaxRows = int64_t{1} << 30;  // row numbers and a round fit 32 bits

Status check(const AttentionSinksCall& call) {
  const TensorView& grad = *call.grad;
  const Argument grad_arg{kOp, "grad", grad};
  TIERCEL_RETURN_IF_ERROR(check_rank(grad_arg, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(grad_arg, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(grad_arg));
  const int64_t batch = grad.shape[0], rows = grad.shape[1], heads = grad.shape[2];
  const Argument out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {grad.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {batch, rows, heads, grad.shape[3]}, "[B, S, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out, grad_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out));
  for (const auto& [name, sums] : {std::pair{"lse", call.lse}, {"grad_lse", call.grad_lse}}) {
    if (sums == nullptr) continue;
    const Argument argument{kOp, name, *sums};
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(argument, {batch, heads, rows}, "[B, H, S]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(argument, grad_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_attention_sinks(kOp, "sinks", *call.sinks, heads, grad));
  return check_attention_sinks(kOp, "dsinks", *call.dsinks, heads, grad);
}

// Alignment for 16-byte reads.
Status check_layout(const Argument& argument) {
  const TensorView& view = argument.view;
  bool fits = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.strides[3] == 1;
  for (int i = 0; i < 3; ++i) {
    if (view.shape[i] > 1) fits &= view.strides[i] % 8 == 0;
  }
  if (fits) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows that start at multiples of 16 bytes",
               "shape " + shape_text(view.shape, 4) + ", strides " + shape_text(view.strides, 4)));
}

AttentionSinksRows rows_of(const TensorView& view) {
  return {static_cast<const char*>(view.data), view.strides[0] * 2, view.strides[1] * 2,
          view.strides[2] * 2};
}

Status prepare(const AttentionSinksCall& call, AttentionSinksArgs* args) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const TensorView& grad = *call.grad;
  const int64_t heads = grad.shape[2], d = grad.shape[3];
  const Argument grad_arg{kOp, "grad", grad};
  if (d < 8 || d > kMaxHeadDimension || d % 8 != 0) {
    return Status::Unimplemented(mismatch(
        grad_arg, "have a head dimension that is a multiple of 8 up to 256", std::to_string(d)));
  }
  const int64_t count = grad.shape[0] * grad.shape[1];
  args->parts =
      static_cast<int>(std::clamp<int64_t>(ceil_div(count, kRowsOfPart), 1, kAttentionSinksParts));
  if (count >= kMaxRows || heads > 0x7fffffff / args->parts) {
    return Status::Unimplemented(
        mismatch(grad_arg, "have fewer than 2^30 rows of a head, and fewer than 2^25 heads",
                 "shape " + shape_text(grad.shape, grad.ndim)));
  }
  args->rows = static_cast<int>(grad.shape[1]);
  args->count = static_cast<int>(count);
  if (args->count > 0) {
    TIERCEL_RETURN_IF_ERROR(check_layout(grad_arg));
    TIERCEL_RETURN_IF_ERROR(check_layout({kOp, "out", *call.out}));
  }
  args->heads = static_cast<int>(heads);
  args->d = static_cast<int>(d);
  args->lanes = 1;
  while (args->lanes * 8 < d) args->lanes *= 2;
  args->grad = rows_of(grad);
  args->out = rows_of(*call.out);
  args->lse = static_cast<const float*>(call.lse->data);
  args->grad_lse =
      call.grad_lse == nullptr ? nullptr : static_cast<const float*>(call.grad_lse->data);
  args->sinks = static_cast<const float*>(call.sinks->data);
  args->dsinks = static_cast<float*>(call.dsinks->data);
  return Status();
}

const Kernel& kernel_of(DType dtype) {
  return KernelTable(attention_sinks_kernels)
      .find([&](const auto& kernel) { return kernel.dtype == dtype; })
      ->kernel;
}

}  // namespace

Status attention_sinks_backward_plan(const AttentionSinksCall& call, AttentionSinksPlan* plan) {
  AttentionSinksArgs args{};
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args));
  *plan = {"none", 0, 0, 0, 0};
  if (args.heads == 0) return Status();
  const int blocks = args.heads * args.parts;
  *plan = {kernel_of(call.grad->dtype).name(), args.parts, static_cast<unsigned>(blocks),
           kAttentionSinksThreads, blocks};
  return Status();
}

Status attention_sinks_backward(const AttentionSinksCall& call, void* stream) {
  AttentionSinksArgs args{};
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args));
  if (args.heads == 0) return Status();
  const int blocks = args.heads * args.parts, device = call.grad->device_index;
  const Argument workspace{kOp, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {blocks}, "what the plan says"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, Argument{kOp, "grad", *call.grad}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  args.sums = static_cast<float*>(call.workspace->data);
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(blocks);
  config.block.x = kAttentionSinksThreads;
  config.dependent = true;
  void* pointers[] = {&args};
  TIERCEL_RETURN_IF_ERROR(kernel_of(call.grad->dtype).launch(config, device, stream, pointers));
  config.grid.x = static_cast<unsigned>(ceil_div(args.heads, kAttentionSinksThreads / 32));
  return attention_sinks_sum_kernel().launch(config, device, stream, pointers);
}

Status attention_sinks_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(attention_sinks_kernels).load_all(device));
  return attention_sinks_sum_kernel().load(device);
}

}  // namespace tiercel
