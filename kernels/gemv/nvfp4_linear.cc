// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_linear.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "nvfp4_linear";
constexpr int kMultiprocessors = 132;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of neighbouring elements at multiples of `bytes`.
Status check_rows(const Argument& argument, int64_t bytes) {
  const TensorView& view = argument.view;
  const int64_t stride = view.strides[0] * dtype_bytes(view.dtype);
  const bool empty = view.shape[0] * view.shape[1] == 0;
  const bool fits = (view.shape[1] == 1 || view.strides[1] == 1) &&
                    (view.shape[0] == 1 || stride % bytes == 0) &&
                    reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  if (empty || fits) return Status();
  return Status::Unimplemented(mismatch(
      argument,
      "have rows of neighbouring elements at multiples of " + std::to_string(bytes) + " bytes",
      "strides " + shape_text(view.strides, view.ndim)));
}

Status check(const TensorView& x, const TensorView& weight, const TensorView& scale,
             const TensorView* global_scale, const TensorView& out) {
  const Argument x_arg{kOp, "x", x};
  const Argument weight_arg{kOp, "weight", weight};
  const Argument scale_arg{kOp, "scale", scale};
  const Argument out_arg{kOp, "out", out};
  for (const Argument* argument : {&x_arg, &weight_arg, &scale_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 2));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(weight_arg, {DType::kFloat4E2M1x2}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale_arg, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {DType::kBFloat16}));
  const int64_t tokens = x.shape[0];
  const int64_t k = x.shape[1];
  const int64_t features = weight.shape[0];
  if (k % 16 != 0) {
    return Status::InvalidArgument(
        mismatch(x_arg, "have a multiple of 16 columns", shape_text(x.shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(weight_arg, {features, k / 2}, "[N, K / 2]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(scale_arg, {features, k / 16}, "[N, K / 16]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {tokens, features}, "[T, N]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  for (const Argument* argument : {&weight_arg, &scale_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  if (global_scale != nullptr) {
    const Argument global{kOp, "global_scale", *global_scale};
    TIERCEL_RETURN_IF_ERROR(check_dtype(global, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(global, {1}, "[1]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(global, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(global));
  }
  if (tokens > kLinearMaxTokens) {
    return Status::Unimplemented(std::string(kOp) + ": at most " +
                                 std::to_string(kLinearMaxTokens) + " tokens are supported, got " +
                                 std::to_string(tokens));
  }
  if (k % 64 != 0) {
    return Status::Unimplemented(std::string(kOp) + ": K must be a multiple of 64, got " +
                                 std::to_string(k));
  }
  if (features > 0x7fffff00 || k > 0x3fffffff) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got weight " +
                                 shape_text(weight.shape, 2));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(x_arg, 16));
  TIERCEL_RETURN_IF_ERROR(check_rows(weight_arg, 16));
  TIERCEL_RETURN_IF_ERROR(check_rows(scale_arg, 4));
  return check_contiguous(out_arg);
}

struct Choice {
  Nvfp4LinearArgs args{};
  const Kernel* kernel = nullptr;
  LaunchConfig config;
};

// A way to cut the work up.
struct Cut {
  int cluster;
  int tiles;  // of 16 rows, a block
  int parts;
  int stages;  // in flight, a warp
  int64_t cost;
};

int shared_bytes(const Cut& cut, int tokens, int block_stages) {
  const int warps = cut.tiles * cut.parts;
  const int queues = warps * cut.stages * kLinearStageBytes;
  const int x = block_stages * kLinearStage * 2 * tokens;
  const int sums = warps * 512 * (tokens > 8 ? 2 : 1);
  return std::max(queues + x, sums);
}

// What a multiprocessor with the most to do takes, in stages of one warp's time: rounds of blocks,
// each with its stages and what it takes to begin and end.
bool weigh(const Nvfp4LinearArgs& args, Cut* cut) {
  const int all_stages = static_cast<int>(ceil_div(args.k, kLinearStage));
  const int block_stages = static_cast<int>(ceil_div(all_stages, cut->cluster));
  const int warps = cut->tiles * cut->parts;
  const int most_warps = linear_max_threads(args.tokens) / 32;
  if (warps > most_warps || cut->parts > std::max(block_stages, 1)) return false;
  if (cut->cluster > 1 && block_stages * (cut->cluster - 1) >= all_stages) return false;
  const int shared = shared_bytes(*cut, args.tokens, block_stages);
  if (shared > kLinearMaxShared) return false;
  const int together =
      std::max(1, std::min({most_warps / warps, (kLinearMaxShared + 1024) / (shared + 1280)}));
  const int64_t blocks = ceil_div(ceil_div(args.features, 16), cut->tiles) * cut->cluster;
  const int64_t per_sm = ceil_div(blocks, kMultiprocessors);
  const int64_t rounds = ceil_div(per_sm, together);
  // In units of a 64th of the time that a multiprocessor takes for one stage.
  const int64_t busy = std::min<int64_t>(per_sm, together) * warps;
  const int64_t work = per_sm * cut->tiles * block_stages * 64;
  const int64_t in_flight = busy * (cut->stages - 1);
  const int64_t slow = in_flight >= 24 ? work : work * 24 / std::max<int64_t>(in_flight, 1);
  const int64_t staging = per_sm * args.tokens * block_stages * 8;
  cut->cost = slow + staging + rounds * 64 * 16 + (cut->cluster > 1 ? 64 * 8 : 0);
  return true;
}

Status choose(Choice* choice) {
  Nvfp4LinearArgs& args = choice->args;
  Cut best{};
  best.cost = INT64_MAX;
  for (int cluster : {1, 2, 4, 8}) {
    for (int stages : {2, 3}) {
      for (int parts : {1, 2, 4, 7, 8, 14, 16}) {
        for (int tiles : {1, 2, 4, 7, 8, 14, 16, 28}) {
          Cut cut{cluster, tiles, parts, stages, 0};
          if (weigh(args, &cut) && cut.cost < best.cost) best = cut;
        }
      }
    }
  }
  if (best.cost == INT64_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": K is too large for " +
                                 std::to_string(args.tokens) + " tokens, got " +
                                 std::to_string(args.k));
  }
  const int all_stages = static_cast<int>(ceil_div(args.k, kLinearStage));
  args.parts = best.parts;
  args.block_stages = static_cast<int>(ceil_div(all_stages, best.cluster));
  choice->kernel = nvfp4_linear_kernel(args.tokens, best.stages);
  const int64_t groups = ceil_div(ceil_div(args.features, 16), best.tiles);
  choice->config.grid.x = static_cast<uint32_t>(groups * best.cluster);
  choice->config.block.x = best.tiles * best.parts * 32;
  choice->config.cluster.x = best.cluster;
  choice->config.dynamic_smem = shared_bytes(best, args.tokens, args.block_stages);
  choice->config.dependent = true;
  return Status();
}

Status prepare(const TensorView& x, const TensorView& weight, const TensorView& scale,
               const TensorView* global_scale, const TensorView& out, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(x, weight, scale, global_scale, out));
  Nvfp4LinearArgs& args = choice->args;
  args.x = static_cast<const char*>(x.data);
  args.x_row = x.strides[0] * 2;
  args.weight = static_cast<const char*>(weight.data);
  args.weight_row = weight.strides[0];
  args.scale = static_cast<const char*>(scale.data);
  args.scale_row = scale.strides[0];
  args.global_scale =
      global_scale != nullptr ? static_cast<const float*>(global_scale->data) : nullptr;
  args.out = static_cast<uint16_t*>(out.data);
  args.tokens = static_cast<int>(x.shape[0]);
  args.features = static_cast<int>(weight.shape[0]);
  args.k = static_cast<int>(x.shape[1]);
  if (args.tokens == 0 || args.features == 0) return Status();
  return choose(choice);
}

}  // namespace

Status nvfp4_linear_plan(const TensorView& x, const TensorView& weight, const TensorView& scale,
                         const TensorView* global_scale, const TensorView& out,
                         Nvfp4LinearPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(x, weight, scale, global_scale, out, &choice));
  *plan = {"none", 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const LaunchConfig& config = choice.config;
  *plan = {choice.kernel->name(), static_cast<int>(config.cluster.x),
           choice.args.parts,     config.grid.x,
           config.block.x,        config.dynamic_smem};
  return Status();
}

Status nvfp4_linear(const TensorView& x, const TensorView& weight, const TensorView& scale,
                    const TensorView* global_scale, const TensorView& out, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(x, weight, scale, global_scale, out, &choice));
  if (choice.kernel == nullptr) return Status();
  void* pointers[] = {&choice.args};
  return choice.kernel->launch(choice.config, x.device_index, stream, pointers);
}

Status nvfp4_linear_load(int device) {
  for (int tokens : {8, 16}) {
    for (int stages : {2, 3}) {
      TIERCEL_RETURN_IF_ERROR(nvfp4_linear_kernel(tokens, stages)->load(device));
    }
  }
  return Status();
}

}  // namespace tiercel
