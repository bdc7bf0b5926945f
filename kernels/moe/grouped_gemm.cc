// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/grouped_gemm.h"

#include <algorithm>
#include <string>

#include "kernels/moe/grouped_gemm_kernels.h"
#include "kernels/moe/moe_checks.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr int64_t kMostGroups = 512;  // as in grouped_gemm_cute.py
// Up to so many rows per group, tiles of 64 rows. Beyond, many groups have two of them, which took
// longer than one of 128 rows (H200).
constexpr int64_t kFewRows = 48;

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
  int64_t capacity = 0;  // rows of memory per group; 0: groups follow one another
};

bool is_scaled(const GroupedGemmCall& call) { return call.x_scale != nullptr; }

Status check_operand(const Argument& argument, const Argument& a, DType dtype) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, a));
  return check_cuda(argument);
}

Status check_offsets_and_out(const Argument& a, const Argument& offsets, const Argument& out) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(offsets, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_beside(offsets, a));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(offsets));
  const bool is_float8 = a.view.dtype == DType::kFloat8E4M3;
  TIERCEL_RETURN_IF_ERROR(check_operand(out, a, is_float8 ? DType::kBFloat16 : a.view.dtype));
  return check_contiguous(out);
}

Status check_sizes(const GroupedGemmCall& call, const Names& names, const Problem& p) {
  const int64_t unit = is_scaled(call) ? 16 : 8;
  if (p.n <= 0 || p.n % 8 != 0 || p.k <= 0 || p.k % unit != 0 || p.groups > kMostGroups) {
    const std::string due = unit == 8 ? "must have multiples of 8 columns"
                                      : "must have multiples of 16 columns, and `w` of 8 rows";
    return Status::Unimplemented(
        std::string(names.op) + ": `" + names.a + "` and `" + names.b + "` " + due +
        ", and there may be 512 groups, got " + shape_text(call.a->shape, call.a->ndim) + ", " +
        shape_text(call.b->shape, call.b->ndim) + " and " + std::to_string(p.groups) + " groups");
  }
  if (std::max({p.m, p.n, p.k}) > INT32_MAX - 256) {
    return Status::Unimplemented(std::string(names.op) + ": too large for one launch, got " +
                                 shape_text(call.a->shape, call.a->ndim));
  }
  return Status();
}

