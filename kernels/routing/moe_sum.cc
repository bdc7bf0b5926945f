// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/moe_sum.h"

#include <algorithm>
#include <string>

#include "kernels/routing/moe_sum_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/early_launch.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "moe_sum";
constexpr int64_t kMaxThreads = 256;
constexpr int64_t kVectorBytes = 16;

Status check(const TensorView& x, const TensorView* weights, const TensorView& out) {
  const Argument x_arg{kOp, "x", x};
  const Argument out_arg{kOp, "out", out};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {x.shape[0], x.shape[2]}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out_arg));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out_arg));
  if (weights == nullptr) return Status();
  const Argument weights_arg{kOp, "weights", *weights};
  TIERCEL_RETURN_IF_ERROR(check_dtype(weights_arg, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(weights_arg, {x.shape[0], x.shape[1]}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(weights_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(weights_arg));
  return check_contiguous(weights_arg);
}

bool aligned(const TensorView& x, const TensorView& out) {
  const int64_t element = dtype_bytes(x.dtype);
  // The stride of a dimension of size 1 is never used.
  const int64_t row = x.shape[0] > 1 ? x.strides[0] * element : 0;
  const int64_t expert = x.shape[1] > 1 ? x.strides[1] * element : 0;
  const auto address = reinterpret_cast<uintptr_t>(x.data) | reinterpret_cast<uintptr_t>(out.data);
  const auto offsets = static_cast<uintptr_t>(row | expert | (x.shape[2] * element));
  return (x.strides[2] == 1 || x.shape[2] == 1) && (address | offsets) % kVectorBytes == 0;
}

struct Call {
  MoeSumArgs args;
  const MoeSumKernel* kernel = nullptr;
  LaunchConfig config;
};

Status prepare(const TensorView& x, const TensorView* weights, const TensorView& out, Call* call) {
  TIERCEL_RETURN_IF_ERROR(check(x, weights, out));
  const int64_t element = dtype_bytes(x.dtype);
  const int64_t vector = aligned(x, out) ? kVectorBytes : element;
  const int64_t columns = x.shape[2] * element / vector;
  MoeSumArgs& args = call->args;
  args.x = static_cast<const char*>(x.data);
  args.weights = weights != nullptr ? static_cast<const float*>(weights->data) : nullptr;
  args.out = static_cast<char*>(out.data);
  args.row_stride = x.strides[0] * element;
  args.expert_stride = x.strides[1] * element;
  args.column_stride = x.strides[2] * element;
  args.rows = x.shape[0];
  args.columns = static_cast<int>(columns);
  args.k = static_cast<int>(x.shape[1]);

  call->kernel = KernelTable(moe_sum_kernels).find([&](const MoeSumKernel& kernel) {
    return kernel.dtype == x.dtype && kernel.vector_bytes == vector &&
           (kernel.k == 0 || kernel.k == args.k);
  });
  // Small blocks distribute few vectors over the multiprocessors.
  const int64_t all = args.rows * columns;
  const int64_t threads = all >= kDefaultMultiprocessors * 4 * kMaxThreads ? kMaxThreads
                          : all >= kDefaultMultiprocessors * 256           ? 128
                                                                           : 64;
  const int64_t parts = std::max<int64_t>(ceil_div(columns, threads), 1);  // per row
  const int64_t width = std::max<int64_t>(ceil_div(columns, parts), 1);
  const int64_t height = std::max<int64_t>(threads / width, 1);
  const int64_t grid = ceil_div(args.rows, height);
  if (x.shape[1] > INT32_MAX || columns > INT32_MAX || parts > 65535 || grid > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got " +
                                 shape_text(x.shape, x.ndim));
  }
  call->config.grid = {static_cast<uint32_t>(grid), static_cast<uint32_t>(parts), 1};
  call->config.block = {static_cast<uint32_t>(width), static_cast<uint32_t>(height), 1};
  args.early_launch = launches_early(grid * parts);
  call->config.dependent = true;
  return Status();
}

bool empty(const Call& call) { return call.args.rows == 0 || call.args.columns == 0; }

}  // namespace

Status moe_sum_plan(const MoeSumCall& of, MoeSumPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare(*of.x, of.weights, *of.out, &call));
  const LaunchConfig& config = call.config;
  *plan = {call.kernel->kernel.name(),
           call.kernel->vector_bytes,
           config.grid.x,
           config.grid.y,
           config.block.x,
           config.block.y};
  if (empty(call)) *plan = {"none", 0, 0, 0, 0, 0};
  return Status();
}

Status moe_sum(const MoeSumCall& of, void* stream) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare(*of.x, of.weights, *of.out, &call));
  if (empty(call)) return Status();
  void* pointers[] = {&call.args};
  return call.kernel->kernel.launch(call.config, of.x->device_index, stream, pointers);
}

}  // namespace tiercel
