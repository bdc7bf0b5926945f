// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/norm/norm_backward_config.h"
#include "kernels/norm/norm_choose.h"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/early_launch.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/memory_rate.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

const char* op_name(NormKind kind) { return kind == NormKind::kRms ? "rms_norm" : "layer_norm"; }

// A tensor as rows at one distance: its leading dimensions, joined.
struct Rows {
  char* data = nullptr;
  int64_t count = 1;
  int64_t stride = 0;  // bytes, as all here
  int64_t inner = 0;
  bool aligned16 = false;  // begin and end on 16 bytes
};

Status join_rows(const Argument& argument, Rows* rows) {
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(join_leading(argument, &matrix));
  const TensorView& view = argument.view;
  const int64_t element = dtype_bytes(view.dtype);
  rows->data = static_cast<char*>(view.data);
  rows->count = matrix.rows;
  rows->stride = matrix.row_stride * element;
  rows->inner = (matrix.columns > 1 ? view.strides[view.ndim - 1] : 1) * element;
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  rows->aligned16 = rows->inner == element && matrix.columns * element % 16 == 0 &&
                    address % 16 == 0 && (rows->count <= 1 || rows->stride % 16 == 0);
  return Status();
}

Status check_like_x(const Argument& argument, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {x.view.dtype}));
  if (argument.view.ndim != x.view.ndim ||
      !std::equal(x.view.shape, x.view.shape + x.view.ndim, argument.view.shape)) {
    return Status::InvalidArgument(
        mismatch(argument, "have the shape of `x`, " + shape_text(x.view.shape, x.view.ndim),
                 shape_text(argument.view.shape, argument.view.ndim)));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  return check_cuda(argument);
}

// An output must also be contiguous.
Status check_output(const Argument& argument, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_like_x(argument, x));
  return check_contiguous(argument);
}

Status check_parameter(const Argument& argument, const Argument& x) {
  if (x.view.dtype == DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  } else {
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {x.view.dtype, DType::kFloat32}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {x.view.shape[x.view.ndim - 1]}, "[N]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status check_x(const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  if (x.view.ndim < 1) {
    return Status::InvalidArgument(mismatch(x, "have at least 1 dimension", "0"));
  }
  const int64_t columns = x.view.shape[x.view.ndim - 1];
  if (columns < 1) {
    return Status::InvalidArgument(
        mismatch(x, "have at least 1 column", shape_text(x.view.shape, x.view.ndim)));
  }
  if (columns > kNormMaxColumns) {
    return Status::Unimplemented(std::string(x.op) + ": rows are supported up to " +
                                 std::to_string(kNormMaxColumns) + " columns, got " +
                                 std::to_string(columns));
  }
  return check_cuda(x);
}

Status check_rows(const char* op, int64_t rows) {
  if (rows <= kNormMaxRows) return Status();
  return Status::Unimplemented(std::string(op) + ": too many rows for one launch, got " +
                               std::to_string(rows));
}

bool on_16_bytes(const TensorView* view) {
  return view == nullptr || reinterpret_cast<uintptr_t>(view->data) % 16 == 0;
}

const char* data_of(const TensorView* view) {
  return view == nullptr ? nullptr : static_cast<const char*>(view->data);
}

bool is_float32(const TensorView* view) {
  return view != nullptr && view->dtype == DType::kFloat32;
}

int log2_of(int value) {
  int log2 = 0;
  while (value >> (log2 + 1)) ++log2;
  return log2;
}

Status no_kernel(const char* op, int columns, bool aligned16) {
  return Status::Unimplemented(std::string(op) + ": no kernel for rows of " +
                               std::to_string(columns) + " columns" +
                               (aligned16 ? "" : " that are not aligned to 16 bytes"));
}

