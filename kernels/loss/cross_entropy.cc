// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/loss/cross_entropy_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "cross_entropy";
// Short rows of few rows are spread over more blocks, down to parts of this size.
constexpr int64_t kLeastPart = 4 << 10;

Status check_targets(const TensorView& target, int64_t ignore_index, CrossEntropyTargets* targets) {
  const Argument argument{kOp, "target", target};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt64, DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 1));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  const int64_t bytes = dtype_bytes(target.dtype);
  *targets = {static_cast<const char*>(target.data),
              target.shape[0] > 1 ? target.strides[0] * bytes : 0, ignore_index,
              target.dtype == DType::kInt64};
  return Status();
}

Status check_weight(const TensorView& weight, const Argument& like) {
  const Argument argument{kOp, "weight", weight};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 1));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  return check_cuda(argument);
}

// A float32 tensor with one element for all rows, or one for each.
Status check_per_row(const Argument& argument, int64_t rows, const Argument& like,
                     const float** data, int64_t* step) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 1));
  const bool one = argument.view.shape[0] == 1;
  if (!one) TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  *data = static_cast<const float*>(argument.view.data);
  *step = one ? 0 : 1;
  return Status();
}

// A matrix of floating-point rows.
Status check_rows(const Argument& argument, RowMatrix* matrix) {
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(argument, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 2));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  TIERCEL_RETURN_IF_ERROR(join_rows(argument, matrix));
  const int64_t most = INT32_MAX / 8;
  if (matrix->columns <= most) return Status();
  return Status::Unimplemented(std::string(kOp) + ": rows of up to " + std::to_string(most) +
                               " logits are supported, got " + std::to_string(matrix->columns));
}

// A float32 tensor with one element for each row, for the kernel to write or to read.
Status check_row_values(const Argument& argument, int64_t rows, const Argument& like,
                        float** data) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  *data = static_cast<float*>(argument.view.data);
  return Status();
}

Status lay_out_entropy(const CrossEntropyCall& call, int64_t rows, CrossEntropyArgs* args) {
  const Argument logits{kOp, "logits", *call.logits};
  if (call.entropy == nullptr) {
    if (call.entropy_scale == nullptr) return Status();
    return Status::InvalidArgument(mismatch({kOp, "entropy_scale", *call.entropy_scale},
                                            "be None without `entropy`", "a tensor"));
  }
  TIERCEL_RETURN_IF_ERROR(
      check_row_values({kOp, "entropy", *call.entropy}, rows, logits, &args->entropy));
  if (call.options.label_smoothing != 0.0f) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `label_smoothing` must be 0 with an entropy, got " +
                                   std::to_string(call.options.label_smoothing));
  }
  if (call.entropy_scale == nullptr) return Status();
  float* scale = nullptr;
  TIERCEL_RETURN_IF_ERROR(
      check_row_values({kOp, "entropy_scale", *call.entropy_scale}, rows, logits, &scale));
  args->entropy_scale = scale;
  return Status();
}

