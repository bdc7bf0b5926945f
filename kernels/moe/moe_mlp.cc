// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/moe_mlp.h"

#include <algorithm>
#include <string>

#include "kernels/moe/moe_checks.h"
#include "kernels/moe/moe_mlp_kernels.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

struct Call {
  const MoeMlpKernel* kernel = nullptr;  // null where nothing is to be done
  MoeMlpArguments arguments;
  int64_t tiles = 0;

  LaunchConfig config(int multiprocessors) const {
    const int cluster = kernel->variant.cluster;
    LaunchConfig config;
    config.grid.x =
        static_cast<uint32_t>(std::min<int64_t>(tiles, multiprocessors / cluster) * cluster);
    config.block.x = kernel->block;
    config.cluster.x = static_cast<uint32_t>(cluster);
    config.dynamic_smem = kernel->dynamic_smem;
    config.dependent = kernel->dependent;
    return config;
  }
};

// The limits of problems that the kernels route themselves.
Status check_ids_to_route(const char* op, const Argument& x, int64_t elements, int64_t experts,
                          const MoeRouting& routing, const MoeIds& ids) {
  if (routing.num_tokens_post_padded != nullptr) {
    const Argument counters{op, "num_tokens_post_padded", *routing.num_tokens_post_padded};
    TIERCEL_RETURN_IF_ERROR(check_dtype(counters, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(counters, {kMoeCounters}, "[4] without a routing"));
    TIERCEL_RETURN_IF_ERROR(check_beside(counters, x));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(counters));
  }
  if (ids.ids == nullptr || ids.experts != experts) {
    return Status::InvalidArgument(std::string(op) +
                                   ": `topk_ids` of the experts here are needed without a routing");
  }
  if (routing.block_size == 64 && elements <= kMoeRoutedIds && experts <= kMoeRoutedExperts) {
    return Status();
  }
  return Status::Unimplemented(
      std::string(op) + ": kernels route up to " + std::to_string(kMoeRoutedIds) + " ids to " +
      std::to_string(kMoeRoutedExperts) + " experts in blocks of 64, got " +
      std::to_string(elements) + " to " + std::to_string(experts) + " in blocks of " +
      std::to_string(routing.block_size));
}

// num_tokens_post_padded has counters of tiles, and of stored columns, behind the number of slots.
bool has_counters(const MoeRouting& routing) {
  const TensorView* used = routing.num_tokens_post_padded;
  if (routing.by_kernels()) return used != nullptr;
  return used != nullptr && used->ndim == 1 && routing.expert_ids->ndim == 1 &&
         used->shape[0] == moe_counters(routing.expert_ids->shape[0]);
}

Status check_routing(const char* op, const Argument& x, const MoeRouting& routing) {
  for (const TensorView* list :
       {routing.sorted_token_ids, routing.expert_ids, routing.num_tokens_post_padded}) {
    if (list == nullptr) {
      return Status::InvalidArgument(std::string(op) +
                                     ": `sorted_token_ids`, `expert_ids` and "
                                     "`num_tokens_post_padded` must be all tensors or all None");
    }
  }
  const Argument sorted{op, "sorted_token_ids", *routing.sorted_token_ids};
  const Argument experts{op, "expert_ids", *routing.expert_ids};
  const Argument used{op, "num_tokens_post_padded", *routing.num_tokens_post_padded};
  for (const Argument* argument : {&sorted, &experts, &used}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 1));
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_beside(*argument, x));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(*argument));
  }
  if (!has_counters(routing)) TIERCEL_RETURN_IF_ERROR(check_shape(used, {1}, "[1]"));
  const int64_t block = routing.block_size;
  if (block != 64 && block != 128) {
    return Status::Unimplemented(std::string(op) +
                                 ": `block_size` must be 64 or 128 for the kernels, got " +
                                 std::to_string(block));
  }
  const int64_t slots = routing.sorted_token_ids->shape[0];
  return check_shape(experts, {ceil_div(slots, block)}, "[slots / block_size]");
}

const MoeMlpKernel* find(bool up, DType dtype, bool block_scaled, MoeActivation activation,
                         int64_t block, const MoeTile& tile, bool by_boxes) {
  for (const MoeMlpKernel& kernel : KernelTable(moe_mlp_kernels)) {
    const MoeMlpVariant& v = kernel.variant;
    if (v.up == up && v.dtype == dtype && v.block_scaled == block_scaled && v.tile_m == block &&
        v.tile_n == tile.tile_n && v.cluster == tile.cluster && v.by_boxes == by_boxes &&
        (!up || v.activation == activation)) {
      return &kernel;
    }
  }
  return nullptr;
}

