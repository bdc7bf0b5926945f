// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/few_tokens.h"

#include <algorithm>
#include <string>

#include "kernels/moe/few_tokens_kernels.h"
#include "kernels/moe/moe_checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "fused_moe";
// More than half of a multiprocessor's, so that two grids are never on it at the same time.
constexpr int64_t kLeastShared = 116 * 1024;
constexpr int64_t kLineBytes = 128;  // of a row of weights, per warp and step

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 128) * 128; }

struct Choice {
  const Kernel* kernel = nullptr;
  FewTokensArgs args{};
  LaunchConfig config;
};

bool has_blocks(const TensorView& scale) { return scale.ndim == 3; }

Status check_scales(const FewTokensCall& call, const Argument& x) {
  const Argument up{kOp, "w_up_scale", *call.w_up_scale};
  const Argument down{kOp, "w_down_scale", *call.w_down_scale};
  TIERCEL_RETURN_IF_ERROR(check_scale(up, x));
  TIERCEL_RETURN_IF_ERROR(check_scale(down, x));
  TIERCEL_RETURN_IF_ERROR(check_weights_scale(up, *call.w_up));
  TIERCEL_RETURN_IF_ERROR(check_weights_scale(down, *call.w_down));
  if (has_blocks(up.view) == has_blocks(down.view)) return Status();
  return Status::Unimplemented(mismatch(down, "have blocks where `w_up_scale` has",
                                        shape_text(down.view.shape, down.view.ndim)));
}

