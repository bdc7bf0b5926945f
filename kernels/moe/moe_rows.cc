// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/moe_rows.h"

#include <algorithm>
#include <string>

#include "kernels/moe/moe_checks.h"
#include "kernels/moe/moe_rows_kernels.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "fused_moe";
constexpr int64_t kVector = 8;  // elements of 16 bits
constexpr int64_t kFewThreads = 64;

// A contiguous tensor beside `first`.
Status check_list(const Argument& argument, DType dtype, int rank, const Argument& first) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, rank));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_beside(argument, first));
  return check_contiguous(argument);
}

// A matrix of 16-bit rows that consist of whole vectors.
Status check_matrix(const Argument& argument, const Argument& places) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_beside(argument, places));
  if (argument.view.shape[1] % kVector != 0) {
    return Status::Unimplemented(
        mismatch(argument, "have a multiple of 8 columns", shape_text(argument.view.shape, 2)));
  }
  return check_rows(argument);
}

Status check_contiguous_matrix(const Argument& argument, int64_t rows, int64_t columns,
                               const Argument& like, const char* shape) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {like.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 2));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows, columns}, shape));
  TIERCEL_RETURN_IF_ERROR(check_matrix(argument, like));
  return check_contiguous(argument);
}

Status check_places(const Argument& places) {
  TIERCEL_RETURN_IF_ERROR(check_list(places, DType::kInt32, 2, places));
  if (places.view.shape[0] * places.view.shape[1] <= INT32_MAX) return Status();
  return Status::Unimplemented(std::string(kOp) + ": more rows than int32 can number, got " +
                               shape_text(places.view.shape, 2));
}

int64_t elements_of(const TensorView& places) { return places.shape[0] * places.shape[1]; }

// Threads along columns and tokens; small blocks where there are few.
Status launch_vectors(const Kernel& kernel, int64_t tokens, int64_t columns, int device,
                      void* stream, void* args) {
  if (tokens == 0 || columns == 0) return Status();
  const int64_t threads = tokens * columns >= kDefaultMultiprocessors * 4 * kMoeRowThreads
                              ? kMoeRowThreads
                              : kFewThreads;
  const int64_t parts = ceil_div(columns, threads), width = ceil_div(columns, parts);
  const int64_t height = std::max<int64_t>(threads / width, 1);
  LaunchConfig config;
  config.grid = {static_cast<uint32_t>(ceil_div(tokens, height)), static_cast<uint32_t>(parts), 1};
  config.block = {static_cast<uint32_t>(width), static_cast<uint32_t>(height), 1};
  config.dependent = true;
  if (tokens > INT32_MAX || parts > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got " +
                                 std::to_string(tokens) + " tokens");
  }
  void* pointers[] = {args};
  return kernel.launch(config, device, stream, pointers);
}

const uint32_t* numbers(const TensorView& view) { return static_cast<const uint32_t*>(view.data); }