// The tile for a problem without a tuned configuration.
MoeTile default_tile(int64_t block) { return {block == 64 ? 128 : 256, 1}; }

bool has_block_scales(const MoeScales& scales) {
  return scales.w != nullptr && scales.w->ndim == 3;
}

const void* data_of(const TensorView* view) { return view == nullptr ? nullptr : view->data; }

Status check_scales(const char* op, const Argument& x, const TensorView& w,
                    const MoeScales& scales) {
  const bool scaled = x.view.dtype == DType::kFloat8E4M3;
  if (scaled != (scales.x != nullptr) || scaled != (scales.w != nullptr)) {
    return Status::InvalidArgument(std::string(op) + ": `x_scale` and `w_scale` are of float8 `x`" +
                                   (scaled ? ", which needs both" : " alone"));
  }
  if (!scaled) return Status();
  const Argument x_scale{op, "x_scale", *scales.x};
  const Argument w_scale{op, "w_scale", *scales.w};
  TIERCEL_RETURN_IF_ERROR(check_scale(x_scale, x));
  TIERCEL_RETURN_IF_ERROR(check_scale(w_scale, x));
  if (has_block_scales(scales)) {
    const int64_t groups = ceil_div(w.shape[2], kScaleBlock);
    TIERCEL_RETURN_IF_ERROR(
        check_shape(x_scale, {x.view.shape[0], groups}, "[rows of x, columns / 128]"));
    return check_weights_scale(w_scale, w);
  }
  TIERCEL_RETURN_IF_ERROR(check_rank(x_scale, 1));
  if (scales.x->shape[0] != 1) {
    TIERCEL_RETURN_IF_ERROR(check_shape(x_scale, {x.view.shape[0]}, "[rows of x]"));
  }
  return check_weights_scale(w_scale, w);
}

Status check_out_scale(const char* op, bool up, const Argument& x, const MoeRouting& routing,
                       const MoeScales& scales, const TensorView& out) {
  if (scales.out == nullptr) return Status();
  if (!up || !has_block_scales(scales) || routing.block_size != 128) {
    return Status::InvalidArgument(std::string(op) +
                                   ": `out_scale` is of moe_up with scales of blocks and "
                                   "`block_size` 128");
  }
  const Argument out_scale{op, "out_scale", *scales.out};
  TIERCEL_RETURN_IF_ERROR(check_scale(out_scale, x));
  return check_shape(out_scale, {out.shape[0], ceil_div(out.shape[1], kScaleBlock)},
                     "[rows of out, I / 128]");
}