// Shapes, dtypes and devices.
Status check(const FewTokensCall& call) {
  const Argument x{kOp, "x", *call.x}, w_up{kOp, "w_up", *call.w_up};
  const Argument w_down{kOp, "w_down", *call.w_down}, ids{kOp, "topk_ids", *call.topk_ids};
  const Argument weights{kOp, "topk_weights", *call.topk_weights};
  const Argument out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(w_up, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(w_down, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(ids, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(w_up, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(w_down, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(weights, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(ids, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {x.view.dtype}));
  const int64_t tokens = x.view.shape[0], hidden = x.view.shape[1], k = ids.view.shape[1];
  const int64_t experts = w_down.view.shape[0], inner_size = w_down.view.shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(w_down, {experts, hidden, inner_size}, "[E, H, I]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(w_up, {experts, 2 * inner_size, hidden}, "[E, 2 * I, H]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(ids, {tokens, k}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(weights, {tokens, k}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {tokens, hidden}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  for (const Argument* argument : {&w_up, &w_down, &weights, &ids, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_beside(*argument, x));
  }
  for (const Argument* argument : {&weights, &ids, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_contiguous(*argument));
  }
  return check_scales(call, x);
}

// One copy loads several rows.
Status check_weights(const Argument& w) {
  const TensorView& view = w.view;
  TIERCEL_RETURN_IF_ERROR(check_rows(w));
  if (view.shape[2] == 0 || view.shape[2] % kLineBytes != 0) {
    return Status::Unimplemented(
        mismatch(w, "have a multiple of 128 columns", shape_text(view.shape, 3)));
  }
  if (view.shape[1] <= 1 || view.strides[1] == view.shape[2]) return Status();
  return Status::Unimplemented(mismatch(w, "have an expert's rows one behind the other",
                                        "strides " + shape_text(view.strides, 3)));
}

// The layout of shared memory, and how many slots fit into the rest.
Status lay_out(const Argument& w_down, bool blocks, int64_t grid, FewTokensArgs* args,
               int64_t* shared) {
  const int64_t tokens = args->tokens, elements = tokens * args->per_token;
  const int64_t hidden = args->hidden, inner = args->inner_size;
  const int64_t rows = std::max(tokens * (hidden + kFewPad), elements * (inner + kFewPad));
  const int64_t tiles = ceil_div(hidden / kFewRows, grid);  // per thread block, at most
  const int64_t down_scales = 4 * elements * tiles * (blocks ? inner / kScaleBlock : kFewRows);
  const int64_t row_scales = 4 * std::max(tokens * (blocks ? hidden / kScaleBlock : 1),
                                          elements * (blocks ? inner / kScaleBlock : 1));
  const int64_t fixed = few_tokens_fixed_shared();
  const int64_t beside =
      whole_lines(fixed) + whole_lines(rows) + whole_lines(down_scales) + whole_lines(row_scales);
  const int64_t slot = whole_lines(std::max(8 * hidden, kFewRows * inner));
  const int64_t least = 2 * kFewGroups;  // one unit per group
  const int64_t room = std::max<int64_t>(kFewMaxShared - beside, 0) / slot;
  const int64_t slots = std::min<int64_t>(room, kFewMaxSlots);
  // The first condition decides: what fits into shared memory also fits into FewGrid and a warp's
  // registers. The others make sure that it stays so.
  if (slots < least || elements * inner > kFewInner || inner > kFewInnerMost) {
    return Status::Unimplemented(mismatch(
        w_down,
        "leave room in shared memory for a single launch with " + std::to_string(elements) + " ids",
        shape_text(w_down.view.shape, 3)));
  }
  args->slots = static_cast<int>(slots);
  args->slot_bytes = static_cast<int>(slot);
  args->in_flight = static_cast<int>(std::clamp<int64_t>(kFewInFlight / slot, 2, slots));
  args->waits = elements <= kFewWaits;
  args->x_offset = static_cast<int>(slots * slot + whole_lines(fixed));
  args->down_scales_offset = static_cast<int>(args->x_offset + whole_lines(rows));
  args->row_scales_offset = static_cast<int>(args->down_scales_offset + whole_lines(down_scales));
  *shared = std::max(slots * slot + beside, kLeastShared);
  return Status();
}

// Strides of the scales: between experts, and between rows (or blocks) of weights.
void step_scales(const TensorView& scale, int* expert, int* step) {
  *expert = static_cast<int>(scale.shape[1] * (scale.ndim == 3 ? scale.shape[2] : 1));
  *step = scale.ndim == 3 ? static_cast<int>(scale.shape[2]) : scale.shape[1] != 1;
}

Status prepare(const FewTokensCall& call, int multiprocessors, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const TensorView &x = *call.x, &w_up = *call.w_up, &w_down = *call.w_down;
  const int64_t tokens = x.shape[0], hidden = x.shape[1], k = call.topk_ids->shape[1];
  if (tokens == 0 || hidden == 0) return Status();
  const Argument ids{kOp, "topk_ids", *call.topk_ids};
  if (k == 0 || tokens > kFewIds || k > kFewIds || tokens * k > kFewIds) {
    return Status::Unimplemented(
        mismatch(ids, "have 1 to " + std::to_string(kFewIds) + " elements for a single launch",
                 shape_text(ids.view.shape, 2)));
  }
  const bool blocks = has_blocks(*call.w_up_scale);
  const Argument x_arg{kOp, "x", x};
  const Argument up_arg{kOp, "w_up", w_up}, down_arg{kOp, "w_down", w_down};
  TIERCEL_RETURN_IF_ERROR(check_rows(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_weights(up_arg));
  TIERCEL_RETURN_IF_ERROR(check_weights(down_arg));
  TIERCEL_RETURN_IF_ERROR(check_rows({kOp, "out", *call.out}));
  const int64_t inner = w_down.shape[2];
  // Larger sizes do not fit anyway, and would not fit into 32 bits.
  constexpr int64_t kLargest = 1 << 17;
  if (hidden > kLargest || inner > kLargest || w_down.shape[0] > kLargest) {
    return Status::Unimplemented(
        mismatch(down_arg, "be smaller for a single launch", shape_text(w_down.shape, 3)));
  }
  FewTokensArgs& args = choice->args;
  args.x = static_cast<const char*>(x.data);
  args.w_up = static_cast<const char*>(w_up.data);
  args.w_down = static_cast<const char*>(w_down.data);
  args.up_scale = static_cast<const float*>(call.w_up_scale->data);
  args.down_scale = static_cast<const float*>(call.w_down_scale->data);
  step_scales(*call.w_up_scale, &args.up_scale_expert, &args.up_scale_step);
  step_scales(*call.w_down_scale, &args.down_scale_expert, &args.down_scale_step);
  args.ids = call.topk_ids->data;
  args.weights = static_cast<const float*>(call.topk_weights->data);
  args.y = static_cast<char*>(call.out->data);
  args.x_row = x.strides[0] * dtype_bytes(x.dtype);
  args.up_expert = w_up.strides[0] * dtype_bytes(w_up.dtype);
  args.down_expert = w_down.strides[0] * dtype_bytes(w_down.dtype);
  args.tokens = static_cast<int>(tokens);
  args.per_token = static_cast<int>(k);
  args.experts = static_cast<int>(w_up.shape[0]);
  args.hidden = static_cast<int>(hidden);
  args.inner_size = static_cast<int>(inner);
  args.id_words = call.topk_ids->dtype == DType::kInt64 ? 2 : 1;
  args.activation = static_cast<int>(call.activation);
  int64_t shared = 0;
  TIERCEL_RETURN_IF_ERROR(lay_out(down_arg, blocks, multiprocessors, &args, &shared));
  choice->kernel = &few_tokens_kernel(blocks);
  choice->config.grid.x = static_cast<uint32_t>(multiprocessors);
  choice->config.block.x = kFewThreads;
  choice->config.dynamic_smem = static_cast<uint32_t>(shared);
  choice->config.cooperative = true;
  return Status();
}

}  // namespace

Status fused_moe_few_tokens_plan(const FewTokensCall& call, int multiprocessors,
                                 FewTokensPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &choice));
  *plan = {"none", 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  *plan = {choice.kernel->name(), choice.args.slots,     choice.args.slot_bytes,
           choice.config.grid.x,  choice.config.block.x, choice.config.dynamic_smem};
  return Status();
}

Status fused_moe_few_tokens(const FewTokensCall& call, void* stream) {
  // Before the number of multiprocessors is read: this names an x that is not a CUDA tensor.
  const Argument x{kOp, "x", *call.x};
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(call.x->device_index, &multiprocessors));
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &choice));
  if (choice.kernel == nullptr) return Status();
  void* pointers[] = {&choice.args};
  return choice.kernel->launch(choice.config, call.x->device_index, stream, pointers);
}

Status fused_moe_few_tokens_load(int device) {
  TIERCEL_RETURN_IF_ERROR(few_tokens_kernel(false).load(device));
  return few_tokens_kernel(true).load(device);
}

}  // namespace tiercel
