// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/w4_linear.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/gemv/w4_float8_kernels.h"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

// Checks for contiguous rows at multiples of `bytes`.
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

// The group that a scale of int4 has, by its shape, or 0.
int64_t int4_group(int64_t k, int64_t groups) {
  for (int64_t group : {32, 64, 128}) {
    if (groups * group == k) return group;
  }
  return 0;
}

Status check_scale(const W4LinearCall& call, int64_t features, int64_t k, W4Scales* scales) {
  const Argument scale{call.op, "scale", *call.scale};
  TIERCEL_RETURN_IF_ERROR(check_rank(scale, 2));
  scales->format = call.format;
  scales->scale = static_cast<const char*>(call.scale->data);
  scales->scale_row = call.scale->strides[0] * dtype_bytes(call.scale->dtype);
  switch (call.format) {
    case W4Format::kNvfp4:
      scales->group_shift = 4;
      TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat8E4M3}));
      return check_shape(scale, {features, k / 16}, "[N, K / 16]");
    case W4Format::kMxfp4:
      scales->group_shift = 5;
      TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kUInt8}));
      return check_shape(scale, {features, k / 32}, "[N, K / 32]");
    case W4Format::kInt4:
      break;
  }
  if (call.x_scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kBFloat16, DType::kFloat16}));
  } else {
    TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {call.x->dtype}));
  }
  const int64_t group = int4_group(k, call.scale->shape[1]);
  if (group == 0 || call.scale->shape[0] != features) {
    return Status::InvalidArgument(
        mismatch(scale, "have shape [N, K / group] with a group of 32, 64 or 128",
                 shape_text(call.scale->shape, 2)));
  }
  scales->group_shift = group == 32 ? 5 : group == 64 ? 6 : 7;
  return Status();
}

Status check_zero_point(const W4LinearCall& call, W4Scales* scales) {
  if (call.zero_point == nullptr) return Status();
  const Argument zero{call.op, "zero_point", *call.zero_point};
  if (call.format != W4Format::kInt4) {
    return Status::InvalidArgument(std::string(call.op) + ": `zero_point` is for int4 only");
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(zero, {call.scale->dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(zero, {call.scale->shape[0], call.scale->shape[1]}, "as `scale`"));
  scales->zero = static_cast<const char*>(call.zero_point->data);
  scales->zero_row = call.zero_point->strides[0] * 2;
  return check_rows(zero, 2);
}

// Activations of e4m3 and their scale.
Status check_float8(const W4LinearCall& call) {
  const Argument x{call.op, "x", *call.x};
  const Argument scale{call.op, "x_scale", *call.x_scale};
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kFloat8E4M3}));
  if (call.format == W4Format::kNvfp4) {
    return Status::InvalidArgument(
        std::string(call.op) +
        ": `format` must be mxfp4 or int4 where `x` is float8_e4m3fn, got nvfp4");
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  int64_t count = 1;
  for (int i = 0; i < call.x_scale->ndim; ++i) count *= call.x_scale->shape[i];
  const int64_t tokens = call.x->shape[0];
  if (count != 1 && count != tokens) {
    return Status::InvalidArgument(
        mismatch(scale, "have 1 or T = " + std::to_string(tokens) + " elements",
                 "shape " + shape_text(call.x_scale->shape, call.x_scale->ndim)));
  }
  return check_contiguous(scale);
}

struct Problem {
  int64_t tokens, features, k;
  W4Scales scales{};
  W4Epilogue epilogue{};
};

