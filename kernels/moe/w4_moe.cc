// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/w4_moe.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/moe/moe_checks.h"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

constexpr int64_t kDirectIds = 16;        // without lists
constexpr int kDirectTokens = 8;          // of their blocks
constexpr int kTogether = 3;              // blocks of few tokens that share a multiprocessor
constexpr int kPlaces = kTogether * 132;  // of them, on an H100 or H200
constexpr int kPartSteps = 4;             // of K, at least, for each part
constexpr int kMultiprocessorShared = 228 * 1024;
constexpr int kBlockShared = 2048;  // of it, a block takes beside its dynamic memory

struct Launch {
  W4MoeFloat8Args args{};  // of which kernels for 16 bits take `moe`
  bool float8 = false;
  const W4MoeKernel* kernel = nullptr;  // null where nothing is to be done
  int64_t blocks = 0;
  int64_t dynamic_smem = 0;
  int64_t parts = 1;  // of K, the blocks of a cluster
  int64_t map_shape[kTensorMapMaxRank] = {};
  int64_t map_strides[kTensorMapMaxRank] = {};

  LaunchConfig config() const {
    LaunchConfig config;
    config.grid.x = static_cast<uint32_t>(blocks * args.moe.row_tiles * parts);
    config.cluster.x = static_cast<uint32_t>(parts);
    config.block.x = static_cast<uint32_t>(float8 ? w4_moe_float8_threads(kernel->together)
                                                  : w4_moe_threads(kernel->rows));
    config.dynamic_smem = static_cast<uint32_t>(dynamic_smem);
    config.dependent = true;
    return config;
  }
};

const char* name_of(bool down) { return down ? "w4_moe_down" : "w4_moe_up"; }

Status check_beside_contiguous(const Argument& argument, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_beside(argument, x));
  return check_contiguous(argument);
}

// Copies by TMA begin at multiples of 16 bytes.
Status check_start(const Argument& argument) {
  if (reinterpret_cast<uintptr_t>(argument.view.data) % 16 == 0) return Status();
  return Status::Unimplemented(mismatch(argument, "start at a multiple of 16 bytes", "another"));
}

// e4m3 values of x, and their scale.
Status check_float8(const char* op, const W4MoeCall& call, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kFloat8E4M3}));
  if (call.format == W4Format::kNvfp4) {
    return Status::InvalidArgument(
        std::string(op) + ": `format` must be mxfp4 or int4 where `x` is float8_e4m3fn, got nvfp4");
  }
  const Argument scale{op, "x_scale", *call.x_scale};
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(scale, x));
  int64_t count = 1;
  for (int i = 0; i < scale.view.ndim; ++i) count *= scale.view.shape[i];
  if (count == 1 || count == x.view.shape[0]) return Status();
  return Status::InvalidArgument(mismatch(
      scale, "have one element or one for each row of `x`, " + std::to_string(x.view.shape[0]),
      "shape " + shape_text(scale.view.shape, scale.view.ndim)));
}