// Checks float8 operands with scales of blocks.
Status check_scaled(const GroupedGemmCall& call, Problem* problem) {
  const Names names = names_of(call.kind);
  const Argument a{names.op, names.a, *call.a}, b{names.op, names.b, *call.b};
  const bool masked = call.a->ndim == 3;
  const Argument offsets{names.op, masked ? "counts" : "offsets", *call.offsets};
  const Argument out{names.op, "out", *call.out};
  const Argument x_scale{names.op, "x_scale", *call.x_scale};
  const Argument w_scale{names.op, "w_scale", *call.w_scale};
  if (!masked) TIERCEL_RETURN_IF_ERROR(check_rank(a, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(a, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(a));
  TIERCEL_RETURN_IF_ERROR(check_rank(b, 3));
  TIERCEL_RETURN_IF_ERROR(check_operand(b, a, DType::kFloat8E4M3));
  TIERCEL_RETURN_IF_ERROR(check_rank(offsets, 1));
  TIERCEL_RETURN_IF_ERROR(check_offsets_and_out(a, offsets, out));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_scale, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_beside(x_scale, a));
  TIERCEL_RETURN_IF_ERROR(check_scale(w_scale, a));
  const int64_t n = call.b->shape[1], k = call.a->shape[call.a->ndim - 1];
  const int64_t blocks = ceil_div(k, kScaleBlock);
  if (masked) {
    const int64_t groups = call.a->shape[0], capacity = call.a->shape[1];
    TIERCEL_RETURN_IF_ERROR(check_shape(offsets, {groups}, "[E]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(x_scale, {groups, capacity, blocks}, "[E, C, K / 128]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(out, {groups, capacity, n}, "[E, C, N]"));
    *problem = {groups, groups * capacity, n, k, capacity};
  } else {
    const int64_t m = call.a->shape[0];
    TIERCEL_RETURN_IF_ERROR(check_shape(x_scale, {m, blocks}, "[M, K / 128]"));
    TIERCEL_RETURN_IF_ERROR(check_shape(out, {m, n}, "[M, N]"));
    *problem = {call.offsets->shape[0] - 1, m, n, k};
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(b, {problem->groups, n, k}, "[E, N, K]"));
  TIERCEL_RETURN_IF_ERROR(check_weights_scale(w_scale, *call.b));
  if (call.w_scale->ndim != 3) return check_rank(w_scale, 3);
  for (int i = 0; i < call.x_scale->ndim; ++i) {
    if (call.x_scale->shape[i] > 1 && call.x_scale->strides[i] > INT32_MAX) {
      return Status::Unimplemented(
          mismatch(x_scale, "have strides below 2^31",
                   "strides " + shape_text(call.x_scale->strides, call.x_scale->ndim)));
    }
  }
  if (masked && call.a->shape[0] > 1 &&
      call.a->strides[0] != call.a->strides[1] * problem->capacity) {
    return Status::Unimplemented(mismatch(a, "have groups one after the other",
                                          "strides " + shape_text(call.a->strides, 3)));
  }
  return check_sizes(call, names, *problem);
}

Status check(const GroupedGemmCall& call, Problem* problem) {
  if (is_scaled(call)) return check_scaled(call, problem);
  const Names names = names_of(call.kind);
  const Argument a{names.op, names.a, *call.a}, b{names.op, names.b, *call.b};
  const Argument offsets{names.op, "offsets", *call.offsets}, out{names.op, "out", *call.out};
  const bool of_weight = call.kind == GroupedKind::kGradWeight;
  TIERCEL_RETURN_IF_ERROR(check_rank(a, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(a, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(a));
  TIERCEL_RETURN_IF_ERROR(check_rank(b, of_weight ? 2 : 3));
  TIERCEL_RETURN_IF_ERROR(check_operand(b, a, a.view.dtype));
  TIERCEL_RETURN_IF_ERROR(check_rank(offsets, 1));
  TIERCEL_RETURN_IF_ERROR(check_offsets_and_out(a, offsets, out));
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
  return check_sizes(call, names, *problem);
}

// The tiles' rows, where there is a choice: of float8.
int rows_of_tiles(const GroupedGemmCall& call, const Problem& p) {
  if (!is_scaled(call)) return 128;
  const int64_t mean = p.capacity != 0 ? p.capacity : ceil_div(p.m, std::max<int64_t>(p.groups, 1));
  const int64_t expected = call.expected_rows != 0 ? call.expected_rows : mean;
  return rows_to_choose_by(expected) <= kFewRows ? 64 : 128;
}

const GroupedGemmKernel* find(GroupedKind kind, DType dtype, int tile_m) {
  for (const GroupedGemmKernel& kernel : KernelTable(grouped_gemm_kernels)) {
    const GroupedGemmVariant& v = kernel.variant;
    if (v.kind == kind && v.dtype == dtype && v.tile_m == tile_m) return &kernel;
  }
  return nullptr;
}

// a as a matrix: its groups are one after the other.
struct Rows {
  int64_t shape[2], strides[2];
  TensorView view;

  Rows(const TensorView& a, const Problem& p)
      : shape{p.m, p.k}, strides{a.strides[a.ndim - 2], a.strides[a.ndim - 1]}, view(a) {
    view.ndim = 2;
    view.shape = shape;
    view.strides = strides;
  }
  Rows(const Rows&) = delete;  // `view` points into it
  Rows& operator=(const Rows&) = delete;
};

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
  const GroupedGemmKernel* kernel = find(call.kind, call.a->dtype, rows_of_tiles(call, p));
  if (kernel == nullptr) {
    return Status::Unimplemented(std::string(names.op) + ": no precompiled kernel has this dtype");
  }
  const GroupedGemmVariant& v = kernel->variant;
  // Each group may end within a tile, and so may the rows before the first and after the last
  // group.
  int64_t rows = std::min(p.m, p.m / v.tile_m + p.groups + 2);
  if (of_weight) rows = p.groups * ceil_div(p.k, v.tile_m);
  if (p.capacity != 0) rows = p.groups * ceil_div(p.capacity, v.tile_m);
  choice->tiles = rows * ceil_div(p.n, v.tile_n);
  if (choice->tiles > INT32_MAX / 4) {
    return Status::Unimplemented(std::string(names.op) + ": too large for one launch, got " +
                                 shape_text(call.out->shape, call.out->ndim));
  }
  choice->kernel = kernel;
  // The maps' own rules, reported before a driver is needed. Without rows nothing is read.
  if (p.m == 0 || p.groups == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(
      check_tensor_map(kernel->maps[0], Rows(*call.a, p).view, names.op, names.a));
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
    const Rows rows(*call.a, p);
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[0], rows.view, names.op, names.a, &args.a_map));
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[1], *call.b, names.op, names.b, &args.b_map));
  }
  if (is_scaled(call)) {
    const TensorView& scale = *call.x_scale;
    args.x_scale = scale.data;
    args.w_scale = call.w_scale->data;
    args.capacity = static_cast<int32_t>(p.capacity);
    args.x_group = p.capacity != 0 ? static_cast<int32_t>(scale.strides[0]) : 0;
    args.x_step = static_cast<int32_t>(scale.strides[scale.ndim - 2]);
    args.x_across = static_cast<int32_t>(scale.strides[scale.ndim - 1]);
  } else {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(maps[2], *call.out, names.op, "out", &args.out_map));
  }
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