Status lay_out(const CrossEntropyCall& call, CrossEntropyArgs* args, int64_t* rows) {
  const Argument logits{kOp, "logits", *call.logits};
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(check_rows(logits, &matrix));
  if (call.logits->shape[1] == 0) {
    return Status::InvalidArgument(mismatch(logits, "have at least 1 column", "0"));
  }
  *rows = matrix.rows;
  const int64_t columns = matrix.columns;
  const int64_t bytes = dtype_bytes(call.logits->dtype);
  args->columns = static_cast<int>(columns);
  args->x = static_cast<const char*>(call.logits->data);
  args->x_stride = *rows == 1 ? 0 : matrix.row_stride * bytes;

  TIERCEL_RETURN_IF_ERROR(check_targets(*call.target, call.options.ignore_index, &args->target));
  const Argument target{kOp, "target", *call.target};
  TIERCEL_RETURN_IF_ERROR(check_shape(target, {*rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(target, logits));
  if (call.weight != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_weight(*call.weight, logits));
    TIERCEL_RETURN_IF_ERROR(check_shape({kOp, "weight", *call.weight}, {columns}, "[V]"));
    args->weight = static_cast<const float*>(call.weight->data);
  }
  if (call.scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        check_per_row({kOp, "scale", *call.scale}, *rows, logits, &args->scale, &args->scale_step));
  }
  TIERCEL_RETURN_IF_ERROR(check_row_values({kOp, "loss", *call.loss}, *rows, logits, &args->loss));
  TIERCEL_RETURN_IF_ERROR(lay_out_entropy(call, *rows, args));
  if (call.grad == nullptr) return Status();
  const Argument grad{kOp, "grad", *call.grad};
  TIERCEL_RETURN_IF_ERROR(check_dtype(grad, {call.logits->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(grad, {*rows, columns}, "[T, V]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(grad, logits));
  TIERCEL_RETURN_IF_ERROR(check_cuda(grad));
  RowMatrix written;
  TIERCEL_RETURN_IF_ERROR(join_rows(grad, &written));
  args->grad = static_cast<char*>(call.grad->data);
  args->grad_stride = *rows == 1 ? 0 : written.row_stride * bytes;
  const auto offset = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kLossVectorBytes;
  };
  args->vectors = offset(args->x) == offset(args->grad) &&
                  (args->grad_stride - args->x_stride) % kLossVectorBytes == 0;
  return Status();
}

Status check_options(const CrossEntropyOptions& options) {
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f)) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `label_smoothing` must be between 0 and 1, got " +
                                   std::to_string(options.label_smoothing));
  }
  if (!(options.softcap >= 0.0f) || std::isinf(options.softcap)) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `softcap` must be a positive number, got " +
                                   std::to_string(options.softcap));
  }
  return Status();
}

// Chooses a warp for a row, or how many blocks share it.
Status choose(const CrossEntropyCall& call, int64_t rows, CrossEntropyArgs* args,
              CrossEntropyPlan* plan, const Kernel** kernel) {
  *plan = {"none", 0, 0, 0, 0};
  if (rows == 0) return Status();
  const int64_t per_vector = kLossVectorBytes / dtype_bytes(call.logits->dtype);
  const int64_t vectors = ceil_div(args->columns + per_vector - 1, per_vector);
  const auto part = [&](int64_t blocks) { return ceil_div(vectors, blocks) * kLossVectorBytes; };
  int64_t blocks = 1;
  while (blocks < kLossBlocks && part(blocks) > kLossPart) blocks *= 2;
  while (blocks < kLossBlocks && 2 * rows_to_choose_by(rows) * blocks <= kDefaultMultiprocessors &&
         part(2 * blocks) >= kLeastPart) {
    blocks *= 2;
  }
  if (part(blocks) > kLossLargestPart) {
    // One vector less: a row may begin anywhere in its first.
    const int64_t most = (int64_t{kLossLargestPart} * kLossBlocks / kLossVectorBytes - 1);
    return Status::Unimplemented(std::string(kOp) + ": rows of up to " +
                                 std::to_string(most * per_vector + 1) +
                                 " logits are supported, got " + std::to_string(args->columns));
  }
  if (rows * blocks > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too many rows for one launch, got " +
                                 std::to_string(rows));
  }
  args->blocks = static_cast<uint32_t>(blocks);
  args->rows = rows;
  args->warp_vectors = static_cast<int>(part(1) / kLossVectorBytes);
  const bool warp = part(1) <= kLossWarpRow;
  if (warp) {
    const auto fits = [&](const CrossEntropyShortKernel& one) {
      return one.dtype == call.logits->dtype && one.entropy == (call.entropy != nullptr);
    };
    *kernel = &KernelTable(cross_entropy_short_kernels).find(fits)->kernel;
  } else {
    const auto fits = [&](const CrossEntropyKernel& one) {
      return one.dtype == call.logits->dtype && one.gradient == (call.grad != nullptr) &&
             one.entropy == (call.entropy != nullptr);
    };
    *kernel = &KernelTable(cross_entropy_kernels).find(fits)->kernel;
  }
  // A warp a row, and few rows on many multiprocessors.
  const int64_t rows_per_block =
      warp ? std::clamp<int64_t>(ceil_div(rows, kDefaultMultiprocessors), 1, kLossThreads / 32) : 1;
  *plan = {(*kernel)->name(), static_cast<int>(blocks),
           static_cast<unsigned>(ceil_div(rows, rows_per_block) * blocks),
           static_cast<unsigned>(warp ? 32 * rows_per_block : kLossThreads),
           static_cast<unsigned>(part(blocks) * rows_per_block)};
  return Status();
}