// `half`: the dtype of int4's scales and zero points.
Status check_weight_scale(const char* op, const W4MoeCall& call, const Argument& x, DType half,
                          int64_t experts, int64_t rows, int64_t k, W4Scales* scales) {
  const Argument scale{op, "scale", *call.scale};
  TIERCEL_RETURN_IF_ERROR(check_rank(scale, 3));
  scales->format = call.format;
  scales->scale = static_cast<const char*>(call.scale->data);
  scales->scale_row = call.scale->shape[2] * dtype_bytes(call.scale->dtype);
  const bool int4 = call.format == W4Format::kInt4;
  if (int4) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {half}));
    scales->group_shift = 0;
    for (int shift : {5, 6, 7}) {
      if (call.scale->shape[2] << shift == k) scales->group_shift = shift;
    }
    if (scales->group_shift == 0 || call.scale->shape[0] != experts ||
        call.scale->shape[1] != rows) {
      return Status::InvalidArgument(
          mismatch(scale, "have shape [E, N, K / group] with a group of 32, 64 or 128",
                   shape_text(call.scale->shape, 3)));
    }
  } else {
    const bool mxfp4 = call.format == W4Format::kMxfp4;
    scales->group_shift = mxfp4 ? 5 : 4;
    TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {mxfp4 ? DType::kUInt8 : DType::kFloat8E4M3}));
    TIERCEL_RETURN_IF_ERROR(check_shape(scale, {experts, rows, k >> scales->group_shift},
                                        mxfp4 ? "[E, N, K / 32]" : "[E, N, K / 16]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(scale, x));
  TIERCEL_RETURN_IF_ERROR(check_start(scale));
  if (call.zero_point == nullptr) return Status();
  if (!int4) {
    return Status::InvalidArgument(std::string(op) + ": `zero_point` is for int4 only");
  }
  const Argument zero{op, "zero_point", *call.zero_point};
  TIERCEL_RETURN_IF_ERROR(check_dtype(zero, {half}));
  TIERCEL_RETURN_IF_ERROR(check_shape(zero, {experts, rows, call.scale->shape[2]}, "as `scale`"));
  TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(zero, x));
  TIERCEL_RETURN_IF_ERROR(check_start(zero));
  scales->zero = static_cast<const char*>(call.zero_point->data);
  scales->zero_row = scales->scale_row;
  return Status();
}

