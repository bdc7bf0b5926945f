// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/nvfp4.h"

#include <algorithm>
#include <string>

#include "kernels/quant/nvfp4_kernels.h"
#include "kernels/quant/quant_checks.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;

struct Way {
  const Kernel* (*find)(DType);
  int threads;
  int groups;  // per block
  int among;   // one of `among` resident blocks prefetches (measured on an H200)
};

constexpr Way kQuantize = {nvfp4_quantize_kernel, kNvfp4QuantizeThreads, kNvfp4QuantizeThreads, 1};
constexpr Way kDequantize = {nvfp4_dequantize_kernel, kNvfp4DequantizeThreads,
                             kNvfp4DequantizeThreads * kNvfp4Halves / 2, 2};

// `values` is the tensor that is not quantised. The names are the op's argument names.
struct Call {
  const char* op;
  const char* values_name;
  const TensorView& values;
  const TensorView& q;
  const TensorView& scale;
  const TensorView* global_scale;
};

Status check(const Call& call) {
  const Argument values{call.op, call.values_name, call.values};
  const Argument q{call.op, "q", call.q};
  const Argument scale{call.op, "scale", call.scale};
  TIERCEL_RETURN_IF_ERROR(check_rank(values, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(values, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kFloat4E2M1x2}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat8E4M3}));
  const int64_t rows = call.values.shape[0];
  const int64_t columns = call.values.shape[1];
  if (columns % 16 != 0) {
    return Status::InvalidArgument(
        mismatch(values, "have a multiple of 16 columns", shape_text(call.values.shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(q, {rows, columns / 2}, "[T, K / 2]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(scale, {rows, columns / 16}, "[T, K / 16]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(values));
  TIERCEL_RETURN_IF_ERROR(check_same_device(q, values));
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale, values));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(scale));
  if (call.global_scale != nullptr) {
    const Argument global{call.op, "global_scale", *call.global_scale};
    TIERCEL_RETURN_IF_ERROR(check_dtype(global, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(global, {1}, "[1]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(global, values));
    TIERCEL_RETURN_IF_ERROR(check_cuda(global));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows_of_vectors(values));
  TIERCEL_RETURN_IF_ERROR(check_aligned(q, 8));
  return check_contiguous(scale);
}

Status prepare(const Call& call, const Way& way, Nvfp4Args* args, LaunchConfig* config) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const int64_t row_groups = call.values.shape[1] / 16;
  args->values = static_cast<char*>(call.values.data);
  args->row_bytes = call.values.strides[0] * dtype_bytes(call.values.dtype);
  args->q = static_cast<char*>(call.q.data);
  args->scale = static_cast<char*>(call.scale.data);
  args->global_scale =
      call.global_scale != nullptr ? static_cast<const float*>(call.global_scale->data) : nullptr;
  args->groups = call.values.shape[0] * row_groups;
  args->row_groups = static_cast<int>(std::min(row_groups, kMaxGrid / 2));
  args->flat = is_flat(call.values);
  const int64_t grid = ceil_div(args->groups, way.groups);
  if (grid > kMaxGrid || row_groups > kMaxGrid / 2) {
    return Status::Unimplemented(std::string(call.op) + ": too large for one launch, got shape " +
                                 shape_text(call.values.shape, 2));
  }
  config->grid.x = static_cast<uint32_t>(grid);
  config->block.x = static_cast<uint32_t>(way.threads);
  config->dependent = true;
  args->prefetch_blocks = resident_blocks(config->block) / way.among;
  return Status();
}

Status plan_of(const Call& call, const Way& way, Nvfp4Plan* plan) {
  Nvfp4Args args{};
  LaunchConfig config;
  TIERCEL_RETURN_IF_ERROR(prepare(call, way, &args, &config));
  *plan = {"none", 0, 0};
  if (args.groups > 0) {
    *plan = {way.find(call.values.dtype)->name(), int64_t{config.grid.x}, config.block.x};
  }
  return Status();
}

Status launch(const Call& call, const Way& way, void* stream) {
  Nvfp4Args args{};
  LaunchConfig config;
  TIERCEL_RETURN_IF_ERROR(prepare(call, way, &args, &config));
  if (args.groups == 0) return Status();
  void* pointers[] = {&args};
  return way.find(call.values.dtype)->launch(config, call.values.device_index, stream, pointers);
}

Status load_all(const Kernel* (*find)(DType), int device) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    TIERCEL_RETURN_IF_ERROR(find(dtype)->load(device));
  }
  return Status();
}

}  // namespace

Status nvfp4_quantize_plan(const Nvfp4Call& call, Nvfp4Plan* plan) {
  return plan_of({"nvfp4_quantize", "x", *call.values, *call.q, *call.scale, call.global_scale},
                 kQuantize, plan);
}

Status nvfp4_quantize(const Nvfp4Call& call, void* stream) {
  return launch({"nvfp4_quantize", "x", *call.values, *call.q, *call.scale, call.global_scale},
                kQuantize, stream);
}

Status nvfp4_dequantize_plan(const Nvfp4Call& call, Nvfp4Plan* plan) {
  return plan_of({"nvfp4_dequantize", "out", *call.values, *call.q, *call.scale, call.global_scale},
                 kDequantize, plan);
}

Status nvfp4_dequantize(const Nvfp4Call& call, void* stream) {
  return launch({"nvfp4_dequantize", "out", *call.values, *call.q, *call.scale, call.global_scale},
                kDequantize, stream);
}

Status nvfp4_quantize_load(int device) { return load_all(nvfp4_quantize_kernel, device); }

Status nvfp4_dequantize_load(int device) { return load_all(nvfp4_dequantize_kernel, device); }

}  // namespace tiercel
