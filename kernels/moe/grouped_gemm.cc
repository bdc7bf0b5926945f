// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/grouped_gemm.h"

#include <algorithm>
#include <string>

#include "kernels/moe/grouped_gemm_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr int64_t kMostGroups = 512;  // as in grouped_gemm_cute.py

struct Names {
  const char *op, *a, *b;
};

Names names_of(GroupedKind kind) {
  switch (kind) {
    case GroupedKind::kGradX:
      return {"grouped_gemm_backward_x", "grad", "w"};
    case GroupedKind::kGradWeight:
      return {"grouped_gemm_backward_weight", "grad", "x"};
    default:
      return {"grouped_gemm", "x", "w"};
  }
}

// Sizes by the kernel's names: n columns of the result, a sum over k. kGradWeight: k rows of a
// group's result, a sum over its rows.
struct Problem {
  int64_t groups, m, n, k;
};

Status check_operand(const Argument& argument, const Argument& a) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {a.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, a));
  return check_cuda(argument);
}

Status check(const GroupedGemmCall& call, Problem* problem) {
  const Names names = names_of(call.kind);
  const Argument a{names.op, names.a, *call.a}, b{names.op, names.b, *call.b};
  const Argument offsets{names.op, "offsets", *call.offsets}, out{names.op, "out", *call.out};
  const bool of_weight = call.kind == GroupedKind::kGradWeight;
  TIERCEL_RETURN_IF_ERROR(check_rank(a, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(a, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(a));
  TIERCEL_RETURN_IF_ERROR(check_rank(b, of_weight ? 2 : 3));
  TIERCEL_RETURN_IF_ERROR(check_operand(b, a));
  TIERCEL_RETURN_IF_ERROR(check_rank(offsets, 1));
  TIERCEL_RETURN_IF_ERROR(check_dtype(offsets, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(offsets, a));
  TIERCEL_RETURN_IF_ERROR(check_cuda(offsets));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(offsets));
  TIERCEL_RETURN_IF_ERROR(check_operand(out, a));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  const int64_t groups = call.offsets->shape[0] - 1, m = call.a->shape[0], k = call.a->shape[1];
  int64_t n = call.b->shape[1];
  switch (call.kind) {
    case GroupedKind::kPlain:
      TIERCEL_RETURN_IF_ERROR(check_shape(b, {groups, n, k}, "[E, N, K]"));
      TIERCEL_RETURN_IF_ERROR(check_shape(out, {m, n}, "[M, N]"));
      break;
    case GroupedKind::kGradX:
      n = call.b->shape[2];
      TIERCEL_RETURN_IF_ERROR(check_shape(b, {groups, k, n}, "[E, N, K]"));
      TIERCEL_RETURN_IF_ERROR(check_shape(out, {m, n}, "[M, K]"));
      break;
    case GroupedKind::kGradWeight:
      TIERCEL_RETURN_IF_ERROR(check_shape(b, {m, n}, "[M, K]"));
      TIERCEL_RETURN_IF_ERROR(check_shape(out, {groups, k, n}, "[E, N, K]"));
  }
  *problem = {groups, m, n, k};
  if (n <= 0 || n % 8 != 0 || k <= 0 || k % 8 != 0 || groups > kMostGroups) {
    return Status::Unimplemented(
        std::string(names.op) + ": `" + names.a + "` and `" + names.b +
        "` must have multiples of 8 columns, and there may be 512 groups, got " +
        shape_text(call.a->shape, 2) + ", " + shape_text(call.b->shape, call.b->ndim) + " and " +
        std::to_string(groups) + " groups");
  }
  if (std::max({m, n, k}) > INT32_MAX - 256) {
    return Status::Unimplemented(std::string(names.op) + ": too large for one launch, got " +
                                 shape_text(call.a->shape, 2));
  }
  return Status();
}

const GroupedGemmKernel* find(GroupedKind kind, DType dtype) {
  for (const GroupedGemmKernel& kernel : KernelTable(grouped_gemm_kernels)) {
    const GroupedGemmVariant& v = kernel.variant;
    if (v.kind == kind && v.dtype == dtype) return &kernel;
  }
  return nullptr;
}

struct Choice {
  Problem problem;
  const GroupedGemmKernel* kernel = nullptr;  // null where nothing is to be done
  int64_t tiles = 0;

  LaunchConfig config(int multiprocessors) const {
    LaunchConfig config;
    config.grid.x = static_cast<uint32_t>(std::min<int64_t>(tiles, multiprocessors));
    config.block.x = kernel->block;
    config.dynamic_smem = kernel->dynamic_smem;
    config.dependent = kernel->dependent;
    return config;
  }
};

Status prepare(const GroupedGemmCall& call, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(call, &choice->problem));
  const Problem& p = choice->problem;
  const bool of_weight = call.kind == GroupedKind::kGradWeight;
  if (of_weight ? p.groups == 0 : p.m == 0) return Status();
  const Names names = names_of(call.kind);
  const GroupedGemmKernel* kernel = find(call.kind, call.a->dtype);
  if (kernel == nullptr) {
    return Status::Unimplemented(std::string(names.op) + ": no precompiled kernel has this dtype");
  }
  const GroupedGemmVariant& v = kernel->variant;
  // Each group may end within a tile, and so may the rows before the first and after the last
  // group.
  const int64_t rows =
      of_weight ? p.groups * ceil_div(p.k, v.tile_m) : std::min(p.m, p.m / v.tile_m + p.groups + 2);
  choice->tiles = rows * ceil_div(p.n, v.tile_n);
  if (choice->tiles > INT32_MAX / 4) {
    return Status::Unimplemented(std::string(names.op) + ": too large for one launch, got " +
                                 shape_text(call.out->shape, call.out->ndim));
  }
  choice->kernel = kernel;
  // The maps' own rules, reported before a driver is needed. Without rows nothing is read.
  if (p.m == 0 || p.groups == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(kernel->maps[0], *call.a, names.op, names.a));
  return check_tensor_map(kernel->maps[1], *call.b, names.op, names.b);
}

}  // namespace