// Checks the lists, or that there are none; gives the tokens of a block and the number of blocks.
Status check_routing(const char* op, const W4MoeCall& call, const Argument& x, int64_t elements,
                     int64_t* block_tokens, int64_t* blocks) {
  const TensorView* lists[] = {call.sorted_token_ids, call.expert_ids, call.num_tokens_post_padded};
  const auto given = [](const TensorView* list) { return list != nullptr; };
  if (std::none_of(std::begin(lists), std::end(lists), given)) {
    *block_tokens = kDirectTokens;
    *blocks = elements;
    if (elements <= kDirectIds) return Status();
    return Status::Unimplemented(std::string(op) + ": without a routing there are up to " +
                                 std::to_string(kDirectIds) + " ids, got " +
                                 std::to_string(elements));
  }
  if (!std::all_of(std::begin(lists), std::end(lists), given)) {
    return Status::InvalidArgument(std::string(op) +
                                   ": `sorted_token_ids`, `expert_ids` and "
                                   "`num_tokens_post_padded` must be all tensors or all None");
  }
  const char* names[] = {"sorted_token_ids", "expert_ids", "num_tokens_post_padded"};
  for (int i = 0; i < 3; ++i) {
    const Argument list{op, names[i], *lists[i]};
    TIERCEL_RETURN_IF_ERROR(check_rank(list, 1));
    TIERCEL_RETURN_IF_ERROR(check_dtype(list, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(list, x));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape({op, names[2], *lists[2]}, {1}, "[1]"));
  if (call.block_size < 8 || call.block_size > 128 ||
      (call.block_size & (call.block_size - 1)) != 0) {
    return Status::Unimplemented(std::string(op) +
                                 ": `block_size` must be 8, 16, 32, 64 or 128 for the kernels, "
                                 "got " +
                                 std::to_string(call.block_size));
  }
  *block_tokens = call.block_size;
  *blocks = ceil_div(lists[0]->shape[0], call.block_size);
  return check_shape({op, names[1], *lists[1]}, {*blocks}, "[slots / block_size]");
}

// The stages of a thread block of few tokens, beside the scales of its tile: as many as fit if
// three share a multiprocessor, or if fewer do.
Status plan_ring(const char* op, Launch* launch) {
  W4MoeArgs& args = launch->args.moe;
  const W4MoeKernel& kernel = *launch->kernel;
  args.stages = kernel.stages;
  args.stage_bytes = w4_moe_stage_bytes(args.block_tokens, kernel.rows);
  if (launch->float8) args.stage_bytes = w4_moe_float8_stage_bytes(kernel.tokens);
  launch->dynamic_smem = static_cast<int64_t>(args.stages) * args.stage_bytes;
  if (launch->float8 || kernel.tokens != kW4MoeFewTokens) return Status();
  // Scales behind the end of a row are read, though not used.
  const int64_t scales =
      kernel.rows * args.scales.scale_row * (args.scales.zero == nullptr ? 1 : 2) + 16;
  for (int together = kTogether; together > 0; --together) {
    const int64_t shared =
        std::min(kW4MoeMostShared, kMultiprocessorShared / together - kBlockShared);
    const int64_t stages = (shared - scales) / args.stage_bytes / 2 * 2;
    if (stages < 4) continue;
    args.stages = static_cast<int>(std::min<int64_t>(stages, kernel.stages));
    launch->dynamic_smem = static_cast<int64_t>(args.stages) * args.stage_bytes + scales;
    return Status();
  }
  return Status::Unimplemented(
      std::string(op) + ": the scales of " + std::to_string(kernel.rows) +
      " rows of `weight` do not fit shared memory, got K = " + std::to_string(args.k));
}

Status prepare(bool down, const W4MoeCall& call, Launch* launch) {
  const char* op = name_of(down);
  const TensorView &x = *call.x, &weight = *call.weight, &ids = *call.ids, &out = *call.out;
  const Argument x_arg{op, "x", x};
  const Argument weight_arg{op, "weight", weight};
  const Argument ids_arg{op, "ids", ids};
  const Argument out_arg{op, "out", out};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(weight_arg, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(ids_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(out_arg, 2));
  const bool float8 = launch->float8 = call.x_scale != nullptr;
  if (float8) {
    TIERCEL_RETURN_IF_ERROR(check_float8(op, call, x_arg));
  } else {
    TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kBFloat16, DType::kFloat16}));
  }
  const DType half = float8 ? DType::kBFloat16 : x.dtype;
  TIERCEL_RETURN_IF_ERROR(check_dtype(weight_arg, {DType::kUInt8, DType::kFloat4E2M1x2}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(ids_arg, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {half}));
  const int64_t elements = ids.shape[0] * ids.shape[1], k = x.shape[1];
  const int64_t experts = weight.shape[0], rows = weight.shape[1];
  const bool gated = !down && call.activation != W4MoeActivation::kReluSquared;
  const int64_t features = gated ? rows / 2 : rows;
  TIERCEL_RETURN_IF_ERROR(
      check_shape(x_arg, {down ? elements : ids.shape[0], k}, down ? "[T * k, K]" : "[T, K]"));
  if (k % 64 != 0 || rows % (gated ? 128 : 64) != 0) {
    return Status::Unimplemented(mismatch(weight_arg,
                                          "have multiples of 64 features and of 64 values a row",
                                          shape_text(weight.shape, 3) + " of bytes"));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(weight_arg, {experts, rows, k / 2}, "[E, N, K / 2]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {elements, features}, "[T * k, features]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_beside(weight_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(ids_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(out_arg, x_arg));
  W4MoeArgs& args = launch->args.moe;
  TIERCEL_RETURN_IF_ERROR(
      check_weight_scale(op, call, x_arg, half, experts, rows, k, &args.scales));
  if (call.global_scale != nullptr) {
    const Argument global{op, "global_scale", *call.global_scale};
    TIERCEL_RETURN_IF_ERROR(check_dtype(global, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(global, {experts}, "[E]"));
    TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(global, x_arg));
    args.global_scale = static_cast<const float*>(call.global_scale->data);
  }
  if (call.bias != nullptr) {
    const Argument bias{op, "bias", *call.bias};
    TIERCEL_RETURN_IF_ERROR(check_dtype(bias, {half}));
    TIERCEL_RETURN_IF_ERROR(check_shape(bias, {experts, rows}, "[E, N]"));
    TIERCEL_RETURN_IF_ERROR(check_beside_contiguous(bias, x_arg));
    args.bias = static_cast<const uint16_t*>(call.bias->data);
  }
  if (!(call.alpha >= 0) || !(call.limit >= 0)) {
    return Status::InvalidArgument(std::string(op) + ": `alpha` and `limit` must be at least 0");
  }
  int64_t tokens = 0;
  TIERCEL_RETURN_IF_ERROR(check_routing(op, call, x_arg, elements, &tokens, &launch->blocks));
  if (call.format == W4Format::kMxfp4 && half == DType::kFloat16) {
    return Status::Unimplemented(std::string(op) +
                                 ": MXFP4's scales need the range of bfloat16, got float16");
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows(weight_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows(out_arg));
  if (elements == 0 || features == 0 || launch->blocks == 0) return Status();
  if (experts == 0 || k == 0) {
    return Status::Unimplemented(mismatch(weight_arg, "not be empty", shape_text(weight.shape, 3)));
  }
  const bool floats = call.format != W4Format::kInt4;
  if (float8) {
    const int64_t most = tokens <= kW4MoeFloat8Tokens ? kW4MoeFloat8Tokens : 128;
    const int group = floats || args.scales.group_shift == 7 ? 128 : 32;
    launch->kernel = KernelTable(w4_moe_float8_kernels).find([&](const W4MoeKernel& one) {
      return one.tokens == most && one.floats == floats && one.group == group;
    });
  } else {
    launch->kernel = KernelTable(w4_moe_kernels).find([&](const W4MoeKernel& one) {
      return one.tokens == std::max<int64_t>(tokens, kW4MoeFewTokens) && one.floats == floats &&
             one.bfloat16 == (x.dtype == DType::kBFloat16);
    });
  }
  if (launch->kernel == nullptr) {
    return Status::Unimplemented(std::string(op) +
                                 ": `block_size` 64 is for bfloat16 and weights of e2m1");
  }
  const int64_t tiles = ceil_div(rows, launch->kernel->rows);
  // Kernels count rows of x by 16 bytes, those for e4m3 an expert's scales by bytes. A single row's
  // stride is arbitrary.
  const int64_t x_row = (x.shape[0] > 1 ? x.strides[0] : k) * dtype_bytes(x.dtype);
  const int64_t scale_bytes = float8 ? rows * args.scales.scale_row : 0;
  if (std::max({launch->blocks * tiles, launch->blocks * tokens, 2 * elements, experts * 2 * rows,
                k, x.shape[0] * x_row / 16, scale_bytes}) > std::numeric_limits<int32_t>::max()) {
    return Status::Unimplemented(std::string(op) + ": too large for one launch, got " +
                                 shape_text(out.shape, 2) + " from " + shape_text(weight.shape, 3));
  }
  args.x = static_cast<const char*>(x.data);
  args.x_row = x_row;
  args.out = static_cast<uint16_t*>(out.data);
  if (float8) {
    launch->args.x_scale = static_cast<const float*>(call.x_scale->data);
    int64_t count = 1;
    for (int i = 0; i < call.x_scale->ndim; ++i) count *= call.x_scale->shape[i];
    launch->args.x_scale_step = count == 1 ? 0 : 1;
  }
  if (call.sorted_token_ids != nullptr) {
    args.slots = static_cast<const int32_t*>(call.sorted_token_ids->data);
    args.expert_ids = static_cast<const int32_t*>(call.expert_ids->data);
    args.used = static_cast<const int32_t*>(call.num_tokens_post_padded->data);
    args.slot_count = static_cast<int>(call.sorted_token_ids->shape[0]);
  }
  args.ids = ids.data;
  args.wide_ids = ids.dtype == DType::kInt64;
  args.bound = static_cast<int>(
      std::clamp<int64_t>(call.global_experts, 0, std::numeric_limits<int32_t>::max()));
  args.elements = static_cast<int>(elements);
  args.divide = down ? 1 : static_cast<int>(ids.shape[1]);
  args.experts = static_cast<int>(experts);
  args.weight_rows = static_cast<int>(rows);
  if (!gated) {
    args.rows = {16, 8, 1};
  } else if (call.interleaved) {
    args.rows = {16, 1, 2};
  } else {
    args.rows = {8, static_cast<int>(features), 1};
  }
  args.features = static_cast<int>(features);
  args.k = static_cast<int>(k);
  args.steps = static_cast<int>(ceil_div(k, kW4MoeStep));
  args.row_tiles = static_cast<int>(tiles);
  args.block_tokens = static_cast<int>(tokens);
  TIERCEL_RETURN_IF_ERROR(plan_ring(op, launch));
  // The blocks of a cluster divide K if there are fewer tiles than places. That changes the order
  // of sums, so the batch-invariant mode does without.
  const int64_t tiles_in_use = launch->blocks * tiles;
  if (args.slots == nullptr && !float8 && !batch_invariant()) {
    while (launch->parts < 4 && 2 * launch->parts * tiles_in_use <= kPlaces &&
           args.steps >= 2 * launch->parts * kPartSteps) {
      launch->parts *= 2;
    }
  }
  args.part_steps = static_cast<int>(ceil_div(args.steps, launch->parts));
  args.activation = call.activation;
  args.alpha = call.alpha;
  args.limit = call.limit > 0 ? call.limit : std::numeric_limits<float>::infinity();
  args.gated = gated;
  args.down = down;
  const int64_t row = weight.strides[1];
  const int64_t shape[] = {experts, rows / 16, 2, 8, k / 2};
  const int64_t strides[] = {experts > 1 ? weight.strides[0] : rows * row, row * args.rows.group,
                             row * args.rows.half, row * args.rows.next, 1};
  std::copy(std::begin(shape), std::end(shape), launch->map_shape);
  std::copy(std::begin(strides), std::end(strides), launch->map_strides);
  return Status();
}

Status plan_of(bool down, const W4MoeCall& call, W4MoePlan* plan) {
  Launch launch;
  TIERCEL_RETURN_IF_ERROR(prepare(down, call, &launch));
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0};
  if (launch.kernel == nullptr) return Status();
  const LaunchConfig config = launch.config();
  *plan = {launch.kernel->kernel.name(),
           launch.args.moe.block_tokens,
           launch.kernel->rows,
           static_cast<int>(launch.blocks),
           static_cast<int>(launch.parts),
           config.grid.x,
           config.block.x,
           config.dynamic_smem};
  return Status();
}

Status run(bool down, const W4MoeCall& call, void* stream) {
  Launch launch;
  TIERCEL_RETURN_IF_ERROR(prepare(down, call, &launch));
  if (launch.kernel == nullptr) return Status();
  TensorView groups = *call.weight;
  groups.ndim = kTensorMapMaxRank;
  groups.shape = launch.map_shape;
  groups.strides = launch.map_strides;
  const auto box_groups = static_cast<uint32_t>(launch.kernel->rows / 16);
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map({kTensorMapMaxRank,
                                             {1, box_groups, 2, 8, kW4MoeStep / 2},
                                             CU_TENSOR_MAP_SWIZZLE_64B,
                                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
                                            groups, name_of(down), "weight",
                                            &launch.args.moe.weight_map));
  void* pointers[] = {launch.float8 ? static_cast<void*>(&launch.args) : &launch.args.moe};
  return launch.kernel->kernel.launch(launch.config(), call.x->device_index, stream, pointers);
}

}  // namespace

Status w4_moe_up_plan(const W4MoeCall& call, W4MoePlan* plan) { return plan_of(false, call, plan); }

Status w4_moe_down_plan(const W4MoeCall& call, W4MoePlan* plan) {
  return plan_of(true, call, plan);
}

Status w4_moe_up(const W4MoeCall& call, void* stream) { return run(false, call, stream); }

Status w4_moe_down(const W4MoeCall& call, void* stream) { return run(true, call, stream); }

Status w4_moe_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(w4_moe_kernels).load_all(device));
  return KernelTable(w4_moe_float8_kernels).load_all(device);
}

}  // namespace tiercel
