// SPDX-License-Identifier: Apache-2.0
#include "kernels/activation/activation.h"

#include <initializer_list>
#include <string>

#include "kernels/activation/activation_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr const char* kNames[2][4] = {
    {"silu", "gelu", "gelu", "relu"},
    {"silu_and_mul", "gelu_and_mul", "gelu_and_mul", "relu_and_mul"},
};

Status check_on_device(const Argument& argument, const Argument& reference) {
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, reference));
  return check_cuda(argument);
}

// Checks x and up, for both directions. `columns` is the result's.
Status check_inputs(const char* op, bool gated, const TensorView& x, const TensorView* up,
                    int64_t* columns) {
  const Argument x_arg{op, "x", x};
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  *columns = last_size(x);
  if (gated && up == nullptr) {
    if (x.ndim == 0 || *columns % 2 != 0) {
      return Status::InvalidArgument(
          mismatch(x_arg, "have an even last dimension [..., 2N] where there is no `up`",
                   shape_text(x.shape, x.ndim)));
    }
    *columns /= 2;
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  if (up == nullptr) return Status();
  const Argument up_arg{op, "up", *up};
  TIERCEL_RETURN_IF_ERROR(check_dtype(up_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(up_arg, x, *columns, "that of `x`"));
  return check_on_device(up_arg, x_arg);
}

Status check_scale(const char* op, const TensorView& scale, const TensorView& x) {
  const Argument argument{op, "scale", scale};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  int64_t count = 1;
  for (int i = 0; i < scale.ndim; ++i) count *= scale.shape[i];
  if (count != 1) {
    return Status::InvalidArgument(
        mismatch(argument, "have one element", "shape " + shape_text(scale.shape, scale.ndim)));
  }
  return check_on_device(argument, {op, "x", x});
}

// One of a call's matrices and its place in the kernel's arguments.
struct Operand {
  const TensorView* view;
  ActivationRows* rows;
  int64_t offset;  // elements, from the view's start
  RowMatrix matrix;
};

// Fills in everything but the kernel. Skips operands with a null view.
template <int kCount>
Status lay_out(const char* op, int64_t columns, Operand (&operands)[kCount], DType dtype,
               bool may_shift, ActivationArgs* args, ActivationPlan* plan) {
  const int64_t element = dtype_bytes(dtype);
  int64_t rows = 1;
  bool flat = true;
  for (Operand& operand : operands) {
    if (operand.view == nullptr) continue;
    TIERCEL_RETURN_IF_ERROR(join_rows({op, "x", *operand.view}, &operand.matrix));
    rows = operand.matrix.rows;
    flat &=
        operand.matrix.columns == columns && (rows == 1 || operand.matrix.row_stride == columns);
  }
  if (flat) {
    columns *= rows;
    rows = 1;
  }
  const int64_t per_vector = kActivationVectorBytes / element;
  bool aligned = true;
  for (Operand& operand : operands) {
    if (operand.view == nullptr) continue;
    const int64_t bytes = dtype_bytes(operand.view->dtype);
    operand.rows->data = static_cast<char*>(operand.view->data) + operand.offset * bytes;
    operand.rows->row_stride = rows == 1 ? 0 : operand.matrix.row_stride * bytes;
    operand.rows->end =
        operand.rows->data + (rows - 1) * operand.rows->row_stride + columns * bytes;
    const uint64_t bits = reinterpret_cast<uintptr_t>(operand.rows->data) |
                          static_cast<uint64_t>(operand.rows->row_stride);
    aligned &= bits % static_cast<uint64_t>(per_vector * bytes) == 0;
  }
  // A row that begins inside a vector may need one vector more.
  const int64_t before = may_shift && !aligned && columns > 0 ? per_vector - 1 : 0;
  const int64_t row_vectors = ceil_div(before + columns, per_vector);
  if (rows > 0 && row_vectors > 0 && row_vectors > (INT64_C(0xfff00000)) / rows) {
    return Status::Unimplemented(std::string(op) + ": too many elements for one launch, got " +
                                 std::to_string(rows) + " rows of " + std::to_string(columns));
  }
  args->columns = columns;
  args->row_vectors = static_cast<uint32_t>(row_vectors);
  args->vectors = static_cast<uint32_t>(row_vectors * rows);
  args->row_vectors_inv =
      row_vectors <= 1 ? UINT32_MAX : static_cast<uint32_t>((uint64_t{1} << 32) / row_vectors);
  args->aligned = aligned;
  *plan = {"none", rows, columns, aligned, 0, 0};
  return Status();
}

// The kernel and its launch shape.
struct Choice {
  const ActivationKernel* kernel = nullptr;
  unsigned block = 0;
  unsigned grid = 0;
};

// Up to this many vectors, latency counts more than bandwidth.
constexpr uint32_t kFewVectors = kDefaultMultiprocessors * 2048;

Choice choose(ActivationFunction function, bool gated, bool backward, DType dtype, DType out_dtype,
              ActivationArgs* args) {
  const bool shifted = gated && !backward && !args->aligned;
  const bool few = args->vectors <= kFewVectors;
  args->vectors_per_thread = backward || shifted || few ? 1 : activation_forward_vectors(gated);
  const unsigned many = backward  ? kActivationBackwardThreads
                        : shifted ? kActivationShiftedThreads
                        : gated   ? kActivationForwardThreads
                                  : kActivationPlainThreads;
  const unsigned block = few ? kActivationFewThreads : many;
  const unsigned vectors_per_block = block * args->vectors_per_thread;
  const KernelTable kernels(backward ? activation_backward_kernels : activation_forward_kernels);
  const ActivationKernel* found = kernels.find([&](const ActivationKernel& kernel) {
    return kernel.function == function && kernel.gated == gated && kernel.dtype == dtype &&
           kernel.out_dtype == out_dtype && kernel.shifted == shifted;
  });
  return {found, block, static_cast<unsigned>(ceil_div(args->vectors, vectors_per_block))};
}

Status launch(const Choice& choice, const ActivationArgs& args, int device, void* stream) {
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = choice.block;
  config.dependent = true;
  void* pointers[] = {const_cast<ActivationArgs*>(&args)};
  return choice.kernel->kernel.launch(config, device, stream, pointers);
}

void finish_plan(const Choice& choice, const ActivationArgs& args, ActivationPlan* plan) {
  if (args.vectors == 0) return;
  plan->kernel = choice.kernel->kernel.name();
  plan->grid = choice.grid;
  plan->block = choice.block;
}

Status prepare(const ActivationCall& call, ActivationArgs* args, Choice* choice,
               ActivationPlan* plan) {
  const char* op = activation_op_name(call.function, call.gated);
  const TensorView& x = *call.x;
  const TensorView& out = *call.out;
  int64_t columns = 0;
  TIERCEL_RETURN_IF_ERROR(check_inputs(op, call.gated, x, call.up, &columns));
  const Argument out_arg{op, "out", out};
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(out_arg, {call.scale == nullptr ? x.dtype : DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(out_arg, x, columns, "[..., N]"));
  TIERCEL_RETURN_IF_ERROR(check_on_device(out_arg, {op, "x", x}));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out_arg));
  if (call.scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_scale(op, *call.scale, x));
    args->scale = static_cast<const float*>(call.scale->data);
  }
  const bool packed = call.gated && call.up == nullptr;
  Operand operands[] = {{&x, &args->x, 0, {}},
                        {packed ? &x : call.up, &args->up, packed ? columns : 0, {}},
                        {&out, &args->out, 0, {}}};
  TIERCEL_RETURN_IF_ERROR(lay_out(op, columns, operands, x.dtype, call.gated, args, plan));
  *choice = choose(call.function, call.gated, false, x.dtype, out.dtype, args);
  finish_plan(*choice, *args, plan);
  return Status();
}

