// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv/causal_conv1d.h"

#include <algorithm>
#include <string>

#include "kernels/conv/causal_conv1d_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr int64_t kMostRows = 32;  // of a thread
constexpr int64_t kMostRowsOfFew = 64;
constexpr int64_t kFewWaves = 2;
// Threads that run at once.
constexpr int64_t kWave = int64_t{kDefaultMultiprocessors} * kConvBlocks * kConvThreads;

Status check_rest(const Argument& argument, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  return check_cuda(argument);
}

// Rows at one distance, whose vectors of `bytes` lie on such.
Status lay_out_rows(const Argument& argument, int64_t bytes, const char** data, int64_t* stride,
                    int64_t* rows) {
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(join_rows(argument, &matrix));
  const int64_t each = dtype_bytes(argument.view.dtype);
  *data = static_cast<const char*>(argument.view.data);
  *stride = matrix.rows <= 1 ? 0 : matrix.row_stride * each;
  *rows = matrix.rows;
  if (reinterpret_cast<uintptr_t>(*data) % bytes != 0 || *stride % bytes != 0 ||
      matrix.columns * each % bytes != 0) {
    return Status::Unimplemented(std::string(argument.op) + ": rows of `" + argument.name +
                                 "` must be aligned to " + std::to_string(bytes) + " bytes");
  }
  return Status();
}

struct Common {
  ConvSequences sequences{};
  const char* x;
  int64_t x_stride;
  const char* weight;
  const char* bias = nullptr;
  int columns;
  int width;
  bool vectors = false;
};