Status prepare(const NormForward& call, int multiprocessors, NormForwardArgs* args,
               NormChoice<NormForwardKernel>* choice) {
  const char* op = op_name(call.kind);
  const Argument x{op, "x", *call.x};
  TIERCEL_RETURN_IF_ERROR(check_x(x));
  if (call.weight) TIERCEL_RETURN_IF_ERROR(check_parameter({op, "weight", *call.weight}, x));
  if (call.bias) TIERCEL_RETURN_IF_ERROR(check_parameter({op, "bias", *call.bias}, x));
  if (call.residual) TIERCEL_RETURN_IF_ERROR(check_like_x({op, "residual", *call.residual}, x));
  TIERCEL_RETURN_IF_ERROR(check_output({op, "out", *call.out}, x));
  if ((call.residual == nullptr) != (call.residual_out == nullptr)) {
    return Status::InvalidArgument(std::string(op) +
                                   ": `residual` and `residual_out` must come together, got only " +
                                   (call.residual ? "`residual`" : "`residual_out`"));
  }
  if (call.residual_out) {
    TIERCEL_RETURN_IF_ERROR(check_output({op, "residual_out", *call.residual_out}, x));
  }

  Rows rows, residual, out, residual_out;
  TIERCEL_RETURN_IF_ERROR(join_rows(x, &rows));
  TIERCEL_RETURN_IF_ERROR(join_rows({op, "out", *call.out}, &out));
  bool aligned16 =
      rows.aligned16 && out.aligned16 && on_16_bytes(call.weight) && on_16_bytes(call.bias);
  if (call.residual) {
    TIERCEL_RETURN_IF_ERROR(join_rows({op, "residual", *call.residual}, &residual));
    TIERCEL_RETURN_IF_ERROR(join_rows({op, "residual_out", *call.residual_out}, &residual_out));
    aligned16 = aligned16 && residual.aligned16 && residual_out.aligned16;
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(op, rows.count));

  const int columns = static_cast<int>(call.x->shape[call.x->ndim - 1]);
  const bool float32_parameters =
      call.x->dtype != DType::kFloat32 && (is_float32(call.weight) || is_float32(call.bias));
  *choice = choose_norm_forward(
      {call.kind, call.x->dtype, rows.count, columns, aligned16, call.residual ? 2 : 1,
       multiprocessors,
       !float32_parameters && (call.bias == nullptr || call.kind == NormKind::kLayer)});
  if (choice->kernel == nullptr) return no_kernel(op, columns, aligned16);
  *args = {};
  args->x = rows.data;
  args->residual = residual.data;
  args->weight = data_of(call.weight);
  args->bias = data_of(call.bias);
  args->out = out.data;
  args->residual_out = residual_out.data;
  args->rows = static_cast<int>(rows.count);
  args->x_stride = rows.stride;
  args->residual_stride = residual.stride;
  args->out_stride = columns * dtype_bytes(call.x->dtype);
  args->x_inner = rows.inner;
  args->residual_inner = residual.inner;
  args->columns = columns;
  args->slice = choice->slice;
  args->cluster_log2 = log2_of(choice->cluster);
  args->prefetch_blocks = multiprocessors * choice->prefetch;
  args->inverse_columns = 1.0f / static_cast<float>(columns);
  args->eps = call.eps;
  args->layer_norm = call.kind == NormKind::kLayer;
  const bool narrow = call.x->dtype != DType::kFloat32;
  args->weight_float32 = narrow && is_float32(call.weight);
  args->bias_float32 = narrow && is_float32(call.bias);
  args->early_launch = launches_early(choice->grid);
  return Status();
}

