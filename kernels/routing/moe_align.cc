// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/moe_align.h"

#include <algorithm>
#include <string>

#include "kernels/routing/moe_align_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "moe_align_block_size";

std::string text(int64_t value) { return std::to_string(value); }

Status too_many(const char* op, int64_t slots) {
  return Status::InvalidArgument(std::string(op) +
                                 ": more slots than int32 can number are needed, " + text(slots));
}

// The distribution of ids over threads, for one launch.
struct Shape {
  unsigned threads;
  unsigned items;
  unsigned cluster;
};

// The numbers of ids and slots (all are written) up to which a shape is fastest; measured.
struct Choice {
  int64_t max_ids;
  int64_t max_slots;
  Shape shape;
};

constexpr Choice kChoices[] = {
    {256, 1 << 14, {256, 1, 1}},
    {4096, INT64_MAX, {256, 2, 8}},
    {8192, INT64_MAX, {256, 4, 8}},
    {24576, INT64_MAX, {512, 8, 8}},
};

// Threads and thread blocks of the pair of kernels for more ids, also measured. Few blocks have few
// counts to sum.
unsigned pair_threads(int64_t ids, int experts) {
  return ids <= 98304 && experts <= 128 ? 512 : 1024;
}
int64_t pair_grid(int64_t ids) {
  return ids <= 98304 ? 32 : ids <= 1 << 19 ? 66 : kDefaultMultiprocessors;
}

const Choice* choose(int64_t ids, int64_t slots) {
  for (const Choice& choice : kChoices) {
    if (ids <= choice.max_ids && slots <= choice.max_slots) return &choice;
  }
  return nullptr;
}

const Kernel* find_kernel(KernelTable<MoeAlignKernel> kernels, unsigned items, bool cluster,
                          int experts) {
  for (const MoeAlignKernel& kernel : kernels) {
    if (kernel.items == static_cast<int>(items) && kernel.cluster == cluster &&
        kernel.max_experts >= experts) {
      return &kernel.kernel;
    }
  }
  return nullptr;  // not reached: the table has all kernels of kChoices
}

