// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss/target_rows.h"

#include <algorithm>
#include <string>

#include "kernels/loss/target_rows_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "linear_cross_entropy";
constexpr int kVector = 8;  // elements of 16 bits in 16 bytes
constexpr int64_t kMostParts = 65535;

// A list with an element for each token.
Status check_list(const Argument& argument, DType dtype, int64_t tokens, const Argument& like) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {tokens}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  return check_cuda(argument);
}

Status prepare(const TargetRowsCall& call, TargetRowsArgs* args, TargetRowsPlan* plan,
               const TargetRowsKernel** kernel) {
  const Argument sums{kOp, "sums", *call.sums}, x{kOp, "x", *call.x};
  TIERCEL_RETURN_IF_ERROR(check_dtype(sums, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(sums, 2));
  TIERCEL_RETURN_IF_ERROR(check_cuda(sums));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {call.sums->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 2));
  const int64_t tokens = call.x->shape[0], columns = call.sums->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(x, {tokens, columns}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(x, sums));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  TIERCEL_RETURN_IF_ERROR(check_list({kOp, "target", *call.target}, DType::kInt32, tokens, sums));
  TIERCEL_RETURN_IF_ERROR(check_list({kOp, "order", *call.order}, DType::kInt64, tokens, sums));
  TIERCEL_RETURN_IF_ERROR(check_list({kOp, "by", *call.by}, DType::kFloat32, tokens, sums));
  RowMatrix to, from;
  TIERCEL_RETURN_IF_ERROR(join_rows(sums, &to));
  TIERCEL_RETURN_IF_ERROR(join_rows(x, &from));
  *plan = {"none", 0, 0, 0};
  if (tokens == 0 || columns == 0 || call.sums->shape[0] == 0) return Status();
  *args = {static_cast<char*>(call.sums->data),
           static_cast<const char*>(call.x->data),
           to.row_stride * 2,
           from.row_stride * 2,
           static_cast<const int32_t*>(call.target->data),
           static_cast<const int64_t*>(call.order->data),
           static_cast<const float*>(call.by->data),
           static_cast<int32_t>(std::min<int64_t>(tokens, INT32_MAX)),
           static_cast<int32_t>(std::min<int64_t>(columns, INT32_MAX)),
           call.sums->shape[0]};
  const uint64_t bits = reinterpret_cast<uintptr_t>(args->sums) |
                        reinterpret_cast<uintptr_t>(args->x) |
                        static_cast<uint64_t>(args->sums_stride | args->x_stride);
  const int elements = bits % (2 * kVector) == 0 && columns % kVector == 0 ? kVector : 1;
  const int64_t threads = ceil_div(columns, int64_t{elements});
  const int64_t block = std::min<int64_t>(ceil_div(threads, 32) * 32, kTargetRowsThreads);
  const int64_t parts = ceil_div(threads, block);
  if (tokens > INT32_MAX || parts > kMostParts) {
    return Status::Unimplemented(mismatch(
        x, "have fewer than 2^31 rows, of up to " + std::to_string(kMostParts * 256) + " elements",
        std::to_string(tokens) + " of " + std::to_string(columns)));
  }
  *kernel = KernelTable(target_rows_kernels).find([&](const TargetRowsKernel& one) {
    return one.dtype == call.sums->dtype && one.elements == elements;
  });
  *plan = {(*kernel)->kernel.name(), static_cast<unsigned>(tokens), static_cast<unsigned>(parts),
           static_cast<unsigned>(block)};
  return Status();
}

}  // namespace

Status target_rows_plan(const TargetRowsCall& call, TargetRowsPlan* plan) {
  TargetRowsArgs args{};
  const TargetRowsKernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status target_rows(const TargetRowsCall& call, void* stream) {
  TargetRowsArgs args{};
  TargetRowsPlan plan;
  const TargetRowsKernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.grid.y = plan.parts;
  config.block.x = plan.block;
  config.dependent = true;
  void* arguments[] = {&args};
  return kernel->kernel.launch(config, call.sums->device_index, stream, arguments);
}

Status target_rows_load(int device) { return KernelTable(target_rows_kernels).load_all(device); }

}  // namespace tiercel