Status prepare(const NormBackward& call, const NormDevice& device, NormBackwardArgs* args,
               NormReduceArgs* reduce, NormChoice<NormBackwardKernel>* choice) {
  const char* op = op_name(call.kind);
  const Argument x{op, "x", *call.x};
  TIERCEL_RETURN_IF_ERROR(check_x(x));
  if (call.weight) TIERCEL_RETURN_IF_ERROR(check_parameter({op, "weight", *call.weight}, x));
  TIERCEL_RETURN_IF_ERROR(check_like_x({op, "grad", *call.grad}, x));
  if (call.grad_residual) {
    TIERCEL_RETURN_IF_ERROR(check_like_x({op, "grad_residual", *call.grad_residual}, x));
  }
  TIERCEL_RETURN_IF_ERROR(check_output({op, "grad_x", *call.grad_x}, x));
  const TensorView* parameters[] = {call.grad_weight, call.grad_bias};
  const char* names[] = {"grad_weight", "grad_bias"};
  if (call.kind == NormKind::kRms && call.grad_bias != nullptr) {
    return Status::Unimplemented(std::string(op) + ": no kernel sums the gradient of a bias");
  }
  for (int i = 0; i < 2; ++i) {
    if (parameters[i]) TIERCEL_RETURN_IF_ERROR(check_parameter({op, names[i], *parameters[i]}, x));
  }

  const TensorView* streams[] = {call.x, call.grad, call.grad_residual};
  const char* stream_names[] = {"x", "grad", "grad_residual"};
  Rows grad_x;
  TIERCEL_RETURN_IF_ERROR(join_rows({op, "grad_x", *call.grad_x}, &grad_x));
  *args = {};
  args->stream_count = call.grad_residual ? 3 : 2;
  bool aligned16 = grad_x.aligned16;
  for (int i = 0; i < args->stream_count; ++i) {
    Rows rows;
    TIERCEL_RETURN_IF_ERROR(join_rows({op, stream_names[i], *streams[i]}, &rows));
    args->streams[i] = rows.data;
    args->strides[i] = rows.stride;
    args->inner[i] = rows.inner;
    aligned16 = aligned16 && rows.aligned16;
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(op, grad_x.count));

  if (call.config) TIERCEL_RETURN_IF_ERROR(norm_backward_check(op, *call.config));
  const int columns = static_cast<int>(call.x->shape[call.x->ndim - 1]);
  *choice = choose_norm_backward({call.kind, call.x->dtype, grad_x.count, columns, aligned16,
                                  args->stream_count, device.multiprocessors,
                                  on_16_bytes(call.weight), device.memory_gbps, device.index,
                                  call.config ? &*call.config : nullptr});
  if (choice->kernel == nullptr) return no_kernel(op, columns, aligned16);
  args->weight = data_of(call.weight);
  args->grad_x = grad_x.data;
  args->grad_x_stride = columns * dtype_bytes(call.x->dtype);
  args->rows = static_cast<int>(grad_x.count);
  const int rows_per_warp = std::max(1, 32 / choice->threads_per_row);
  const int teams = choice->block / std::max(32, choice->threads_per_row);
  const int warps_rows = rows_per_warp * choice->parts() * (choice->paired ? 2 : 1);
  args->rows_of_tiles = warps_rows * teams * choice->kernel->rows;
  args->whole_tiles = args->rows / args->rows_of_tiles;
  args->last_share = (args->rows % args->rows_of_tiles + warps_rows - 1) / warps_rows;
  args->columns = columns;
  args->slice = choice->slice;
  args->threads_per_row = choice->threads_per_row;
  args->stages = choice->stages;
  args->prefetch_rows = choice->stages + choice->prefetch;
  args->weight_offset = choice->weight_offset;
  args->paired = choice->paired;
  args->inverse_columns = 1.0f / static_cast<float>(columns);
  args->eps = call.eps;
  args->weight_float32 = is_float32(call.weight);

  *reduce = {};
  reduce->parts = choice->parts();
  reduce->columns = columns;
  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return Status();
  if (call.workspace == nullptr) {
    return Status::InvalidArgument(std::string(op) + ": gradients of parameters need a workspace");
  }
  const Argument workspace{op, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {2, reduce->parts, columns}, "[2, parts, N]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  reduce->whole_lines =
      columns % 32 == 0 && reinterpret_cast<uintptr_t>(call.workspace->data) % 128 == 0;
  for (int i = 0; i < 2; ++i) {
    if (parameters[i] == nullptr) continue;
    args->partial[i] = static_cast<float*>(call.workspace->data) +
                       static_cast<int64_t>(i) * reduce->parts * columns;
    reduce->partial[i] = args->partial[i];
    reduce->out[i] = static_cast<char*>(parameters[i]->data);
    reduce->float32[i] = is_float32(parameters[i]);
  }
  return Status();
}

template <typename Choice, typename Args>
Status launch(const Choice& choice, Args& args, int device, void* stream) {
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = choice.block;
  config.cluster.x = choice.cluster;
  config.dynamic_smem = choice.dynamic_smem;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, device, stream, pointers);
}

const NormReduceKernel* reduce_kernel(DType dtype, int columns) {
  return KernelTable(norm_reduce_kernels).find([&](const NormReduceKernel& kernel) {
    return kernel.dtype == dtype && kernel.columns == columns;
  });
}

