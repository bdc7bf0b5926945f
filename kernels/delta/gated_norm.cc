// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/gated_norm.h"

#include <string>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_rms_norm";
constexpr int64_t kAligned = 16;  // bytes

bool aligned(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % kAligned == 0;
}

// Rows of vectors of 16 bytes.
Status lay_out(const Argument& argument, RowMatrix* matrix) {
  TIERCEL_RETURN_IF_ERROR(join_rows(argument, matrix));
  if (matrix->row_stride * 2 % kAligned == 0 && aligned(argument.view)) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows aligned to 16 bytes",
               "strides " + shape_text(argument.view.strides, argument.view.ndim)));
}

Status prepare(const GatedNormCall& call, GatedNormArgs* args, GatedNormPlan* plan,
               const Kernel** kernel) {
  *plan = {"none", 0, 0};
  const Argument x{kOp, "x", *call.x}, gate{kOp, "gate", *call.gate};
  const Argument weight{kOp, "weight", *call.weight}, out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kBFloat16, DType::kFloat16}));
  const DType dtype = call.x->dtype;
  const int64_t columns = last_size(*call.x);
  TIERCEL_RETURN_IF_ERROR(check_dtype(gate, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(gate, *call.x, columns, "that of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {dtype, DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(weight, {columns}, "[N]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(weight));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(out, *call.x, columns, "that of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  for (const Argument& other : {gate, weight, out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  if (columns % 8 != 0 || columns > kGatedNormMost) {
    return Status::Unimplemented(std::string(kOp) + ": rows of a multiple of 8 elements up to " +
                                 std::to_string(kGatedNormMost) + " are supported, got " +
                                 std::to_string(columns));
  }
  RowMatrix of_x, of_gate;
  TIERCEL_RETURN_IF_ERROR(lay_out(x, &of_x));
  TIERCEL_RETURN_IF_ERROR(lay_out(gate, &of_gate));
  if (!aligned(*call.weight) || !aligned(*call.out)) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `weight` and `out` must be aligned to 16 bytes");
  }
  if (of_x.rows == 0 || columns == 0) return Status();
  args->x = static_cast<const char*>(call.x->data);
  args->gate = static_cast<const char*>(call.gate->data);
  args->weight = static_cast<const char*>(call.weight->data);
  args->out = static_cast<char*>(call.out->data);
  args->x_stride = of_x.row_stride * 2;
  args->gate_stride = of_gate.row_stride * 2;
  args->rows = of_x.rows;
  args->columns = static_cast<int>(columns);
  args->weight_float = call.weight->dtype == DType::kFloat32;
  args->eps = call.eps;
  // A lane has one vector of 8 elements, or up to four of long rows.
  const int64_t vectors = columns / 8;
  const int each = vectors <= 32 ? 1 : kGatedNormVectors;
  int lanes = 1;
  while (lanes < 32 && lanes * each < vectors) lanes *= 2;
  args->lanes = lanes;
  const GatedNormKernel* found =
      KernelTable(gated_norm_kernels).find([&](const GatedNormKernel& one) {
        return one.dtype == dtype && one.vectors == each;
      });
  const int64_t grid = ceil_div(of_x.rows, kGatedNormThreads / lanes);
  if (grid > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too many rows for one launch");
  }
  *kernel = &found->kernel;
  *plan = {found->kernel.name(), lanes, static_cast<unsigned>(grid)};
  return Status();
}

}  // namespace

Status gated_norm_plan(const GatedNormCall& call, GatedNormPlan* plan) {
  GatedNormArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status gated_norm(const GatedNormCall& call, void* stream) {
  GatedNormArgs args{};
  GatedNormPlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.dependent = true;
  config.grid = {plan.grid, 1, 1};
  config.block.x = kGatedNormThreads;
  void* arguments[] = {&args};
  return kernel->launch(config, call.x->device_index, stream, arguments);
}

}  // namespace tiercel
