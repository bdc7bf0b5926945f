// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_linear.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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

// How many blocks of a configuration a multiprocessor holds, and what each needs; or why none.
struct Fit {
  int block_stages;  // of K
  int shared;
  int together;
};

const char* fit(const Nvfp4LinearArgs& args, const Nvfp4LinearConfig& config, Fit* fit) {
  const int all_stages = static_cast<int>(ceil_div(args.k, kLinearStage));
  const int warps = config.tiles * config.parts;
  const int most_warps = linear_max_threads(args.tokens) / 32;
  fit->block_stages = static_cast<int>(ceil_div(all_stages, config.cluster));
  if (warps > most_warps) return "its block has too many threads";
  if (config.parts > std::max(fit->block_stages, 1)) return "it splits K too often";
  const int64_t queues = static_cast<int64_t>(warps) * config.stages * kLinearStageBytes;
  const int64_t x = static_cast<int64_t>(fit->block_stages) * kLinearStage * 2 * args.tokens;
  const int64_t sums = warps * 512 * (args.tokens > 8 ? 2 : 1);
  const int64_t shared = std::max(queues + x, sums);
  if (shared > kLinearMaxShared) return "it needs too much shared memory";
  fit->shared = static_cast<int>(shared);
  fit->together =
      std::max(1, std::min(most_warps / warps, (kLinearMaxShared + 1024) / (fit->shared + 1280)));
  return nullptr;
}

// Expected microseconds. Fitted to sweeps of nine problems on an H200
// (tests/gemv/nvfp4_linear_h200.json), where its choice is within 10 % of the best, also for a
// problem that the fit leaves out. Two stages in flight are the best in all of them.
double estimate(const Nvfp4LinearArgs& args, const Nvfp4LinearConfig& config, const Fit& fit) {
  constexpr double kLaunch = 2.295;
  constexpr double kBytes = 4.39e6;         // of memory, a microsecond
  constexpr double kBytesInFlight = 8.48;   // stages on their way that halve that rate
  constexpr double kStage = 0.031;          // of one warp's K, where there are enough of them
  constexpr double kTokens = 0.0416;        // and for each eight tokens
  constexpr double kStageInFlight = 1.537;  // stages on their way that double both
  constexpr double kStageX = 0.0448;        // a block's copy of x, for a token and a stage
  constexpr double kRound = 1.193;          // to begin and end a block
  constexpr double kClusters = 0.672;       // to add up in a cluster, for each doubling of it
  constexpr double kWideClusters = 0.9336;  // of the multiprocessors take clusters of four or more
  const double places = kMultiprocessors * (config.cluster >= 4 ? kWideClusters : 1.0);
  const double blocks =
      static_cast<double>(ceil_div(ceil_div(args.features, 16), config.tiles) * config.cluster);
  const double per_sm = std::ceil(blocks / places);
  const double rounds = std::ceil(per_sm / fit.together);
  const double at_once = std::min(per_sm, static_cast<double>(fit.together));
  const double in_flight = at_once * config.tiles * config.parts * (config.stages - 0.5);
  const double multiply = per_sm * config.tiles * fit.block_stages *
                          (kStage + kTokens * (args.tokens > 8 ? 2 : 1)) *
                          (1.0 + kStageInFlight / in_flight);
  const double bytes = 0.5625 * args.features * static_cast<double>(args.k);
  const double load = bytes / kBytes * (1.0 + kBytesInFlight / in_flight);
  const double stage_x = kStageX * args.tokens * fit.block_stages * at_once;
  const double add = kClusters * std::log2(config.cluster);
  return kLaunch + std::max(load, multiply) + rounds * (stage_x + kRound) + add;
}

Status choose(const Nvfp4LinearArgs& args, Nvfp4LinearConfig* best) {
  double least = std::numeric_limits<double>::infinity();
  Fit place{};
  for (int cluster : {1, 2, 4, 8}) {
    for (int parts : {1, 2, 4, 7, 8, 14, 16}) {
      for (int warps : {1, 2, 4, 7, 8, 12, 14, 16, 20, 24, 28}) {  // as in the sweeps
        if (warps % parts != 0) continue;
        const Nvfp4LinearConfig config{cluster, warps / parts, parts, 2};
        if (fit(args, config, &place) != nullptr) continue;
        const double time = estimate(args, config, place);
        if (time < least) least = time, *best = config;
      }
    }
  }
  if (least < std::numeric_limits<double>::infinity()) return Status();
  return Status::Unimplemented(std::string(kOp) + ": K is too large for " +
                               std::to_string(args.tokens) + " tokens, got " +
                               std::to_string(args.k));
}

