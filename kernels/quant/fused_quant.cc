// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/fused_quant.h"

#include <algorithm>
#include <string>

#include "kernels/quant/fused_quant_kernels.h"
#include "kernels/quant/quant_checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kRmsOp[] = "rms_norm_quant";
constexpr char kLayerOp[] = "layer_norm_quant";
constexpr char kGatedOp[] = "act_and_mul_quant";
// Columns: blocks of 1024 threads with 2 vectors each, or 4. A norm has no registers for 4.
constexpr int64_t kMostOfNorm = 16384, kMostOfGated = 32768;

struct Choice {
  FusedQuantArgs args{};
  const FusedQuantKernel* kernel = nullptr;
  LaunchConfig config;
};

Status check_scale(const Argument& scale, int64_t rows, int64_t columns,
                   Fp8Granularity granularity) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  switch (granularity) {
    case Fp8Granularity::kTensor:
      return check_shape(scale, {1, 1}, "[1, 1]");
    case Fp8Granularity::kRow:
      return check_shape(scale, {rows, 1}, "[T, 1]");
    case Fp8Granularity::kGroup:
      return check_shape(scale, {rows, ceil_div(columns, 128)}, "[T, N / 128]");
    case Fp8Granularity::kBlock:
      break;
  }
  return Status::InvalidArgument(std::string(scale.op) + ": there is no scale per 128x128 tile");
}

// Shared by all ops.
Status check(const char* op, const FusedQuantCall& t, int64_t halves, int64_t most) {
  const Argument x{op, "x", *t.x}, q{op, "q", *t.q}, scale{op, "scale", *t.scale};
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x, {DType::kBFloat16, DType::kFloat16}));
  const int64_t rows = t.x->shape[0];
  if (t.x->shape[1] % halves != 0) {
    return Status::InvalidArgument(
        mismatch(x, "have an even number of columns [T, 2N]", shape_text(t.x->shape, t.x->ndim)));
  }
  const int64_t columns = t.x->shape[1] / halves;
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_shape(q, {rows, columns}, "[T, N]"));
  TIERCEL_RETURN_IF_ERROR(check_scale(scale, rows, columns, t.granularity));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x));
  for (const Argument& other : {q, scale}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, x));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(scale));
  if (columns % 8 != 0 || columns > most) {
    return Status::Unimplemented(std::string(op) + ": N must be a multiple of 8 up to " +
                                 std::to_string(most) + ", got " + std::to_string(columns));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows_of_vectors(x));
  return check_aligned(q, 8);
}

// An optional tensor of a norm.
Status check_rows_like(const Argument& argument, const TensorView& x) {
  const Argument like{argument.op, "x", x};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {x.shape[0], x.shape[1]}, "[T, N]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_rows_of_vectors(argument);
}