Status prepare(const CrossEntropyCall& call, CrossEntropyArgs* args, CrossEntropyPlan* plan,
               const Kernel** kernel) {
  int64_t rows = 0;
  TIERCEL_RETURN_IF_ERROR(lay_out(call, args, &rows));
  TIERCEL_RETURN_IF_ERROR(check_options(call.options));
  args->smoothing = call.options.label_smoothing;
  args->z_loss = call.options.z_loss;
  args->softcap = call.options.softcap;
  return choose(call, rows, args, plan, kernel);
}

Status prepare_scale(const CrossEntropyScaleCall& call, CrossEntropyScaleArgs* args) {
  TIERCEL_RETURN_IF_ERROR(check_targets(*call.target, call.ignore_index, &args->target));
  const Argument target{kOp, "target", *call.target};
  if (call.weight != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_weight(*call.weight, target));
    args->weight = static_cast<const float*>(call.weight->data);
    args->columns = static_cast<int>(std::min<int64_t>(call.weight->shape[0], INT32_MAX));
  }
  const float* scale = nullptr;
  int64_t step = 0;
  TIERCEL_RETURN_IF_ERROR(check_per_row({kOp, "scale", *call.scale}, 1, target, &scale, &step));
  args->scale = const_cast<float*>(scale);
  args->rows = call.target->shape[0];
  return Status();
}

Status prepare_rescale(const CrossEntropyRescaleCall& call, CrossEntropyRescaleArgs* args) {
  const Argument grad{kOp, "grad", *call.grad};
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(check_rows(grad, &matrix));
  args->grad = static_cast<char*>(call.grad->data);
  args->rows = matrix.rows;
  args->row_stride = matrix.row_stride * dtype_bytes(call.grad->dtype);
  args->columns = static_cast<int>(matrix.columns);
  return check_per_row({kOp, "factor", *call.factor}, matrix.rows, grad, &args->factor,
                       &args->factor_step);
}

}  // namespace

Status cross_entropy_plan(const CrossEntropyCall& call, CrossEntropyPlan* plan) {
  CrossEntropyArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status cross_entropy(const CrossEntropyCall& call, void* stream) {
  CrossEntropyArgs args{};
  CrossEntropyPlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.cluster.x = args.blocks;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  void* arguments[] = {&args};
  return kernel->launch(config, call.logits->device_index, stream, arguments);
}

Status cross_entropy_mean_scale_plan(const CrossEntropyScaleCall& call, CrossEntropyPlan* plan) {
  CrossEntropyScaleArgs args{};
  *plan = {kCrossEntropyScale.name(), 0, 1, kLossScaleThreads, 0};
  return prepare_scale(call, &args);
}

Status cross_entropy_mean_scale(const CrossEntropyScaleCall& call, void* stream) {
  CrossEntropyScaleArgs args{};
  TIERCEL_RETURN_IF_ERROR(prepare_scale(call, &args));
  LaunchConfig config;
  config.grid.x = 1;
  config.block.x = kLossScaleThreads;
  config.dependent = true;
  void* arguments[] = {&args};
  return kCrossEntropyScale.launch(config, call.target->device_index, stream, arguments);
}

Status cross_entropy_rescale(const CrossEntropyRescaleCall& call, void* stream) {
  CrossEntropyRescaleArgs args{};
  TIERCEL_RETURN_IF_ERROR(prepare_rescale(call, &args));
  if (args.rows == 0 || args.columns == 0) return Status();
  LaunchConfig config;
  config.grid.x =
      static_cast<uint32_t>(std::min<int64_t>(args.rows, int64_t{8} * kDefaultMultiprocessors));
  config.block.x = kLossThreads;
  config.dependent = true;
  void* arguments[] = {&args};
  return KernelTable(cross_entropy_rescale_kernels)
      .find([&](const CrossEntropyFormatKernel& one) { return one.dtype == call.grad->dtype; })
      ->kernel.launch(config, call.grad->device_index, stream, arguments);
}

Status cross_entropy_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(cross_entropy_kernels).load_all(device));
  TIERCEL_RETURN_IF_ERROR(KernelTable(cross_entropy_short_kernels).load_all(device));
  TIERCEL_RETURN_IF_ERROR(KernelTable(cross_entropy_rescale_kernels).load_all(device));
  return kCrossEntropyScale.load(device);
}

}  // namespace tiercel