// The same, remembered: a model has a few problems, and weighing hundreds of cuts takes longer than
// a launch.
Status choose_once(const Nvfp4LinearArgs& args, Nvfp4LinearConfig* best) {
  struct Known {
    int tokens, features, k;
    Nvfp4LinearConfig config;
  };
  static thread_local Known known[64] = {};
  const uint32_t hash = static_cast<uint32_t>(args.features) * 0x9e3779b1u +
                        static_cast<uint32_t>(args.k) * 0x85ebca6bu;
  Known& entry = known[(hash >> 26) ^ static_cast<uint32_t>(args.tokens)];
  if (entry.tokens != args.tokens || entry.features != args.features || entry.k != args.k) {
    Nvfp4LinearConfig config{};
    TIERCEL_RETURN_IF_ERROR(choose(args, &config));
    entry = {args.tokens, args.features, args.k, config};
  }
  *best = entry.config;
  return Status();
}

Status configure(const Nvfp4LinearConfig& config, Choice* choice) {
  Nvfp4LinearArgs& args = choice->args;
  Fit place{};
  const bool sizes = config.cluster >= 1 && config.cluster <= 8 && config.tiles >= 1 &&
                     config.tiles <= 32 && config.parts >= 1 && config.parts <= 32;
  choice->kernel = sizes ? nvfp4_linear_kernel(args.tokens, config.stages) : nullptr;
  const char* problem =
      choice->kernel == nullptr ? "there is no such kernel" : fit(args, config, &place);
  if (problem != nullptr) {
    return Status::Unimplemented(
        std::string(kOp) + ": the configuration cluster " + std::to_string(config.cluster) +
        ", tiles " + std::to_string(config.tiles) + ", parts " + std::to_string(config.parts) +
        ", stages " + std::to_string(config.stages) + " cannot run: " + problem);
  }
  args.parts = config.parts;
  args.block_stages = place.block_stages;
  const int64_t groups = ceil_div(ceil_div(args.features, 16), config.tiles);
  choice->config.grid.x = static_cast<uint32_t>(groups * config.cluster);
  choice->config.block.x = config.tiles * config.parts * 32;
  choice->config.cluster.x = config.cluster;
  choice->config.dynamic_smem = place.shared;
  choice->config.dependent = true;
  return Status();
}

Status prepare(const TensorView& x, const TensorView& weight, const TensorView& scale,
               const TensorView* global_scale, const TensorView& out,
               const Nvfp4LinearConfig* config, Choice* choice) {
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
  if (config != nullptr) return configure(*config, choice);
  const TunedProblem problem{x.device_index, weight.dtype, args.features, args.k};
  const Nvfp4LinearConfig* tuned = nvfp4_linear_tuned().find(problem, args.tokens);
  // Tuned for another number of tokens, it may not fit this one.
  if (tuned != nullptr && configure(*tuned, choice).ok()) return Status();
  Nvfp4LinearConfig chosen{};
  TIERCEL_RETURN_IF_ERROR(choose_once(args, &chosen));
  return configure(chosen, choice);
}

}  // namespace

Status nvfp4_linear_plan(const TensorView& x, const TensorView& weight, const TensorView& scale,
                         const TensorView* global_scale, const TensorView& out,
                         const Nvfp4LinearConfig* config, Nvfp4LinearPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(x, weight, scale, global_scale, out, config, &choice));
  *plan = {"none", 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const LaunchConfig& launch = choice.config;
  *plan = {choice.kernel->name(), static_cast<int>(launch.cluster.x),
           choice.args.parts,     launch.grid.x,
           launch.block.x,        launch.dynamic_smem};
  return Status();
}

Status nvfp4_linear(const TensorView& x, const TensorView& weight, const TensorView& scale,
                    const TensorView* global_scale, const TensorView& out,
                    const Nvfp4LinearConfig* config, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(x, weight, scale, global_scale, out, config, &choice));
  if (choice.kernel == nullptr) return Status();
  void* pointers[] = {&choice.args};
  return choice.kernel->launch(choice.config, x.device_index, stream, pointers);
}

TunedTable<Nvfp4LinearConfig>& nvfp4_linear_tuned() {
  static auto* table = new TunedTable<Nvfp4LinearConfig>();  // never destroyed: threads may launch
  return *table;
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
