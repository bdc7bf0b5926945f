// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce/reduce.h"

#include <algorithm>
#include <string>

#include "kernels/reduce/reduce_choose.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "reduce";
constexpr int kMaxDims = 8;

int64_t elements(const TensorView& view) {
  int64_t count = 1;
  for (int i = 0; i < view.ndim; ++i) count *= view.shape[i];
  return count;
}

Status check(const TensorView& x, const TensorView& out, int64_t dim, ReduceOp op) {
  const Argument x_arg{kOp, "x", x};
  const Argument out_arg{kOp, "out", out};
  if (x.ndim < 1 || x.ndim > kMaxDims) {
    return Status::InvalidArgument(mismatch(
        x_arg, "have 1 to " + std::to_string(kMaxDims) + " dimensions", std::to_string(x.ndim)));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  if (out.dtype != DType::kFloat32) TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {x.dtype}));
  if (dim < 0 || dim >= x.ndim) {
    return Status::InvalidArgument(std::string(kOp) + ": `dim` must be from 0 to " +
                                   std::to_string(x.ndim - 1) + ", got " + std::to_string(dim));
  }
  int64_t left = 1;
  for (int i = 0; i < x.ndim; ++i) left *= i == dim ? 1 : x.shape[i];
  if (elements(out) != left) {
    return Status::InvalidArgument(mismatch(out_arg, "have " + std::to_string(left) + " elements",
                                            std::to_string(elements(out))));
  }
  if (op == ReduceOp::kMax && x.shape[dim] == 0 && left > 0) {
    return Status::InvalidArgument(
        mismatch(x_arg, "not be empty in dimension " + std::to_string(dim) + " for a maximum",
                 "shape " + shape_text(x.shape, x.ndim)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out_arg));
  return check_contiguous(out_arg);
}

// The remaining dimensions of x, joined to two; strides in bytes.
Status describe(const TensorView& x, int64_t dim, ReduceArgs* args) {
  const int64_t element = dtype_bytes(x.dtype);
  int64_t shape[2] = {1, 1}, strides[2] = {0, 0};
  int kept = 0;
  for (int i = 0; i < x.ndim; ++i) {
    if (i == dim || x.shape[i] == 1) continue;
    const int64_t stride = x.strides[i] * element;
    if (kept > 0 && strides[kept - 1] == stride * x.shape[i]) {  // joins the previous one
      shape[kept - 1] *= x.shape[i];
      strides[kept - 1] = stride;
      continue;
    }
    if (kept == 2) {
      return Status::Unimplemented(std::string(kOp) +
                                   ": `x` without `dim` must merge to at most two dimensions, got "
                                   "strides " +
                                   shape_text(x.strides, x.ndim) + " for shape " +
                                   shape_text(x.shape, x.ndim));
    }
    shape[kept] = x.shape[i];
    strides[kept++] = stride;
  }
  args->x = static_cast<const char*>(x.data);
  args->outer = kept == 2 ? shape[0] : 1;
  args->outer_stride = kept == 2 ? strides[0] : 0;
  args->inner = kept == 0 ? 1 : shape[kept - 1];
  args->inner_stride = kept == 0 ? 0 : strides[kept - 1];
  args->length = x.shape[dim];
  args->length_stride = args->length > 1 ? x.strides[dim] * element : element;
  args->end = args->x + (args->outer - 1) * args->outer_stride +
              (args->inner - 1) * args->inner_stride + (args->length - 1) * args->length_stride +
              element;
  return Status();
}

Status prepare(const TensorView& x, const TensorView& out, int64_t dim, ReduceOp op,
               ReduceArgs* args, ReduceChoice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(x, out, dim, op));
  TIERCEL_RETURN_IF_ERROR(describe(x, dim, args));
  args->out = out.data;
  args->out_dtype = out.dtype;
  args->divisor = op == ReduceOp::kMean ? static_cast<float>(args->length) : 1.0f;
  if (args->outer * args->inner == 0) return Status();
  return reduce_choose(*args, x.dtype, op == ReduceOp::kMax, choice);
}

Status launch(const ReduceLaunch& step, int device, void* stream) {
  LaunchConfig config;
  config.grid.x = step.grid;
  config.block.x = step.block;
  config.cluster.x = step.args.cluster;
  config.dependent = true;
  void* pointers[] = {const_cast<ReduceArgs*>(&step.args)};
  return step.kernel->kernel.launch(config, device, stream, pointers);
}

}  // namespace

Status reduce_plan(const ReduceCall& call, ReducePlan* plan) {
  ReduceArgs args{};
  ReduceChoice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(*call.x, *call.out, call.dim, call.op, &args, &choice));
  *plan = {"none", "none", 0, 0, 0, 0, 0, 0};
  if (choice.first.kernel != nullptr) {
    const ReduceLaunch& first = choice.first;
    plan->kernel = first.kernel->kernel.name();
    if (choice.second.kernel != nullptr) plan->second = choice.second.kernel->kernel.name();
    plan->vector_bytes = first.vector_bytes;
    plan->parts = first.args.parts;
    plan->cluster = first.args.cluster;
    plan->grid = first.grid;
    plan->block = first.block;
    plan->workspace = choice.workspace;
  }
  return Status();
}

Status reduce(const ReduceCall& call, void* stream, int64_t* needed) {
  const TensorView& x = *call.x;
  const TensorView* workspace = call.workspace;
  ReduceArgs args{};
  ReduceChoice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(*call.x, *call.out, call.dim, call.op, &args, &choice));
  *needed = 0;
  if (choice.first.kernel == nullptr) return Status();
  if (choice.workspace > 0) {
    if (workspace == nullptr) {
      *needed = choice.workspace;
      return Status();
    }
    const Argument argument{kOp, "workspace", *workspace};
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(argument, {choice.workspace}, "[parts * outputs]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(argument, {kOp, "x", x}));
    TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
    choice.first.args.out = workspace->data;
    choice.second.args.x = static_cast<const char*>(workspace->data);
  }
  TIERCEL_RETURN_IF_ERROR(launch(choice.first, x.device_index, stream));
  if (choice.second.kernel == nullptr) return Status();
  return launch(choice.second, x.device_index, stream);
}

}  // namespace tiercel