Status check(const W4LinearCall& call, Problem* problem) {
  const Argument x{call.op, "x", *call.x};
  const Argument weight{call.op, "weight", *call.weight};
  const Argument scale{call.op, "scale", *call.scale};
  const Argument out{call.op, "out", *call.out};
  for (const Argument* argument : {&x, &weight, &scale, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 2));
  }
  const bool nvfp4_only = call.op != std::string("w4_linear");
  if (nvfp4_only) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kBFloat16}));
    TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {DType::kFloat4E2M1x2}));
  } else {
    if (call.x_scale != nullptr) {
      TIERCEL_RETURN_IF_ERROR(check_float8(call));
    } else {
      TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kBFloat16, DType::kFloat16}));
    }
    TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {DType::kUInt8, DType::kFloat4E2M1x2}));
  }
  const DType result = call.x_scale != nullptr ? DType::kBFloat16 : call.x->dtype;
  const int64_t tokens = problem->tokens = call.x->shape[0];
  const int64_t k = problem->k = call.x->shape[1];
  const int64_t features = problem->features = call.weight->shape[0];
  const int group = call.format == W4Format::kNvfp4 ? 16 : 32;
  if (k % group != 0) {
    return Status::InvalidArgument(
        mismatch(x, "have a multiple of " + std::to_string(group) + " columns",
                 shape_text(call.x->shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(weight, {features, k / 2}, "[N, K / 2]"));
  TIERCEL_RETURN_IF_ERROR(check_scale(call, features, k, &problem->scales));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {result}));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {tokens, features}, "[T, N]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  for (const Argument* argument : {&weight, &scale, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_zero_point(call, &problem->scales));
  if (call.global_scale != nullptr) {
    const Argument global{call.op, "global_scale", *call.global_scale};
    TIERCEL_RETURN_IF_ERROR(check_dtype(global, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(global, {1}, "[1]"));
    problem->epilogue.global_scale = static_cast<const float*>(call.global_scale->data);
  }
  if (call.bias != nullptr) {
    const Argument bias{call.op, "bias", *call.bias};
    TIERCEL_RETURN_IF_ERROR(check_dtype(bias, {result}));
    TIERCEL_RETURN_IF_ERROR(check_shape(bias, {features}, "[N]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(bias));
    problem->epilogue.bias = static_cast<const uint16_t*>(call.bias->data);
  }
  const Argument others[] = {
      {call.op, "zero_point", call.zero_point != nullptr ? *call.zero_point : *call.x},
      {call.op, "global_scale", call.global_scale != nullptr ? *call.global_scale : *call.x},
      {call.op, "bias", call.bias != nullptr ? *call.bias : *call.x},
      {call.op, "x_scale", call.x_scale != nullptr ? *call.x_scale : *call.x}};
  for (const Argument& other : others) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  problem->epilogue.activation = call.activation;
  if (k % 64 != 0) {
    return Status::Unimplemented(std::string(call.op) + ": K must be a multiple of 64, got " +
                                 std::to_string(k));
  }
  if (features > 0x7fffff00 || k > 0x3fffffff || tokens > 0x7fffff00) {
    return Status::Unimplemented(std::string(call.op) + ": too large for one launch, got weight " +
                                 shape_text(call.weight->shape, 2));
  }
  if (call.format == W4Format::kMxfp4 && call.x->dtype == DType::kFloat16) {
    return Status::Unimplemented(std::string(call.op) +
                                 ": MXFP4's scales need the range of bfloat16, got float16");
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(x, 16));
  TIERCEL_RETURN_IF_ERROR(check_rows(weight, 16));
  TIERCEL_RETURN_IF_ERROR(check_rows(scale, call.format == W4Format::kNvfp4 ? 4 : 2));
  return check_contiguous(out);
}

// A launch of w4_tiles.cu's kernels, or of w4_float8.cu's, whose arguments have more.
struct TilesLaunch {
  W4Float8Args args{};
  const Kernel* kernel = nullptr;
  bool float8 = false;
  int tokens = 0;  // of a block
  LaunchConfig config;
  int tail = 0;  // the last tiles, which a second launch computes
  LaunchConfig tail_config;
};

// Blocks that run at once, one per multiprocessor, in clusters of each size: a cluster has a place
// in one GPC, and GPCs differ in their number of multiprocessors.
constexpr int kMaxSplit = 8;
constexpr int kInvariantTokens = 128;  // of a tile in the batch-invariant mode, without a split
constexpr int kPlaces[kMaxSplit + 1] = {0, 132, 132, 111, 120, 100, 96, 98, 112};

// Estimated clock cycles of a kernel; they fit what it took on an H200 with N from 2880 to 14336
// and K from 2880 to 14336.
struct KernelTime {
  double alone;       // a step of K, of one block on a multiprocessor
  double both;        // and of two
  double ends;        // before the first step and behind the last
  double split_ends;  // and where K is split, which has to be added up
};

KernelTime time_of(const W4TilesKernel& kernel) {
  const double tokens = kernel.tokens;
  const double step = kernel.groups == 1 ? 640 + tokens * 7.3 : 700 + tokens * 6.2;
  return {step, 0, 8000, 8900 + tokens * 24};
}

KernelTime time_of(const W4Float8Kernel& kernel) {
  const double tokens = kernel.tokens, ends = 3000 + tokens * 8, split_ends = 3000 + tokens * 78;
  const double scaling = kernel.floats ? 0 : kernel.group == 128 ? 200 : 900;
  if (kernel.tokens == 32) {
    return {1000 + scaling / 2, 1300 + scaling / 2, ends, split_ends};
  }
  return {(kernel.tokens == 128 ? 1000 : 1500) + scaling, 0, ends, split_ends};
}

double estimate(const KernelTime& kernel, int together, int64_t tiles, int64_t steps, int split) {
  const int64_t blocks = tiles * split, room = kPlaces[split];
  const int64_t waves = ceil_div(blocks, room * together);
  const double step = blocks > room && together == 2 ? kernel.both : kernel.alone;
  const double ends = split > 1 ? kernel.split_ends : kernel.ends;
  return static_cast<double>(waves) * (static_cast<double>(ceil_div(steps, split)) * step + ends);
}

int groups_of(const W4TilesKernel& kernel) { return kernel.groups; }
int groups_of(const W4Float8Kernel&) { return 1; }

template <typename KernelOf>
int shared_bytes(const KernelOf& kernel, const W4LinearCall& call, int split) {
  const bool parts = split > 1 || call.activation != W4Activation::kNone;
  return std::max(kernel.stages * w4_stage_bytes(kernel.tokens, call.x_scale != nullptr ? 1 : 2),
                  w4_result_bytes(kernel.tokens, groups_of(kernel), split, parts));
}

// A kernel for tiles, and how many blocks split K.
template <typename KernelOf>
struct TilesChoice {
  const KernelOf* kernel = nullptr;
  int64_t tiles = 0;
  int split = 1;     // shares of K
  int64_t tail = 0;  // the last tiles, where those are split apart
  int tail_split = 1;
};

// The fastest by the estimate among those that fit(kernel), or those `asked` for.
template <typename KernelOf, typename Fits>
TilesChoice<KernelOf> fastest(const KernelTable<KernelOf>& kernels,
                              const std::optional<W4TilesConfig>& asked, const Problem& problem,
                              int64_t steps, const Fits& fits) {
  TilesChoice<KernelOf> choice;
  double least = std::numeric_limits<double>::infinity();
  const bool given = asked.has_value();
  const auto consider = [&](double time, const TilesChoice<KernelOf>& other) {
    if (time < least) least = time, choice = other;
  };
  for (const KernelOf& one : kernels) {
    if (!fits(one)) continue;
    if (given && (asked->tokens != one.tokens || asked->rows != kW4Rows)) continue;
    const int64_t tiles =
        ceil_div(problem.tokens, one.tokens) * ceil_div(problem.features, kW4Rows);
    const int64_t whole = tiles / (kPlaces[1] * one.together) * kPlaces[1] * one.together;
    const int64_t tail = tiles - whole;
    const auto time = [&](int64_t count, int split) {
      return estimate(time_of(one), one.together, count, steps, split);
    };
    for (int split = 1; split <= kMaxSplit; ++split) {
      const bool alike = given ? asked->cluster == split && asked->tail_cluster == 0
                               : split <= std::max(int64_t{1}, steps);
      if (alike) consider(time(tiles, split), {&one, tiles, split});
      const bool apart =
          given ? asked->cluster == 1 && asked->tail_cluster == split : split > 1 && split <= steps;
      if (!apart || whole == 0 || tail == 0 || tail * split > kPlaces[split]) continue;
      consider(time(whole, 1) + time(tail, split), {&one, tiles, 1, tail, split});
    }
  }
  return choice;
}

// Puts the choice and what both kernels have in common into the launch.
template <typename KernelOf>
Status set_up(const TilesChoice<KernelOf>& choice, const W4LinearCall& call, const Problem& problem,
              TilesLaunch* launch) {
  if (choice.kernel == nullptr || choice.tiles > 0x7fffffff / kMaxSplit) {
    return Status::Unimplemented(std::string(call.op) + ": there is no such kernel");
  }
  const KernelOf& chosen = *choice.kernel;
  W4TilesArgs& args = launch->args.tile;
  args.scales = problem.scales;
  args.epilogue = problem.epilogue;
  args.out = static_cast<uint16_t*>(call.out->data);
  args.tokens = static_cast<int>(problem.tokens);
  args.features = static_cast<int>(problem.features);
  args.k = static_cast<int>(problem.k);
  args.token_tiles = static_cast<int>(ceil_div(problem.tokens, chosen.tokens));
  args.steps = static_cast<int>(ceil_div(problem.k, kW4Step));
  launch->kernel = &chosen.kernel;
  launch->tokens = chosen.tokens;
  const auto configure = [&](int64_t tiles, int split) {
    LaunchConfig config;
    config.grid.x = static_cast<uint32_t>(tiles * split);
    config.block.x = static_cast<uint32_t>(w4_threads(chosen.together, groups_of(chosen)));
    config.cluster.x = static_cast<uint32_t>(split);
    config.dependent = true;
    config.dynamic_smem = static_cast<uint32_t>(shared_bytes(chosen, call, split));
    return config;
  };
  launch->config = configure(choice.tiles - choice.tail, choice.split);
  launch->tail = static_cast<int>(choice.tail);
  launch->tail_config = configure(choice.tail, choice.tail_split);
  return Status();
}

Status choose_tiles(const W4LinearCall& call, const Problem& problem, TilesLaunch* launch) {
  // Kernels count the bytes from the first row of scales to another in 32 bits.
  const int64_t scale_row = std::max(problem.scales.scale_row, problem.scales.zero_row);
  const int64_t most = std::numeric_limits<uint32_t>::max();
  if (problem.features > 1 && scale_row > most / (problem.features - 1)) {
    return Status::Unimplemented(
        std::string(call.op) +
        ": `scale` must have rows within 4 GiB for the precompiled kernels, got strides " +
        shape_text(call.scale->strides, 2));
  }
  const int64_t steps = ceil_div(problem.k, kW4Step);
  std::optional<W4TilesConfig> asked = call.tiles;
  if (batch_invariant()) asked = {kInvariantTokens, kW4Rows, 1, 0};
  if (call.x_scale != nullptr) {
    launch->float8 = true;
    launch->args.x_scale = static_cast<const float*>(call.x_scale->data);
    int64_t count = 1;
    for (int i = 0; i < call.x_scale->ndim; ++i) count *= call.x_scale->shape[i];
    launch->args.x_scale_step = count == 1 ? 0 : 1;
    launch->args.float16_scales = call.scale->dtype == DType::kFloat16;
    const bool floats = call.format == W4Format::kMxfp4;
    const int group = floats || problem.scales.group_shift == 7 ? 128 : 32;
    const auto fits = [&](const W4Float8Kernel& one) {
      return one.floats == floats && one.group == group;
    };
    return set_up(fastest(KernelTable(w4_float8_kernels), asked, problem, steps, fits), call,
                  problem, launch);
  }
  const auto fits = [&](const W4TilesKernel& one) {
    return one.floats == (call.format != W4Format::kInt4) &&
           one.bfloat16 == (call.x->dtype == DType::kBFloat16);
  };
  return set_up(fastest(KernelTable(w4_tiles_kernels), asked, problem, steps, fits), call, problem,
                launch);
}

Status encode_tiles(const W4LinearCall& call, TilesLaunch* launch) {
  W4TilesArgs& args = launch->args.tile;
  if (args.k == 0) return Status();
  constexpr CUtensorMapL2promotion kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const auto tokens = static_cast<uint32_t>(launch->tokens);
  const uint32_t values = launch->float8 ? kW4Step : kW4Step / 2;  // 128 bytes
  TIERCEL_RETURN_IF_ERROR(
      encode_tensor_map({2, {kW4Rows, kW4Step / 2}, CU_TENSOR_MAP_SWIZZLE_64B, kLines},
                        *call.weight, call.op, "weight", &args.weight_map));
  return encode_tensor_map({2, {tokens, values}, CU_TENSOR_MAP_SWIZZLE_128B, kLines}, *call.x,
                           call.op, "x", &args.x_map);
}

Status choose_few(const W4LinearCall& call, const Problem& problem, FewLaunch* launch) {
  Nvfp4LinearArgs& args = launch->args;
  args.x = static_cast<const char*>(call.x->data);
  args.x_row = call.x->strides[0] * 2;
  args.scales = problem.scales;
  args.epilogue = problem.epilogue;
  args.out = static_cast<uint16_t*>(call.out->data);
  args.tokens = static_cast<int>(problem.tokens);
  args.features = static_cast<int>(problem.features);
  args.k = static_cast<int>(problem.k);
  return nvfp4_linear_configure(
      call.op, {call.x->device_index, DType::kFloat4E2M1x2, {args.features, args.k}},
      call.config ? &*call.config : nullptr, launch);
}

// The tensor map of the weights. If K is 0, nothing is loaded.
Status encode_few(const W4LinearCall& call, FewLaunch* launch) {
  if (launch->args.k == 0) return Status();
  constexpr CUtensorMapL2promotion kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  return encode_tensor_map({2, {16, 128}, CU_TENSOR_MAP_SWIZZLE_128B, kLines}, *call.weight,
                           call.op, "weight", &launch->args.weight_map);
}

// One of both, or neither for an empty result.
struct Launch {
  FewLaunch few;
  TilesLaunch tiles;
};

Status prepare(const W4LinearCall& call, Launch* launch) {
  Problem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  if (problem.tokens == 0 || problem.features == 0) return Status();
  if (batch_invariant() && call.tiles) {
    return Status::Unimplemented(std::string(call.op) +
                                 ": `tiles` must be None in the batch-invariant mode");
  }
  // The tiles' kernels have another order of sums: in the batch-invariant mode these serve no
  // number of tokens, or all.
  const bool few = problem.tokens <= kLinearMaxTokens || batch_invariant();
  if (few && call.x->dtype == DType::kBFloat16 && !call.tiles) {
    return choose_few(call, problem, &launch->few);
  }
  return choose_tiles(call, problem, &launch->tiles);
}

}  // namespace

Status w4_linear_plan(const W4LinearCall& call, W4LinearPlan* plan) {
  Launch launch;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &launch));
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0, 0};
  if (launch.tiles.kernel != nullptr) {
    const LaunchConfig& config = launch.tiles.config;
    const auto cluster = static_cast<int>(config.cluster.x);
    const W4TilesArgs& args = launch.tiles.args.tile;
    *plan = {launch.tiles.kernel->name(),
             cluster,
             1,
             static_cast<int>(ceil_div(args.steps, cluster)),
             kW4Rows,
             launch.tiles.tokens,
             config.grid.x,
             config.block.x,
             config.dynamic_smem,
             launch.tiles.tail,
             launch.tiles.tail == 0 ? 0 : static_cast<int>(launch.tiles.tail_config.cluster.x)};
  } else if (launch.few.kernel != nullptr) {
    const LaunchConfig& config = launch.few.config;
    const Nvfp4LinearArgs& args = launch.few.args;
    *plan = {launch.few.kernel->name(),
             static_cast<int>(config.cluster.x),
             args.parts,
             args.passes * args.sections,
             args.turns * args.tiles * 16,
             std::min(args.tokens, kLinearMaxTokens),
             config.grid.x,
             config.block.x * config.block.y * config.block.z,
             config.dynamic_smem};
  }
  return Status();
}