Status check(const TensorView& topk_ids, const TensorView* expert_map,
             const MoeAlignOutputs& outputs, const TensorView* workspace,
             const MoeAlignOptions& options) {
  const Argument ids{kOp, "topk_ids", topk_ids};
  TIERCEL_RETURN_IF_ERROR(check_rank(ids, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(ids, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(moe_align_check(kOp, ids, topk_ids.shape[0] * topk_ids.shape[1],
                                          expert_map, outputs, options));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(ids));
  const int64_t needed =
      moe_align_workspace(topk_ids.shape[0] * topk_ids.shape[1], options.num_experts);
  if (needed == 0) return Status();
  if (workspace == nullptr) {
    return Status::InvalidArgument(std::string(kOp) + ": `workspace` must have " + text(needed) +
                                   " elements, got None");
  }
  const Argument space{kOp, "workspace", *workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(space, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(space, {needed}, "[blocks * num_experts]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(space, ids));
  return check_contiguous(space);
}

}  // namespace

int64_t moe_align_slots(int64_t numel, int64_t num_experts, int64_t block_size) {
  const int64_t slots = numel + num_experts * (block_size - 1);
  return numel < num_experts ? std::min(numel * block_size, slots) : slots;
}

int64_t moe_align_workspace(int64_t numel, int64_t num_experts) {
  return choose(numel, 0) != nullptr ? 0 : pair_grid(numel) * num_experts;
}

Status moe_align_check(const char* op, const Argument& first, int64_t numel,
                       const TensorView* expert_map, const MoeAlignOutputs& outputs,
                       const MoeAlignOptions& options) {
  if (options.block_size < 1) {
    return Status::InvalidArgument(std::string(op) + ": `block_size` must be at least 1, got " +
                                   text(options.block_size));
  }
  if (options.num_experts < 1) {
    return Status::InvalidArgument(std::string(op) + ": `num_experts` must be at least 1, got " +
                                   text(options.num_experts));
  }
  if (options.num_experts > kMoeAlignMaxExperts) {
    return Status::Unimplemented(std::string(op) + ": at most " + text(kMoeAlignMaxExperts) +
                                 " experts are supported, got " + text(options.num_experts));
  }
  const Argument sorted{op, "sorted_token_ids", *outputs.sorted_token_ids};
  const Argument experts{op, "expert_ids", *outputs.expert_ids};
  const Argument number{op, "num_tokens_post_padded", *outputs.num_tokens_post_padded};
  TIERCEL_RETURN_IF_ERROR(check_rank(sorted, 1));
  if (options.block_size > INT32_MAX ||
      moe_align_slots(numel, options.num_experts, options.block_size) > INT32_MAX ||
      outputs.sorted_token_ids->shape[0] > INT32_MAX) {
    return too_many(op, std::max(moe_align_slots(numel, options.num_experts, options.block_size),
                                 outputs.sorted_token_ids->shape[0]));
  }
  const int64_t slots = outputs.sorted_token_ids->shape[0];
  const int64_t needed = moe_align_slots(numel, options.num_experts, options.block_size);
  if (slots < needed) {
    return Status::InvalidArgument(
        mismatch(sorted, "have at least " + text(needed) + " elements", text(slots)));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(experts, {ceil_div(slots, options.block_size)},
                                      "[ceil(sorted_token_ids / block_size)]"));
  const bool counters = number.view.ndim == 1 && number.view.shape[0] == 3 + experts.view.shape[0];
  if (!counters) TIERCEL_RETURN_IF_ERROR(check_shape(number, {1}, "[1]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(first));
  for (const Argument* output : {&sorted, &experts, &number}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(*output, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_same_device(*output, first));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*output));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(*output));
  }
  if (expert_map == nullptr) return Status();
  const Argument map{op, "expert_map", *expert_map};
  TIERCEL_RETURN_IF_ERROR(check_dtype(map, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(map, {options.num_experts}, "[num_experts]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(map, first));
  TIERCEL_RETURN_IF_ERROR(check_cuda(map));
  return check_contiguous(map);
}

MoeAlignArgs moe_align_args(int64_t numel, const TensorView* expert_map,
                            const MoeAlignOutputs& outputs, const MoeAlignOptions& options) {
  MoeAlignArgs args{};
  args.expert_map = expert_map != nullptr ? static_cast<const int32_t*>(expert_map->data) : nullptr;
  args.sorted_ids = static_cast<int32_t*>(outputs.sorted_token_ids->data);
  args.expert_ids = static_cast<int32_t*>(outputs.expert_ids->data);
  args.num_padded = static_cast<int32_t*>(outputs.num_tokens_post_padded->data);
  args.numel = static_cast<uint32_t>(numel);
  args.slots = static_cast<uint32_t>(outputs.sorted_token_ids->shape[0]);
  args.blocks = static_cast<uint32_t>(outputs.expert_ids->shape[0]);
  args.block_size = static_cast<uint32_t>(options.block_size);
  args.block_shift = -1;
  if ((args.block_size & (args.block_size - 1)) == 0)
    args.block_shift = __builtin_ctz(args.block_size);
  args.experts = static_cast<int>(options.num_experts);
  args.counters = static_cast<uint32_t>(outputs.num_tokens_post_padded->shape[0] - 1);
  args.slots_head = (16 - reinterpret_cast<uintptr_t>(args.sorted_ids) % 16) % 16 / 4;
  args.map_first = expert_map != nullptr && options.ignore_invalid;
  return args;
}

namespace {

// A call's arguments and launches.
struct Call {
  MoeAlignArgs args;
  const Kernel* count = nullptr;  // launched before `kernel`, or null
  const Kernel* kernel = nullptr;
  unsigned items = 0;
  LaunchConfig config;
};

Status prepare(const TensorView& topk_ids, const TensorView* expert_map,
               const MoeAlignOutputs& outputs, const TensorView* workspace,
               const MoeAlignOptions& options, Call* call) {
  TIERCEL_RETURN_IF_ERROR(check(topk_ids, expert_map, outputs, workspace, options));
  const int64_t numel = topk_ids.shape[0] * topk_ids.shape[1];
  MoeAlignArgs& args = call->args;
  args = moe_align_args(numel, expert_map, outputs, options);
  args.ids = topk_ids.data;
  args.int64_ids = topk_ids.dtype == DType::kInt64;
  call->config.dependent = true;
  if (const Choice* choice = choose(numel, args.slots); choice != nullptr) {
    Shape shape = choice->shape;
    // One thread per expert.
    while (shape.threads < static_cast<unsigned>(args.experts)) shape.threads *= 2;
    const unsigned unit = 32 * shape.items;
    args.span = static_cast<uint32_t>(ceil_div(ceil_div(numel, shape.cluster), unit) * unit);
    call->kernel = find_kernel(KernelTable(moe_align_small_kernels), shape.items, shape.cluster > 1,
                               args.experts);
    call->items = shape.items;
    call->config.grid.x = shape.cluster;
    call->config.cluster.x = shape.cluster;
    call->config.block.x = shape.threads;
    call->config.dynamic_smem =
        moe_align_shared_bytes(args.experts, shape.threads / 32, shape.cluster, args.span);
    return Status();
  }
  args.counts = static_cast<uint32_t*>(workspace->data);
  const int64_t grid = pair_grid(numel);
  const unsigned threads = pair_threads(numel, args.experts);
  args.span = static_cast<uint32_t>(ceil_div(ceil_div(numel, grid), 32) * 32);
  call->count = &moe_align_count_kernel();
  call->kernel =
      find_kernel(KernelTable(moe_align_store_kernels), kMoeAlignStoreItems, false, args.experts);
  call->items = kMoeAlignStoreItems;
  call->config.grid.x = static_cast<uint32_t>(grid);
  call->config.block.x = threads;
  call->config.dynamic_smem =
      moe_align_shared_bytes(args.experts, threads / 32, 0, threads * kMoeAlignStoreItems);
  return Status();
}

}  // namespace

Status moe_align_plan(const MoeAlignCall& of, MoeAlignPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(
      prepare(*of.topk_ids, of.expert_map, of.outputs, of.workspace, of.options, &call));
  *plan = {call.kernel->name(),
           call.items,
           call.config.cluster.x,
           call.config.grid.x,
           call.config.block.x,
           call.config.dynamic_smem,
           call.count != nullptr ? 2u : 1u};
  return Status();
}

Status moe_align(const MoeAlignCall& of, void* stream) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(
      prepare(*of.topk_ids, of.expert_map, of.outputs, of.workspace, of.options, &call));
  void* pointers[] = {&call.args};
  if (call.count != nullptr) {
    LaunchConfig config = call.config;
    config.dynamic_smem = 4 * (call.args.experts + 1);
    TIERCEL_RETURN_IF_ERROR(
        call.count->launch(config, of.topk_ids->device_index, stream, pointers));
  }
  return call.kernel->launch(call.config, of.topk_ids->device_index, stream, pointers);
}

}  // namespace tiercel