// All but what is written. `bytes`: of a thread's channels.
Status lay_out(const char* op, const ConvCall& call, int64_t bytes, Common* common) {
  const Argument x{op, "x", *call.x};
  const DType dtype = call.x->dtype;
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  if (call.x->ndim < 2) {
    return Status::InvalidArgument(
        mismatch(x, "have at least 2 dimensions", std::to_string(call.x->ndim)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  ConvSequences& sequences = common->sequences;
  TIERCEL_RETURN_IF_ERROR(lay_out_rows(x, bytes, &common->x, &common->x_stride, &sequences.rows));
  const int64_t columns = last_size(*call.x);
  if (columns > INT32_MAX / 8) {
    return Status::Unimplemented(std::string(op) + ": too many channels, got " +
                                 std::to_string(columns));
  }
  common->columns = static_cast<int>(columns);
  if (call.cu_seqlens != nullptr) {
    const Argument starts{op, "cu_seqlens", *call.cu_seqlens};
    for (int i = 0; i < call.x->ndim - 2; ++i) {
      if (call.x->shape[i] == 1) continue;
      return Status::InvalidArgument(mismatch(x, "have shape [1, T, D] with `cu_seqlens`",
                                              shape_text(call.x->shape, call.x->ndim)));
    }
    TIERCEL_RETURN_IF_ERROR(check_dtype(starts, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_rank(starts, 1));
    if (starts.view.shape[0] == 0 || starts.view.shape[0] > INT32_MAX / 2) {
      return Status::InvalidArgument(
          mismatch(starts, "have from 1 to 2^30 elements", std::to_string(starts.view.shape[0])));
    }
    TIERCEL_RETURN_IF_ERROR(check_rest(starts, x));
    sequences.starts = static_cast<const int*>(starts.view.data);
    sequences.start_step = starts.view.strides[0];
    sequences.count = static_cast<int>(starts.view.shape[0] - 1);
  } else {
    sequences.length = call.x->shape[call.x->ndim - 2];
    const int64_t count = sequences.length == 0 ? 0 : sequences.rows / sequences.length;
    sequences.count = static_cast<int>(std::min<int64_t>(count, INT32_MAX));
  }

  const Argument weight{op, "weight", *call.weight};
  TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(weight, 2));
  const int64_t width = weight.view.shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(weight, {columns, width}, "[D, W]"));
  if (width < 2 || width > kConvWidth) {
    return Status::InvalidArgument(mismatch(weight, "have 2, 3 or 4 taps", std::to_string(width)));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(weight));
  TIERCEL_RETURN_IF_ERROR(check_rest(weight, x));
  common->weight = static_cast<const char*>(weight.view.data);
  common->width = static_cast<int>(width);
  if (call.bias != nullptr) {
    const Argument bias{op, "bias", *call.bias};
    TIERCEL_RETURN_IF_ERROR(check_dtype(bias, {dtype}));
    TIERCEL_RETURN_IF_ERROR(check_shape(bias, {columns}, "[D]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(bias));
    TIERCEL_RETURN_IF_ERROR(check_rest(bias, x));
    common->bias = static_cast<const char*>(bias.view.data);
  }
  common->vectors =
      (reinterpret_cast<uintptr_t>(common->weight) | reinterpret_cast<uintptr_t>(common->bias)) %
          kConvVectorBytes ==
      0;
  return Status();
}

// A tensor of x's shape and dtype.
Status lay_out_like_x(const char* op, const char* name, const TensorView& view,
                      const ConvCall& call, int64_t bytes, const char** data, int64_t* stride) {
  const Argument argument{op, name, view};
  const Argument x{op, "x", *call.x};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {call.x->dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape_like(argument, *call.x, last_size(*call.x), "the shape of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_rest(argument, x));
  int64_t rows;
  return lay_out_rows(argument, bytes, data, stride, &rows);
}

Status too_large(const char* op) {
  return Status::Unimplemented(std::string(op) + ": too many rows for one launch");
}

Status lay_out_forward(const char* op, const ConvCall& call, ConvArgs* args) {
  Common common;
  const int64_t bytes = kConvChannels * dtype_bytes(call.x->dtype);
  TIERCEL_RETURN_IF_ERROR(lay_out(op, call, bytes, &common));
  args->sequences = common.sequences;
  args->x = common.x, args->x_stride = common.x_stride;
  args->weight = common.weight, args->bias = common.bias;
  args->columns = common.columns, args->width = common.width;
  args->silu = call.silu, args->vectors = common.vectors;
  const char* out;
  TIERCEL_RETURN_IF_ERROR(
      lay_out_like_x(op, "out", *call.out, call, bytes, &out, &args->out_stride));
  args->out = const_cast<char*>(out);
  return Status();
}

const Kernel& of_dtype(const ConvKernel* (*list)(int* count), DType dtype) {
  return KernelTable(list).find([&](const ConvKernel& one) { return one.dtype == dtype; })->kernel;
}

Status choose(const char* op, const ConvCall& call, ConvArgs* args, ConvPlan* plan,
              const Kernel** kernel) {
  const int64_t rows = args->sequences.rows;
  if (rows == 0 || args->columns == 0) return Status();
  const int64_t vectors = args->columns / kConvChannels;
  // Short sequences are not joined in a thread, which would load their states one after another.
  const ConvSequences& sequences = args->sequences;
  const int64_t least = sequences.starts == nullptr ? ceil_div(rows, sequences.length) : 1;
  // Whole waves of threads, as few as can be: the rows before a thread's first are read twice. Of
  // many waves, those of more rows take a little longer.
  const auto count_waves = [&](int64_t most) {
    return ceil_div(std::max(least, ceil_div(rows, most)) * vectors, kWave);
  };
  int64_t waves = count_waves(kMostRowsOfFew);
  if (waves > kFewWaves) waves = count_waves(kMostRows);
  args->rows_per_thread = ceil_div(rows, waves * kWave / vectors);
  const int64_t parts = ceil_div(rows, args->rows_per_thread);
  const int64_t grid = ceil_div(parts * vectors, kConvThreads);
  if (grid > INT32_MAX) return too_large(op);
  *kernel = &of_dtype(causal_conv1d_kernels, call.x->dtype);
  *plan = {(*kernel)->name(), args->rows_per_thread, static_cast<unsigned>(grid), kConvThreads};
  return Status();
}

Status launch(const ConvCall& call, const Kernel* kernel, const ConvPlan& plan, void* args,
              void* stream) {
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.dependent = true;
  void* arguments[] = {args};
  return kernel->launch(config, call.x->device_index, stream, arguments);
}

Status prepare(const ConvCall& call, ConvArgs* args, ConvPlan* plan, const Kernel** kernel) {
  constexpr const char* kOp = "causal_conv1d";
  *plan = {"none", 0, 0, 0};
  TIERCEL_RETURN_IF_ERROR(lay_out_forward(kOp, call, args));
  return choose(kOp, call, args, plan, kernel);
}

Status prepare_update(const ConvUpdateCall& call, ConvArgs* args, ConvPlan* plan,
                      const Kernel** kernel) {
  constexpr const char* kOp = "causal_conv1d_update";
  *plan = {"none", 0, 0, 0};
  TIERCEL_RETURN_IF_ERROR(lay_out_forward(kOp, call.conv, args));
  const Argument x{kOp, "x", *call.conv.x};
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 3));
  const Argument states{kOp, "states", *call.states};
  TIERCEL_RETURN_IF_ERROR(check_dtype(states, {x.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(states, 3));
  TIERCEL_RETURN_IF_ERROR(check_shape(
      states, {states.view.shape[0], args->width - 1, args->columns}, "[slots, W - 1, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(states, x));
  const int64_t bytes = dtype_bytes(states.view.dtype);
  const int64_t* strides = states.view.strides;
  // The stride of a dimension of size 1 means nothing.
  const int64_t slot = states.view.shape[0] > 1 ? strides[0] : 0;
  if (args->columns != 0 &&
      (strides[2] != 1 || (args->width > 2 && strides[1] != args->columns) ||
       slot % kConvChannels != 0 ||
       reinterpret_cast<uintptr_t>(states.view.data) % (kConvChannels * bytes))) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": each of `states` must be contiguous and aligned to " +
                                 std::to_string(kConvChannels * bytes) + " bytes");
  }
  args->states = static_cast<char*>(states.view.data);
  args->slots = states.view.shape[0];
  args->slot_stride = slot * bytes;
  const int64_t sequences = args->sequences.count;
  if (call.state_indices != nullptr) {
    const Argument indices{kOp, "state_indices", *call.state_indices};
    TIERCEL_RETURN_IF_ERROR(check_dtype(indices, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(indices, {sequences}, "[N]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(indices));
    TIERCEL_RETURN_IF_ERROR(check_rest(indices, x));
    args->state_indices = static_cast<const int*>(indices.view.data);
  }
  if (call.has_state != nullptr) {
    const Argument flags{kOp, "has_state", *call.has_state};
    TIERCEL_RETURN_IF_ERROR(check_dtype(flags, {DType::kBool}));
    TIERCEL_RETURN_IF_ERROR(check_shape(flags, {sequences}, "[N]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(flags));
    TIERCEL_RETURN_IF_ERROR(check_rest(flags, x));
    args->has_state = static_cast<const bool*>(flags.view.data);
  }
  return choose(kOp, call.conv, args, plan, kernel);
}

Status prepare_backward(const ConvBackwardCall& call, ConvBackwardArgs* args, ConvPlan* plan,
                        const Kernel** kernel) {
  constexpr const char* kOp = "causal_conv1d_backward";
  *plan = {"none", 0, 0, 0};
  const int64_t bytes = kConvChannels * dtype_bytes(call.conv.x->dtype);
  Common common;
  TIERCEL_RETURN_IF_ERROR(lay_out(kOp, call.conv, bytes, &common));
  args->sequences = common.sequences;
  args->x = common.x, args->x_stride = common.x_stride;
  args->weight = common.weight, args->bias = common.bias;
  args->columns = common.columns, args->width = common.width;
  args->silu = call.conv.silu, args->vectors = common.vectors;
  const char* dx;
  TIERCEL_RETURN_IF_ERROR(lay_out_like_x(kOp, "grad", *call.conv.out, call.conv, bytes, &args->grad,
                                         &args->grad_stride));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_like_x(kOp, "dx", *call.dx, call.conv, bytes, &dx, &args->dx_stride));
  args->dx = const_cast<char*>(dx);
  const Argument sums{kOp, "sums", *call.sums};
  TIERCEL_RETURN_IF_ERROR(check_dtype(sums, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(sums, 3));
  const int64_t parts = sums.view.shape[0];
  TIERCEL_RETURN_IF_ERROR(
      check_shape(sums, {parts, args->width + 1, args->columns}, "[parts, W + 1, D]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(sums));
  TIERCEL_RETURN_IF_ERROR(check_rest(sums, {kOp, "x", *call.conv.x}));
  args->sums = static_cast<float*>(sums.view.data);
  args->parts = parts;
  if (parts == 0 || args->columns == 0) return Status();
  const int64_t rows = args->sequences.rows;
  args->rows_per_thread = ceil_div(rows, parts);
  const int64_t grid = ceil_div(parts * (args->columns / kConvChannels), kConvBackwardThreads);
  if (grid > INT32_MAX) return too_large(kOp);
  *kernel = &of_dtype(causal_conv1d_backward_kernels, call.conv.x->dtype);
  *plan = {(*kernel)->name(), args->rows_per_thread, static_cast<unsigned>(grid),
           kConvBackwardThreads};
  return Status();
}

}  // namespace

Status causal_conv1d_plan(const ConvCall& call, ConvPlan* plan) {
  ConvArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status causal_conv1d(const ConvCall& call, void* stream) {
  ConvArgs args{};
  ConvPlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  return launch(call, kernel, plan, &args, stream);
}

Status causal_conv1d_update_plan(const ConvUpdateCall& call, ConvPlan* plan) {
  ConvArgs args{};
  const Kernel* kernel = nullptr;
  return prepare_update(call, &args, plan, &kernel);
}

Status causal_conv1d_update(const ConvUpdateCall& call, void* stream) {
  ConvArgs args{};
  ConvPlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare_update(call, &args, &plan, &kernel));
  return launch(call.conv, kernel, plan, &args, stream);
}

Status causal_conv1d_backward_plan(const ConvBackwardCall& call, ConvPlan* plan) {
  ConvBackwardArgs args{};
  const Kernel* kernel = nullptr;
  return prepare_backward(call, &args, plan, &kernel);
}

Status causal_conv1d_backward(const ConvBackwardCall& call, void* stream) {
  ConvBackwardArgs args{};
  ConvPlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare_backward(call, &args, &plan, &kernel));
  return launch(call.conv, kernel, plan, &args, stream);
}

Status causal_conv1d_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(causal_conv1d_kernels).load_all(device));
  return KernelTable(causal_conv1d_backward_kernels).load_all(device);
}

}  // namespace tiercel