Status launch_reduce(NormReduceArgs& args, DType dtype, int device, int multiprocessors,
                     void* stream) {
  // Enough warps share columns for each to load all its parts at once. At least two: a block has
  // only so many threads to write the sums of its warps.
  constexpr int kWarps = kNormReduceThreads / 32;
  args.part_warps = kWarps;
  while (args.part_warps > 2 && args.part_warps / 2 * kNormReduceAtOnce >= args.parts) {
    args.part_warps /= 2;
  }
  const int kinds = args.out[1] == nullptr ? 1 : 2;
  const auto blocks = [&](int lane_columns) {
    const int columns = lane_columns * 32 * (kWarps / args.part_warps);  // per block
    return (args.columns + columns - 1) / columns;
  };
  // Two columns per lane if one would need more blocks than there are multiprocessors: the next
  // grid's blocks would wait for room.
  const int lane_columns = blocks(1) * kinds <= multiprocessors ? 1 : 2;
  LaunchConfig config;
  config.grid.x = blocks(lane_columns);
  config.grid.y = kinds;
  config.block.x = kNormReduceThreads;
  config.dependent = true;
  void* pointers[] = {&args};
  return reduce_kernel(dtype, lane_columns)->kernel.launch(config, device, stream, pointers);
}

template <typename Choice>
NormPlan plan_of(const Choice& choice, int64_t rows, DType dtype) {
  if (rows == 0) return {"none", 0, 0, 0, 0, 0, 0, 0, 0, choice.parts()};
  return {choice.kernel->kernel.name(),
          choice.kernel->aligned16 ? 16 : static_cast<int>(dtype_bytes(dtype)),
          choice.threads_per_row,
          choice.cluster,
          static_cast<unsigned>(choice.grid),
          static_cast<unsigned>(choice.block),
          static_cast<unsigned>(choice.dynamic_smem),
          choice.stages,
          choice.prefetch,
          choice.parts()};
}

Status multiprocessors_of(const TensorView& view, int* count) {
  *count = 0;
  if (view.device_type != DeviceType::kCUDA) return Status();  // the checks refuse it
  return multiprocessor_count(view.device_index, count);
}

}  // namespace

Status norm_forward_plan(const NormForward& call, int multiprocessors, NormPlan* plan) {
  NormForwardArgs args;
  NormChoice<NormForwardKernel> choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &args, &choice));
  *plan = plan_of(choice, args.rows, call.x->dtype);
  return Status();
}

Status norm_device(const TensorView& x, NormDevice* device) {
  *device = {};
  TIERCEL_RETURN_IF_ERROR(multiprocessors_of(x, &device->multiprocessors));
  if (x.device_type != DeviceType::kCUDA) return Status();
  device->memory_gbps = memory_gbps(x.device_index);
  device->index = x.device_index;
  return Status();
}

Status norm_backward_plan(const NormBackward& call, const NormDevice& device, NormPlan* plan) {
  NormBackwardArgs args;
  NormReduceArgs reduce;
  NormChoice<NormBackwardKernel> choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, device, &args, &reduce, &choice));
  *plan = plan_of(choice, args.rows, call.x->dtype);
  return Status();
}

Status norm_forward(const NormForward& call, void* stream) {
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessors_of(*call.x, &multiprocessors));
  NormForwardArgs args;
  NormChoice<NormForwardKernel> choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &args, &choice));
  if (args.rows == 0) return Status();
  return launch(choice, args, call.x->device_index, stream);
}

Status norm_backward(const NormBackward& call, void* stream) {
  const int device = call.x->device_index;
  NormDevice facts;
  TIERCEL_RETURN_IF_ERROR(norm_device(*call.x, &facts));
  NormBackwardArgs args;
  NormReduceArgs reduce;
  NormChoice<NormBackwardKernel> choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, facts, &args, &reduce, &choice));
  if (args.rows > 0) TIERCEL_RETURN_IF_ERROR(launch(choice, args, device, stream));
  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return Status();
  if (args.rows == 0) reduce.parts = 0;  // no rows: the sums are zero
  return launch_reduce(reduce, call.x->dtype, device, facts.multiprocessors, stream);
}

}  // namespace tiercel