Status w4_linear(const W4LinearCall& call, void* stream) {
  Launch launch;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &launch));
  if (launch.tiles.kernel != nullptr) {
    TIERCEL_RETURN_IF_ERROR(encode_tiles(call, &launch.tiles));
    const TilesLaunch& tiles = launch.tiles;
    W4Float8Args& args = launch.tiles.args;
    void* pointers[] = {tiles.float8 ? static_cast<void*>(&args) : &args.tile};
    Status status = tiles.kernel->launch(tiles.config, call.x->device_index, stream, pointers);
    if (!status.ok() || tiles.tail == 0) return status;
    args.tile.first_tile = static_cast<int>(tiles.config.grid.x);
    return tiles.kernel->launch(tiles.tail_config, call.x->device_index, stream, pointers);
  }
  if (launch.few.kernel == nullptr) return Status();
  TIERCEL_RETURN_IF_ERROR(encode_few(call, &launch.few));
  Nvfp4LinearArgs& args = launch.few.args;
  void* pointers[] = {&args};
  // There are more tokens than a launch takes in the batch-invariant mode only.
  for (int rest = args.tokens; rest > 0; rest -= kLinearMaxTokens) {
    args.tokens = std::min(rest, kLinearMaxTokens);
    TIERCEL_RETURN_IF_ERROR(
        launch.few.kernel->launch(launch.few.config, call.x->device_index, stream, pointers));
    args.x += kLinearMaxTokens * args.x_row;
    args.out += int64_t{kLinearMaxTokens} * args.features;
  }
  return Status();
}

Status w4_linear_load(W4Format format, int device) {
  for (int tokens : {1, 8, 16}) {
    TIERCEL_RETURN_IF_ERROR(nvfp4_linear_kernel(format, tokens, 2)->load(device));
  }
  for (const W4TilesKernel& one : KernelTable(w4_tiles_kernels)) {
    if (one.floats == (format != W4Format::kInt4)) {
      TIERCEL_RETURN_IF_ERROR(one.kernel.load(device));
    }
  }
  if (format == W4Format::kNvfp4) return Status();
  for (const W4Float8Kernel& one : KernelTable(w4_float8_kernels)) {
    if (one.floats == (format == W4Format::kMxfp4)) {
      TIERCEL_RETURN_IF_ERROR(one.kernel.load(device));
    }
  }
  return Status();
}

}  // namespace tiercel