Status prepare(bool up, const MoeMlpCall& of, Call* call) {
  const TensorView &x = *of.x, &w = *of.w, &out = *of.out;
  const TensorView* weights = up ? nullptr : of.weights;
  const MoeScales& scales = of.scales;
  const MoeRouting& routing = of.routing;
  const MoeIds& ids = of.ids;
  const MoeActivation activation = up ? of.activation : MoeActivation::kSilu;
  const MoeTile& tile = of.tile;
  const char* op = up ? "moe_up" : "moe_down";
  const Argument x_arg{op, "x", x};
  const Argument w_arg{op, up ? "w_up" : "w_down", w};
  const Argument out_arg{op, "out", out};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(w_arg, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(out_arg, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(x_arg, {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(w_arg, {x.dtype}));
  const bool scaled = x.dtype == DType::kFloat8E4M3;
  const DType of_result = scaled ? DType::kBFloat16 : x.dtype;
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(out_arg, {scales.out != nullptr ? DType::kFloat8E4M3 : of_result}));
  const int64_t experts = w.shape[0], k = x.shape[1];
  const int64_t rows = out.shape[1];
  // The rows between the halves may be in the routing's order (see moe_mlp.h).
  const int64_t listed = routing.by_kernels() || routing.sorted_token_ids == nullptr
                             ? -1
                             : routing.sorted_token_ids->shape[0];
  const bool to_slots = up && ids.ids != nullptr && ids.ids->ndim == 2 && out.shape[0] == listed;
  const bool by_boxes = !up && x.shape[0] != out.shape[0] && x.shape[0] == listed;
  const int64_t elements = to_slots ? ids.ids->shape[0] * ids.ids->shape[1] : out.shape[0];
  if (up) {
    TIERCEL_RETURN_IF_ERROR(check_shape(w_arg, {experts, 2 * rows, k}, "[E, 2 * I, H]"));
    const bool whole = x.shape[0] == 0 ? elements == 0 : elements % x.shape[0] == 0;
    if (!whole) {
      return Status::InvalidArgument(
          mismatch(out_arg, "have a multiple of x's " + std::to_string(x.shape[0]) + " rows",
                   shape_text(out.shape, 2)));
    }
  } else {
    TIERCEL_RETURN_IF_ERROR(check_shape(w_arg, {experts, rows, k}, "[E, H, I]"));
    if (!by_boxes) TIERCEL_RETURN_IF_ERROR(check_shape(x_arg, {elements, k}, "[T * k, I]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  for (const Argument* argument : {&w_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_beside(*argument, x_arg));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out_arg));
  TIERCEL_RETURN_IF_ERROR(check_scales(op, x_arg, w, scales));
  TIERCEL_RETURN_IF_ERROR(check_out_scale(op, up, x_arg, routing, scales, out));
  TIERCEL_RETURN_IF_ERROR(routing.by_kernels()
                              ? check_ids_to_route(op, x_arg, elements, experts, routing, ids)
                              : check_routing(op, x_arg, routing));
  if (weights != nullptr) {
    const Argument weights_arg{op, "weights", *weights};
    TIERCEL_RETURN_IF_ERROR(check_dtype(weights_arg, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(weights_arg, {elements}, "[T * k]"));
    TIERCEL_RETURN_IF_ERROR(check_beside(weights_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(weights_arg));
  }
  if (ids.ids != nullptr) {
    const Argument ids_arg{op, "topk_ids", *ids.ids};
    TIERCEL_RETURN_IF_ERROR(check_rank(ids_arg, 2));
    TIERCEL_RETURN_IF_ERROR(check_dtype(ids_arg, {DType::kInt32, DType::kInt64}));
    const bool whole = ids.ids->shape[0] * ids.ids->shape[1] == elements;
    if (!whole) {
      return Status::InvalidArgument(mismatch(ids_arg,
                                              "have " + std::to_string(elements) + " elements",
                                              shape_text(ids.ids->shape, 2)));
    }
    TIERCEL_RETURN_IF_ERROR(check_beside(ids_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(ids_arg));
  }
  // With a scale per row `up` stores rows that are still to be quantised, and counts nothing.
  const bool counts = to_slots && (!scaled || has_block_scales(scales));
  const bool flows = (counts || by_boxes) && has_counters(routing);
  const int64_t block = routing.block_size;
  const int64_t slots = routing.by_kernels()
                            ? (std::min(elements, experts) + elements / block) * block
                            : routing.sorted_token_ids->shape[0];
  if (elements == 0 || rows == 0 || slots == 0) return Status();
  const int piece = scaled ? 16 : 8;  // elements that are copied at a time
  if (k < piece || k % piece != 0 || rows % 8 != 0) {
    const std::string columns = "a multiple of " + std::to_string(piece) + " columns";
    return Status::Unimplemented(
        mismatch(w_arg, "give a multiple of 8 rows of the result and have " + columns,
                 shape_text(w.shape, 3)));
  }
  const bool block_scaled = has_block_scales(scales);
  if (block_scaled && (k % kScaleBlock != 0 || rows % kScaleBlock != 0)) {
    return Status::Unimplemented(
        mismatch(w_arg, "give a multiple of 128 rows of the result and have one of 128 columns",
                 shape_text(w.shape, 3)));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows(w_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows(out_arg));
  const MoeTile chosen = tile.tile_n != 0 ? tile : default_tile(block);
  const MoeMlpKernel* kernel = find(up, x.dtype, block_scaled, activation, block, chosen, by_boxes);
  if (kernel == nullptr) {
    return Status::Unimplemented(std::string(op) + ": the configuration block " +
                                 std::to_string(routing.block_size) + ", tile " +
                                 std::to_string(chosen.tile_n) + ", cluster " +
                                 std::to_string(chosen.cluster) + ": no precompiled kernel has it");
  }
  const int half = kernel->variant.tile_n / 2;
  const int64_t columns = ceil_div(rows, up ? half : 2 * half);
  call->tiles = ceil_div(slots / block, kernel->variant.cluster) * columns;
  const int64_t x_row = x.shape[0] > 1 ? x.strides[0] : k;  // a single row's stride is arbitrary
  const int64_t last_x = x.shape[0] * (x_row / piece);      // the kernel counts in 16 bytes
  const int64_t largest =
      std::max({2 * elements, rows, slots, k, call->tiles, last_x, w.shape[1], x_row});
  if (largest > INT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too large for one launch, got " +
                                 shape_text(out.shape, 2) + " from " + shape_text(w.shape, 3));
  }
  MoeMlpArguments& a = call->arguments;
  a.x = x.data;
  a.sorted_ids = data_of(routing.sorted_token_ids);
  a.expert_ids = data_of(routing.expert_ids);
  a.used = data_of(routing.num_tokens_post_padded);
  const auto* counters = static_cast<const int32_t*>(a.used);
  a.counter = has_counters(routing) ? counters + (up ? 1 : 2) : nullptr;
  a.progress = flows ? counters + 3 : nullptr;
  a.weights = data_of(weights);
  a.ids = data_of(ids.ids);
  a.x_scale = data_of(scales.x);
  a.w_scale = data_of(scales.w);
  a.out_scale = data_of(scales.out);
  a.out = out.data;
  a.experts = static_cast<int32_t>(experts);
  a.w_rows = static_cast<int32_t>(w.shape[1]);
  a.k = static_cast<int32_t>(k);
  a.second = static_cast<int32_t>(up ? rows : half);
  a.rows = static_cast<int32_t>(rows);
  a.elements = static_cast<int32_t>(elements);
  a.divide = up ? static_cast<int32_t>(elements / x.shape[0]) : 1;
  a.x_pieces = static_cast<int32_t>(x_row / piece);
  a.id_words = ids.ids != nullptr && ids.ids->dtype == DType::kInt64 ? 2 : 1;
  a.bound = static_cast<int32_t>(std::min<int64_t>(ids.experts, INT32_MAX));
  // For `up` of many tokens the lists come from the previous launch, which may still run.
  const bool older = block == 64 || (!up && scaled);
  a.early = ids.ids != nullptr && older && (!up || scaled);
  if (block_scaled) {
    a.x_scale_step = a.w_scale_step = static_cast<int32_t>(scales.w->shape[2]);
    a.w_scale_expert = static_cast<int32_t>(scales.w->shape[1] * scales.w->shape[2]);
  } else {
    a.x_scale_step = scaled && scales.x->shape[0] != 1;
    a.w_scale_expert = scaled ? static_cast<int32_t>(scales.w->shape[1]) : 0;
    a.w_scale_step = scaled && scales.w->shape[1] != 1;
  }
  a.x_rows = static_cast<int32_t>(x.shape[0]);
  a.to_slots = to_slots;
  a.listed = static_cast<int32_t>(slots / block);
  call->kernel = kernel;
  if (by_boxes) TIERCEL_RETURN_IF_ERROR(check_tensor_map(kernel->maps[1], x, op, "x"));
  // The map's own rules, reported before a driver is needed.
  return check_tensor_map(kernel->maps[0], w, op, up ? "w_up" : "w_down");
}

Status launch(bool up, const MoeMlpCall& of, void* stream) {
  const TensorView &x = *of.x, &w = *of.w;
  Call c;
  TIERCEL_RETURN_IF_ERROR(prepare(up, of, &c));
  if (c.kernel == nullptr) return Status();
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(x.device_index, &multiprocessors));
  const char* op = up ? "moe_up" : "moe_down";
  TIERCEL_RETURN_IF_ERROR(
      encode_tensor_map(c.kernel->maps[0], w, op, up ? "w_up" : "w_down", &c.arguments.w_map));
  if (c.kernel->variant.by_boxes) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(c.kernel->maps[1], x, op, "x", &c.arguments.x_map));
  }
  return c.kernel->launch(c.config(multiprocessors), x.device_index, stream, &c.arguments);
}

Status plan_of(bool up, const MoeMlpCall& of, int multiprocessors, MoeMlpPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare(up, of, &call));
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0};
  if (call.kernel == nullptr) return Status();
  const MoeMlpVariant& v = call.kernel->variant;
  const LaunchConfig config = call.config(multiprocessors);
  *plan = {call.kernel->kernel.name(),   v.tile_m,      v.tile_n,       v.cluster,
           static_cast<int>(call.tiles), config.grid.x, config.block.x, config.dynamic_smem};
  return Status();
}

}  // namespace

Status moe_up_plan(const MoeMlpCall& call, int multiprocessors, MoeMlpPlan* plan) {
  return plan_of(true, call, multiprocessors, plan);
}

Status moe_down_plan(const MoeMlpCall& call, int multiprocessors, MoeMlpPlan* plan) {
  return plan_of(false, call, multiprocessors, plan);
}

Status moe_up(const MoeMlpCall& call, void* stream) { return launch(true, call, stream); }

Status moe_down(const MoeMlpCall& call, void* stream) { return launch(false, call, stream); }

Status moe_mlp_load(int device) { return KernelTable(moe_mlp_kernels).load_all(device); }

}  // namespace tiercel