// A norm's weight or bias, which may be absent.
Status set_parameter(const char* op, const char* name, const TensorView* view, const TensorView& x,
                     const char** data, bool* wide) {
  if (view == nullptr) return Status();
  const Argument parameter{op, name, *view}, like{op, "x", x};
  if (view->dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(parameter, {x.dtype, DType::kFloat32}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(parameter, {x.shape[1]}, "[N]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(parameter, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(parameter));
  TIERCEL_RETURN_IF_ERROR(check_aligned(parameter, 16));
  *data = static_cast<const char*>(view->data);
  *wide = view->dtype == DType::kFloat32;
  return Status();
}

int64_t row_bytes(const TensorView& view) {
  return view.shape[0] > 1 ? view.strides[0] * dtype_bytes(view.dtype) : 0;
}

bool is_norm(FusedQuantProducer producer) {
  return producer == FusedQuantProducer::kRmsNorm || producer == FusedQuantProducer::kLayerNorm;
}

// Few rows: one vector per thread, for the least latency; many: two, for more bytes in flight. A
// norm's order of sums depends on it, so in the batch-invariant mode all rows are as few.
Status choose(const char* op, FusedQuantProducer producer, const FusedQuantCall& t, int64_t columns,
              Choice* choice) {
  FusedQuantArgs& args = choice->args;
  const int64_t rows = t.x->shape[0];
  args.x = static_cast<const char*>(t.x->data);
  args.row_bytes = row_bytes(*t.x);
  args.q = static_cast<char*>(t.q->data);
  args.scale = static_cast<float*>(t.scale->data);
  args.columns = columns;
  args.vectors = static_cast<int>(columns / 8);
  args.groups = static_cast<int>(ceil_div(columns, 128));
  args.granularity = t.granularity;
  if (rows == 0 || columns == 0) return Status();
  if (rows > 0x7fffffff) {
    return Status::Unimplemented(std::string(op) + ": too many rows for one launch, got " +
                                 std::to_string(rows));
  }
  const bool few = rows <= 2 * kDefaultMultiprocessors || (is_norm(producer) && batch_invariant());
  int vectors = few && args.vectors <= kFusedQuantMostThreads ? 1 : 2;
  if (args.vectors > vectors * kFusedQuantMostThreads) vectors = 4;
  const int64_t threads = ceil_div(ceil_div(args.vectors, vectors), 32) * 32;
  choice->kernel = KernelTable(fused_quant_kernels).find([&](const FusedQuantKernel& kernel) {
    return kernel.producer == producer && kernel.dtype == t.x->dtype && kernel.vectors == vectors;
  });
  choice->config.grid.x = static_cast<uint32_t>(rows);
  choice->config.block.x = static_cast<uint32_t>(threads);
  choice->config.dependent = true;
  args.prefetch_blocks = resident_blocks(choice->config.block) / 2;  // as for other row kernels
  return Status();
}

Status prepare_norm(const char* op, FusedQuantProducer producer, const FusedQuantCall& t,
                    Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(op, t, 1, kMostOfNorm));
  FusedQuantArgs& args = choice->args;
  TIERCEL_RETURN_IF_ERROR(
      set_parameter(op, "weight", t.weight, *t.x, &args.weight, &args.wide_weight));
  TIERCEL_RETURN_IF_ERROR(set_parameter(op, "bias", t.bias, *t.x, &args.bias, &args.wide_bias));
  if (t.residual != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_rows_like({op, "residual", *t.residual}, *t.x));
    args.residual = static_cast<char*>(t.residual->data);
    args.residual_row_bytes = row_bytes(*t.residual);
  }
  if (t.normed != nullptr) {
    const Argument normed{op, "normed", *t.normed};
    TIERCEL_RETURN_IF_ERROR(check_rows_like(normed, *t.x));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(normed));
    args.normed = static_cast<char*>(t.normed->data);
  }
  args.eps = static_cast<float>(t.eps);
  args.inverse_columns = 1.0f / static_cast<float>(std::max<int64_t>(t.x->shape[1], 1));
  return choose(op, producer, t, t.x->shape[1], choice);
}

Status prepare_rms(const FusedQuantCall& t, Choice* choice) {
  return prepare_norm(kRmsOp, FusedQuantProducer::kRmsNorm, t, choice);
}

Status prepare_layer(const FusedQuantCall& t, Choice* choice) {
  return prepare_norm(kLayerOp, FusedQuantProducer::kLayerNorm, t, choice);
}

Status prepare_gated(const FusedQuantCall& t, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(kGatedOp, t, 2, kMostOfGated));
  const int64_t columns = t.x->shape[1] / 2;
  const auto producer = static_cast<FusedQuantProducer>(
      static_cast<int>(FusedQuantProducer::kSilu) + static_cast<int>(t.function));
  TIERCEL_RETURN_IF_ERROR(choose(kGatedOp, producer, t, columns, choice));
  choice->args.factors = choice->args.x + columns * dtype_bytes(t.x->dtype);
  return Status();
}

template <Status (*kPrepare)(const FusedQuantCall&, Choice*)>
Status plan_of(const FusedQuantCall& call, FusedQuantPlan* plan) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(kPrepare(call, &choice));
  *plan = {"none", 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.kernel->vectors, choice.config.grid.x,
             choice.config.block.x};
  }
  return Status();
}

template <Status (*kPrepare)(const FusedQuantCall&, Choice*)>
Status launch(const FusedQuantCall& call, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(kPrepare(call, &choice));
  if (choice.kernel == nullptr) return Status();
  void* pointers[] = {&choice.args};
  return choice.kernel->kernel.launch(choice.config, call.x->device_index, stream, pointers);
}

}  // namespace

Status rms_norm_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan) {
  return plan_of<prepare_rms>(call, plan);
}

Status rms_norm_quant(const FusedQuantCall& call, void* stream) {
  return launch<prepare_rms>(call, stream);
}

Status layer_norm_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan) {
  return plan_of<prepare_layer>(call, plan);
}

Status layer_norm_quant(const FusedQuantCall& call, void* stream) {
  return launch<prepare_layer>(call, stream);
}

Status act_and_mul_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan) {
  return plan_of<prepare_gated>(call, plan);
}

Status act_and_mul_quant(const FusedQuantCall& call, void* stream) {
  return launch<prepare_gated>(call, stream);
}

Status fused_quant_load(int device) { return KernelTable(fused_quant_kernels).load_all(device); }

}  // namespace tiercel
