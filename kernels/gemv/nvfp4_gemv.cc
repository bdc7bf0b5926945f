// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_gemv.h"

#include <algorithm>
#include <string>

#include "kernels/gemv/nvfp4_gemv_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "nvfp4_gemv";
constexpr int64_t kWarps = kGemvMaxThreads / 32;  // resident per multiprocessor

Status check_cpu(const Argument& argument) {
  if (argument.view.device_type == DeviceType::kCPU) return Status();
  return Status::InvalidArgument(
      mismatch(argument, "be a CPU tensor",
               argument.view.device_type == DeviceType::kCUDA
                   ? "a tensor on cuda:" + std::to_string(argument.view.device_index)
                   : "a tensor on another kind of device"));
}

// Checks for packed codes [rows, k / 2, l] with rows and batches at multiples of 16 bytes.
Status check_codes(const Argument& argument, int64_t rows, int64_t bytes, int64_t batches,
                   const char* why) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat4E2M1x2}));
  return check_shape(argument, {rows, bytes, batches}, why);
}

Status check_code_strides(const Argument& argument) {
  const TensorView& view = argument.view;
  const bool empty = view.shape[0] * view.shape[1] * view.shape[2] == 0;
  const bool fits = (view.shape[1] == 1 || view.strides[1] == 1) &&
                    (view.shape[0] == 1 || view.strides[0] % 16 == 0) &&
                    (view.shape[2] == 1 || view.strides[2] % 16 == 0) &&
                    reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  if (empty || fits) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have neighbouring values along K and rows at multiples of 16 bytes",
               "strides " + shape_text(view.strides, view.ndim)));
}

Status check_scales(const Argument& argument, int64_t rows, int64_t groups, int64_t batches,
                    const char* why) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows, groups, batches}, why));
  return check_cpu(argument);
}

Status check_permuted(const Argument& argument, int64_t rows, int64_t groups, int64_t batches,
                      const char* why) {
  const TensorView& view = argument.view;
  const int64_t down = ceil_div(rows, 128);
  const int64_t along = ceil_div(groups, 4);
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 6));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {32, 4, down, 4, along, batches}, why));
  const int64_t strides[] = {16, 4, 512 * along, 1, 512, 512 * along * down};
  for (int i = 0; i < 6 && down * along * batches > 0; ++i) {
    if (view.shape[i] != 1 && view.strides[i] != strides[i]) {
      return Status::InvalidArgument(
          mismatch(argument, "have the strides of the permuted layout, " + shape_text(strides, 6),
                   shape_text(view.strides, view.ndim)));
    }
  }
  if (reinterpret_cast<uintptr_t>(view.data) % 16 == 0) return Status();
  return Status::Unimplemented(
      mismatch(argument, "begin at a multiple of 16 bytes", "an address that is not"));
}

Status check(const Nvfp4GemvCall& call) {
  const Argument a{kOp, "a", *call.a};
  const Argument b{kOp, "b", *call.b};
  const Argument c{kOp, "c", *call.c};
  const Argument scale_a{kOp, "scale_a", *call.scale_a};
  const Argument scale_b{kOp, "scale_b", *call.scale_b};
  const Argument permuted_a{kOp, "scale_a_permuted", *call.scale_a_permuted};
  const Argument permuted_b{kOp, "scale_b_permuted", *call.scale_b_permuted};
  TIERCEL_RETURN_IF_ERROR(check_rank(a, 3));
  const int64_t rows = call.a->shape[0];
  const int64_t bytes = call.a->shape[1];
  const int64_t batches = call.a->shape[2];
  TIERCEL_RETURN_IF_ERROR(check_codes(a, rows, bytes, batches, "[m, k / 2, l]"));
  TIERCEL_RETURN_IF_ERROR(check_codes(b, 1, bytes, batches, "[1, k / 2, l]"));
  if (bytes % 8 != 0) {
    return Status::InvalidArgument(
        mismatch(a, "have a multiple of 16 values along K, 8 bytes",
                 std::to_string(bytes) + " bytes (shape " + shape_text(call.a->shape, 3) + ")"));
  }
  const int64_t groups = bytes / 8;
  TIERCEL_RETURN_IF_ERROR(check_rank(c, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(c, {DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_shape(c, {rows, 1, batches}, "[m, 1, l]"));
  TIERCEL_RETURN_IF_ERROR(check_scales(scale_a, rows, groups, batches, "[m, k / 16, l]"));
  TIERCEL_RETURN_IF_ERROR(check_scales(scale_b, 1, groups, batches, "[1, k / 16, l]"));
  TIERCEL_RETURN_IF_ERROR(check_permuted(permuted_a, rows, groups, batches,
                                         "[32, 4, ceil(m / 128), 4, ceil(k / 64), l]"));
  TIERCEL_RETURN_IF_ERROR(
      check_permuted(permuted_b, 1, groups, batches, "[32, 4, 1, 4, ceil(k / 64), l]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(a));
  for (const Argument* other : {&b, &permuted_a, &permuted_b, &c}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*other, a));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*other));
  }
  if (bytes % 16 != 0) {
    return Status::Unimplemented(std::string(kOp) + ": k must be a multiple of 32, got " +
                                 std::to_string(2 * bytes));
  }
  if (2 * bytes > kGemvMaxK) {
    return Status::Unimplemented(std::string(kOp) + ": k is supported up to " +
                                 std::to_string(kGemvMaxK) + ", got " + std::to_string(2 * bytes));
  }
  if (rows > 0x7fffff00 || batches > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(call.a->shape, 3));
  }
  TIERCEL_RETURN_IF_ERROR(check_code_strides(a));
  return check_code_strides(b);
}

