// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/fp8_transpose.h"

#include <string>

#include "kernels/quant/fp8_transpose_kernels.h"
#include "kernels/quant/quant_checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "fp8_quantize_transpose";
constexpr int64_t kTile = 128;

struct Choice {
  Fp8TransposeArgs args{};
  const Fp8TransposeKernel* kernel = nullptr;
  LaunchConfig config;
};

Status check(const Fp8TransposeCall& call) {
  const Argument x{kOp, "x", *call.x};
  const Argument q{kOp, "q", *call.q}, q_t{kOp, "q_t", *call.q_t};
  const Argument scale{kOp, "scale", *call.scale}, scale_t{kOp, "scale_t", *call.scale_t};
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  const int64_t rows = call.x->shape[0], columns = call.x->shape[1];
  const int64_t row_tiles = ceil_div(rows, kTile), column_tiles = ceil_div(columns, kTile);
  for (const Argument& values : {q, q_t}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(values, {DType::kFloat8E4M3}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(q, {rows, columns}, "[T, K]"));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(q_t, {columns, row_tiles * kTile}, "[K, T to a multiple of 128]"));
  for (const Argument& scales : {scale, scale_t}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(scales, {DType::kFloat32}));
  }
  if (call.granularity == Fp8Granularity::kGroup) {
    TIERCEL_RETURN_IF_ERROR(check_shape(scale, {rows, column_tiles}, "[T, K / 128]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(scale_t, {row_tiles, columns}, "[T / 128, K]"));
  } else if (call.granularity == Fp8Granularity::kBlock) {
    TIERCEL_RETURN_IF_ERROR(check_shape(scale, {row_tiles, column_tiles}, "[T / 128, K / 128]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(scale_t, {column_tiles, row_tiles}, "[K / 128, T / 128]"));
  } else {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `granularity` must be 1x128 or 128x128, got number " +
                                   std::to_string(static_cast<int>(call.granularity)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  for (const Argument& result : {q, scale, q_t, scale_t}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(result, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(result));
  }
  if (columns % 8 != 0) {
    return Status::Unimplemented(
        mismatch(x, "have a multiple of 8 columns", std::to_string(columns)));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows_of_vectors(x));
  TIERCEL_RETURN_IF_ERROR(check_aligned(q, 8));
  TIERCEL_RETURN_IF_ERROR(check_aligned(q_t, 16));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(scale));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(scale_t));
  if (row_tiles * column_tiles <= INT32_MAX) return Status();
  return Status::Unimplemented(std::string(kOp) + ": too many values for one launch, got shape " +
                               shape_text(call.x->shape, call.x->ndim));
}

Status choose(const Fp8TransposeCall& call, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const TensorView& x = *call.x;
  Fp8TransposeArgs& args = choice->args;
  args.x = static_cast<const char*>(x.data);
  args.row_bytes = x.strides[0] * dtype_bytes(x.dtype);
  args.q = static_cast<char*>(call.q->data);
  args.q_t = static_cast<char*>(call.q_t->data);
  args.scale = static_cast<float*>(call.scale->data);
  args.scale_t = static_cast<float*>(call.scale_t->data);
  args.rows = x.shape[0];
  args.columns = x.shape[1];
  args.row_tiles = static_cast<int>(ceil_div(args.rows, kTile));
  args.column_tiles = static_cast<int>(ceil_div(args.columns, kTile));
  args.tiles = call.granularity == Fp8Granularity::kBlock;
  choice->kernel = KernelTable(fp8_transpose_kernels).find([&](const Fp8TransposeKernel& kernel) {
    return kernel.dtype == x.dtype;
  });
  choice->config.grid.x = static_cast<uint32_t>(int64_t{args.row_tiles} * args.column_tiles);
  choice->config.block.x = kFp8TransposeThreads;
  choice->config.dependent = true;
  args.prefetch_blocks = resident_blocks(choice->config.block) / 2;  // as for other row kernels
  return Status();
}

}  // namespace

Status fp8_quantize_transpose_plan(const Fp8TransposeCall& call, Fp8TransposePlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, &choice));
  *plan = {"none", 0, 0};
  if (choice.config.grid.x == 0) return Status();
  *plan = {choice.kernel->kernel.name(), int64_t{choice.config.grid.x}, choice.config.block.x};
  return Status();
}

Status fp8_quantize_transpose(const Fp8TransposeCall& call, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, &choice));
  if (choice.config.grid.x == 0) return Status();
  void* pointers[] = {&choice.args};
  return choice.kernel->kernel.launch(choice.config, call.x->device_index, stream, pointers);
}

Status fp8_quantize_transpose_load(int device) {
  return KernelTable(fp8_transpose_kernels).load_all(device);
}

}  // namespace tiercel