Status grouped_gemm_plan(const GroupedGemmCall& call, int multiprocessors, GroupedGemmPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &choice));
  *plan = {"none", 0, 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const GroupedGemmVariant& v = choice.kernel->variant;
  const LaunchConfig config = choice.config(multiprocessors);
  *plan = {choice.kernel->kernel.name(),
           v.tile_m,
           v.tile_n,
           static_cast<int>(choice.tiles),
           config.grid.x,
           config.block.x,
           config.dynamic_smem};
  return Status();
}

Status grouped_gemm(const GroupedGemmCall& call, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &choice));
  if (choice.kernel == nullptr) return Status();
  const int device = call.a->device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Names names = names_of(call.kind);
  const Problem& p = choice.problem;
  const TensorMapSpec* maps = choice.kernel->maps;
  GroupedGemmArguments args{};
  if (p.m != 0 && p.groups != 0) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[0], *call.a, names.op, names.a, &args.a_map));
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[1], *call.b, names.op, names.b, &args.b_map));
  }
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[2], *call.out, names.op, "out", &args.out_map));
  args.offsets = call.offsets->data;
  args.out = call.out->data;
  args.groups = static_cast<int32_t>(p.groups);
  args.m = static_cast<int32_t>(p.m);
  args.n = static_cast<int32_t>(p.n);
  args.k = static_cast<int32_t>(p.k);
  args.offset_words = call.offsets->dtype == DType::kInt64 ? 2 : 1;
  return choice.kernel->launch(choice.config(multiprocessors), device, stream, &args);
}

Status grouped_gemm_load(int device) { return KernelTable(grouped_gemm_kernels).load_all(device); }

}  // namespace tiercel