struct Choice {
  Nvfp4GemvArgs args{};
  LaunchConfig config;
};

// All warps that can be resident at once, if there are enough rows or steps of K; two blocks per
// multiprocessor. (Measured on an H200: more blocks decode b more often, fewer leave more idle.)
void choose(Choice* choice, int64_t batches) {
  Nvfp4GemvArgs& args = choice->args;
  const int64_t steps = ceil_div(args.k, kGemvStep);
  const int64_t quads = args.quads * (batch_invariant() ? 1 : batches);
  const int64_t most =
      std::min(steps, kDefaultMultiprocessors * kWarps / std::max<int64_t>(quads, 1));
  int parts = 1;
  while (2 * parts <= most && 2 * parts <= kWarps) parts *= 2;
  const int64_t share = ceil_div(quads, kDefaultMultiprocessors);  // per multiprocessor
  const int64_t per_block = share * parts <= kWarps
                                ? ceil_div(share, 2)
                                : std::max<int64_t>((steps > 4 ? 8 : 4) / parts, 1);
  const int warps = static_cast<int>(std::max<int64_t>(per_block, 1)) * parts;
  args.parts = parts;
  choice->config.grid.x = static_cast<uint32_t>(ceil_div(args.quads, warps / parts));
  choice->config.grid.y = static_cast<uint32_t>(batches);
  choice->config.block.x = warps * 32;
  choice->config.dynamic_smem = gemv_shared_bytes(args.k, warps);
  choice->config.dependent = true;
}

Status prepare(const Nvfp4GemvCall& call, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  Nvfp4GemvArgs& args = choice->args;
  const int64_t rows = call.a->shape[0];
  args.a = static_cast<const char*>(call.a->data);
  args.a_row = call.a->strides[0];
  args.a_batch = call.a->strides[2];
  args.b = static_cast<const char*>(call.b->data);
  args.b_batch = call.b->strides[2];
  args.scale_a = static_cast<const char*>(call.scale_a_permuted->data);
  args.scale_b = static_cast<const char*>(call.scale_b_permuted->data);
  args.c = static_cast<uint16_t*>(call.c->data);
  args.c_row = call.c->strides[0];
  args.c_batch = call.c->strides[2];
  args.rows = static_cast<int>(rows);
  args.k = static_cast<int>(2 * call.a->shape[1]);
  args.scale_atoms = static_cast<int>(ceil_div(args.k, 64));
  args.scale_a_batch = int64_t{512} * args.scale_atoms * ceil_div(rows, 128);
  args.scale_b_batch = int64_t{512} * args.scale_atoms;
  // If the last atom has fewer than 32 rows, it has fewer quads.
  const int64_t rest = rows % 128;
  args.quads = static_cast<int>(rows / 128 * 32 + std::min<int64_t>(rest, 32));
  choose(choice, call.a->shape[2]);
  return Status();
}

bool is_empty(const Nvfp4GemvCall& call) { return call.a->shape[0] * call.a->shape[2] == 0; }

}  // namespace

Status nvfp4_gemv_plan(const Nvfp4GemvCall& call, Nvfp4GemvPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &choice));
  *plan = {"none", 0, 0, 0, 0, 0};
  if (is_empty(call)) return Status();
  const LaunchConfig& config = choice.config;
  *plan = {nvfp4_gemv_kernel()->name(),
           static_cast<int>(config.block.x / 32 / choice.args.parts * 4),
           choice.args.parts,
           config.grid.x * config.grid.y,
           config.block.x,
           config.dynamic_smem};
  return Status();
}

Status nvfp4_gemv(const Nvfp4GemvCall& call, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &choice));
  if (is_empty(call)) return Status();
  void* pointers[] = {&choice.args};
  return nvfp4_gemv_kernel()->launch(choice.config, call.a->device_index, stream, pointers);
}

Status nvfp4_gemv_load(int device) { return nvfp4_gemv_kernel()->load(device); }

}  // namespace tiercel