Status prepare(const ActivationBackwardCall& call, ActivationArgs* args, Choice* choice,
               ActivationPlan* plan) {
  const char* op = activation_op_name(call.function, call.gated);
  const TensorView& x = *call.x;
  const Argument x_arg{op, "x", x};
  int64_t columns = 0;
  TIERCEL_RETURN_IF_ERROR(check_inputs(op, call.gated, x, call.up, &columns));
  const Argument grad_arg{op, "grad", *call.grad};
  TIERCEL_RETURN_IF_ERROR(check_dtype(grad_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(grad_arg, x, columns, "[..., N]"));
  TIERCEL_RETURN_IF_ERROR(check_on_device(grad_arg, x_arg));
  const Argument x_grad_arg{op, "x_grad", *call.x_grad};
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_grad_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape_like(x_grad_arg, x, last_size(x), "that of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_on_device(x_grad_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(x_grad_arg));
  if (call.up != nullptr) {
    const Argument up_grad_arg{op, "up_grad", *call.up_grad};
    TIERCEL_RETURN_IF_ERROR(check_dtype(up_grad_arg, {x.dtype}));
    TIERCEL_RETURN_IF_ERROR(check_shape_like(up_grad_arg, x, columns, "that of `x`"));
    TIERCEL_RETURN_IF_ERROR(check_on_device(up_grad_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(up_grad_arg));
  }
  if (call.out != nullptr) {
    const Argument out_arg{op, "out", *call.out};
    TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {x.dtype}));
    TIERCEL_RETURN_IF_ERROR(check_shape_like(out_arg, x, columns, "[..., N]"));
    TIERCEL_RETURN_IF_ERROR(check_on_device(out_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(out_arg));
  }
  const bool packed = call.gated && call.up == nullptr;
  const int64_t second = packed ? columns : 0;
  Operand operands[] = {{call.grad, &args->grad, 0, {}},
                        {&x, &args->x, 0, {}},
                        {packed ? &x : call.up, &args->up, second, {}},
                        {call.x_grad, &args->out, 0, {}},
                        {packed ? call.x_grad : call.up_grad, &args->up_grad, second, {}},
                        {call.out, &args->result, 0, {}}};
  TIERCEL_RETURN_IF_ERROR(lay_out(op, columns, operands, x.dtype, false, args, plan));
  *choice = choose(call.function, call.gated, true, x.dtype, x.dtype, args);
  finish_plan(*choice, *args, plan);
  return Status();
}

template <typename Call>
Status run(const Call& call, void* stream) {
  ActivationArgs args{};
  Choice choice;
  ActivationPlan plan;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice, &plan));
  if (args.vectors == 0) return Status();
  return launch(choice, args, call.x->device_index, stream);
}

template <typename Call>
Status plan_of(const Call& call, ActivationPlan* plan) {
  ActivationArgs args{};
  Choice choice;
  return prepare(call, &args, &choice, plan);
}

}  // namespace

const char* activation_op_name(ActivationFunction function, bool gated) {
  return kNames[gated][static_cast<int>(function)];
}

Status activation_plan(const ActivationCall& call, ActivationPlan* plan) {
  return plan_of(call, plan);
}

Status activation_backward_plan(const ActivationBackwardCall& call, ActivationPlan* plan) {
  return plan_of(call, plan);
}

Status activation(const ActivationCall& call, void* stream) { return run(call, stream); }

Status activation_backward(const ActivationBackwardCall& call, void* stream) {
  return run(call, stream);
}

Status activation_load(ActivationFunction function, bool gated, int device) {
  for (const auto kernels : {activation_forward_kernels, activation_backward_kernels}) {
    for (const ActivationKernel& kernel : KernelTable(kernels)) {
      if (kernel.function != function || kernel.gated != gated) continue;
      TIERCEL_RETURN_IF_ERROR(kernel.kernel.load(device));
    }
  }
  return Status();
}

}  // namespace tiercel