Status gate(const MoeGateBackwardCall& call, bool backward, void* stream) {
  const char* inner_name = backward ? "grad" : "inner";
  const Argument places{kOp, "places", *call.places}, pre{kOp, "pre", *call.pre};
  const Argument inner{kOp, inner_name, *call.grad};
  TIERCEL_RETURN_IF_ERROR(check_places(places));
  TIERCEL_RETURN_IF_ERROR(check_matrix(pre, places));
  const int64_t elements = elements_of(*call.places), columns = call.pre->shape[1] / 2;
  TIERCEL_RETURN_IF_ERROR(
      check_contiguous_matrix(pre, elements, 2 * columns, pre, "[T * k, 2 * I]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous_matrix(inner, elements, columns, pre, "[T * k, I]"));
  MoeGateArgs args{};
  args.inner = static_cast<char*>(call.grad->data);
  args.pre = static_cast<const char*>(call.pre->data);
  args.places = numbers(*call.places);
  args.elements = static_cast<uint32_t>(elements);
  args.columns = static_cast<int>(columns / kVector);
  if (backward) {
    const Argument grad_pre{kOp, "grad_pre", *call.grad_pre};
    const Argument weights{kOp, "topk_weights", *call.weights};
    const Argument grad_weights{kOp, "grad_weights", *call.grad_weights};
    TIERCEL_RETURN_IF_ERROR(
        check_contiguous_matrix(grad_pre, elements, 2 * columns, pre, "[T * k, 2 * I]"));
    for (const Argument* one : {&weights, &grad_weights}) {
      TIERCEL_RETURN_IF_ERROR(check_list(*one, DType::kFloat32, 2, places));
      TIERCEL_RETURN_IF_ERROR(
          check_shape(*one, {call.places->shape[0], call.places->shape[1]}, "[T, k]"));
    }
    args.grad_pre = static_cast<char*>(call.grad_pre->data);
    args.weights = static_cast<const float*>(call.weights->data);
    args.grad_weights = static_cast<float*>(call.grad_weights->data);
  }
  if (elements == 0) return Status();
  const MoeGateKernel* kernel = KernelTable(moe_gate_kernels).find([&](const MoeGateKernel& one) {
    return one.activation == call.activation && one.dtype == call.pre->dtype &&
           one.backward == backward;
  });
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(ceil_div(elements, kMoeGateWarps));
  config.block.x = kMoeGateWarps * 32;
  config.dependent = true;
  void* pointers[] = {&args};
  return kernel->kernel.launch(config, call.pre->device_index, stream, pointers);
}

}  // namespace

Status moe_places(const MoePlacesCall& call, void* stream) {
  const Argument places{kOp, "places", *call.places};
  const Argument sorted{kOp, "sorted_token_ids", *call.sorted_token_ids};
  const Argument experts{kOp, "expert_ids", *call.expert_ids};
  const Argument offsets{kOp, "offsets", *call.offsets};
  TIERCEL_RETURN_IF_ERROR(check_places(places));
  const int64_t elements = elements_of(*call.places);
  for (const Argument* list : {&sorted, &experts}) {
    TIERCEL_RETURN_IF_ERROR(check_list(*list, DType::kInt32, 1, places));
    TIERCEL_RETURN_IF_ERROR(check_shape(*list, {elements}, "[T * k]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_list(offsets, DType::kInt32, 1, places));
  const int64_t bounds = call.offsets->shape[0];
  if (bounds == 0) return Status();
  MoePlacesArgs args{};
  args.sorted_ids = numbers(*call.sorted_token_ids);
  args.expert_ids = numbers(*call.expert_ids);
  args.places = static_cast<uint32_t*>(call.places->data);
  args.offsets = static_cast<uint32_t*>(call.offsets->data);
  args.elements = static_cast<uint32_t>(elements);
  args.experts = static_cast<uint32_t>(bounds - 1);
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(ceil_div(std::max(elements, bounds), kMoeRowThreads));
  config.block.x = kMoeRowThreads;
  config.dependent = true;
  void* pointers[] = {&args};
  return kMoePlaces.launch(config, call.offsets->device_index, stream, pointers);
}

Status moe_spread(const MoeSpreadCall& call, void* stream) {
  const Argument places{kOp, "places", *call.places}, x{kOp, "x", *call.x};
  const Argument out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_places(places));
  TIERCEL_RETURN_IF_ERROR(check_matrix(x, places));
  const int64_t tokens = call.places->shape[0], elements = elements_of(*call.places);
  TIERCEL_RETURN_IF_ERROR(check_shape(x, {tokens, call.x->shape[1]}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(
      check_contiguous_matrix(out, elements, call.x->shape[1], x, "[T * k, H]"));
  MoeSpreadArgs args{};
  args.x = static_cast<const char*>(call.x->data);
  args.places = numbers(*call.places);
  args.out = static_cast<char*>(call.out->data);
  args.row_stride = tokens > 1 ? call.x->strides[0] * dtype_bytes(call.x->dtype) : 0;
  args.tokens = tokens;
  args.elements = static_cast<uint32_t>(elements);
  args.columns = static_cast<int>(call.x->shape[1] / kVector);
  args.k = static_cast<int>(call.places->shape[1]);
  return launch_vectors(kMoeSpread, elements == 0 ? 0 : tokens, args.columns,
                        call.places->device_index, stream, &args);
}

Status moe_collect(const MoeCollectCall& call, void* stream) {
  const Argument places{kOp, "places", *call.places}, x{kOp, "x", *call.x};
  const Argument out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_places(places));
  TIERCEL_RETURN_IF_ERROR(check_matrix(x, places));
  const int64_t tokens = call.places->shape[0], elements = elements_of(*call.places);
  const int64_t columns = call.x->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_contiguous_matrix(x, elements, columns, x, "[T * k, H]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous_matrix(out, tokens, columns, x, "[T, H]"));
  MoeCollectArgs args{};
  args.x = static_cast<const char*>(call.x->data);
  args.places = numbers(*call.places);
  if (call.weights != nullptr) {
    const Argument weights{kOp, "topk_weights", *call.weights};
    TIERCEL_RETURN_IF_ERROR(check_list(weights, DType::kFloat32, 2, places));
    TIERCEL_RETURN_IF_ERROR(check_shape(weights, {tokens, call.places->shape[1]}, "[T, k]"));
    args.weights = static_cast<const float*>(call.weights->data);
  }
  args.out = static_cast<char*>(call.out->data);
  args.tokens = tokens;
  args.elements = static_cast<uint32_t>(elements);
  args.columns = static_cast<int>(columns / kVector);
  args.k = static_cast<int>(call.places->shape[1]);
  const MoeCollectKernel* kernel =
      KernelTable(moe_collect_kernels).find([&](const MoeCollectKernel& one) {
        return one.dtype == call.x->dtype;
      });
  return launch_vectors(kernel->kernel, tokens, args.columns, call.out->device_index, stream,
                        &args);
}

Status moe_gate(const MoeGateCall& call, void* stream) {
  MoeGateBackwardCall both;
  both.grad = call.inner;
  both.pre = call.pre;
  both.places = call.places;
  both.activation = call.activation;
  return gate(both, false, stream);
}

Status moe_gate_backward(const MoeGateBackwardCall& call, void* stream) {
  return gate(call, true, stream);
}

Status moe_rows_load(int device) {
  TIERCEL_RETURN_IF_ERROR(kMoePlaces.load(device));
  TIERCEL_RETURN_IF_ERROR(kMoeSpread.load(device));
  TIERCEL_RETURN_IF_ERROR(KernelTable(moe_collect_kernels).load_all(device));
  return KernelTable(moe_gate_kernels).load_all(device);
}

}  // namespace tiercel
