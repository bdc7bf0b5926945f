// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/merge/merge.h"

#include <algorithm>
#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "merge_attention_states";

struct Choice {
  const MergeKernel* kernel = nullptr;
  unsigned grid = 0;
};

Status check(const MergeCall& t) {
  const Argument a{kOp, "out_a", *t.out_a};
  TIERCEL_RETURN_IF_ERROR(check_rank(a, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(a, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(a));
  const int64_t* shape = t.out_a->shape;
  for (const Argument& other : {Argument{kOp, "out_b", *t.out_b}, Argument{kOp, "out", *t.out}}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(other, {t.out_a->dtype}));
    TIERCEL_RETURN_IF_ERROR(
        check_shape(other, {shape[0], shape[1], shape[2], shape[3]}, "[B, S, H, D]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, a));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  for (const Argument& lse : {Argument{kOp, "lse_a", *t.lse_a}, Argument{kOp, "lse_b", *t.lse_b},
                              Argument{kOp, "lse", *t.lse}}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(lse, {shape[0], shape[2], shape[1]}, "[B, H, S]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(lse, a));
    TIERCEL_RETURN_IF_ERROR(check_cuda(lse));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(lse));
  }
  // Other threads of the row may still read them when one has written.
  const bool over = t.lse->data == t.lse_a->data || t.lse->data == t.lse_b->data;
  if (over && t.lse->data != nullptr) {
    return Status::InvalidArgument(
        mismatch({kOp, "lse", *t.lse}, "not be `lse_a` or `lse_b`", "the same memory"));
  }
  return Status();
}

// Alignment for 16-byte reads and writes.
Status check_layout(const Argument& argument) {
  const TensorView& view = argument.view;
  const int64_t element = dtype_bytes(view.dtype);
  bool fits = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.shape[3] * element % 16 == 0;
  for (int i = 0; i < 3; ++i) {
    if (view.shape[i] > 1) fits &= view.strides[i] * element % 16 == 0;
  }
  if (fits && (view.shape[3] == 1 || view.strides[3] == 1)) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows and strides that are multiples of 16 bytes",
               "shape " + shape_text(view.shape, 4) + ", strides " + shape_text(view.strides, 4)));
}

void set_strides(const TensorView& view, int64_t (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = view.strides[i] * dtype_bytes(view.dtype);
}

Status prepare(const MergeCall& t, MergeArgs* args, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(t));
  const int64_t* shape = t.out_a->shape;
  const int64_t rows = shape[0] * shape[1] * shape[2];
  if (rows * shape[3] == 0) return Status();
  for (const Argument& argument :
       {Argument{kOp, "out_a", *t.out_a}, Argument{kOp, "out_b", *t.out_b},
        Argument{kOp, "out", *t.out}}) {
    TIERCEL_RETURN_IF_ERROR(check_layout(argument));
  }
  args->a = static_cast<const char*>(t.out_a->data);
  args->b = static_cast<const char*>(t.out_b->data);
  args->out = static_cast<char*>(t.out->data);
  args->lse_a = static_cast<const float*>(t.lse_a->data);
  args->lse_b = static_cast<const float*>(t.lse_b->data);
  args->lse = static_cast<float*>(t.lse->data);
  set_strides(*t.out_a, args->a_strides);
  set_strides(*t.out_b, args->b_strides);
  set_strides(*t.out, args->out_strides);
  constexpr int64_t kMost = 0x7fffffff;  // of what is counted in 32 bits
  const int64_t row_vectors = shape[3] * dtype_bytes(t.out_a->dtype) / 16;
  args->row_vectors = static_cast<int>(row_vectors);
  args->vectors = rows * row_vectors;
  args->queries = static_cast<int>(shape[1]);
  args->heads = static_cast<int>(shape[2]);
  const int64_t grid = ceil_div(args->vectors, kMergeThreads);
  if (std::max({shape[1], shape[2], row_vectors, grid}) > kMost) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(shape, 4));
  }
  choice->grid = static_cast<unsigned>(grid);
  choice->kernel = KernelTable(merge_kernels).find([&](const auto& kernel) {
    return kernel.dtype == t.out_a->dtype;
  });
  return Status();
}

}  // namespace

Status merge_attention_states_plan(const MergeCall& call, MergePlan* plan) {
  MergeArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  *plan = {"none", 0, 0};
  if (choice.kernel != nullptr) *plan = {choice.kernel->kernel.name(), choice.grid, kMergeThreads};
  return Status();
}

Status merge_attention_states(const MergeCall& call, void* stream) {
  MergeArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = kMergeThreads;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.out_a->device_index, stream, pointers);
}

}  // namespace tiercel
