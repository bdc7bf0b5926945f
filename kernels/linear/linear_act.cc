// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_act.h"

#include <string>

#include "kernels/linear/linear_act_kernels.h"
#include "kernels/linear/linear_checks.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

const char* op_of(const LinearActCall& call) {
  return call.gated ? "gated_linear" : call.x_scale != nullptr ? "fp8_linear" : "linear_act";
}

// Checks a bias or an additional matrix.
Status check_beside(const Argument& argument, std::initializer_list<int64_t> shape, const char* why,
                    const Argument& x, DType dtype) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, shape, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  if (reinterpret_cast<uintptr_t>(argument.view.data) % 8 == 0) return Status();
  return Status::Unimplemented(
      mismatch(argument, "start at a multiple of 8 bytes", "an address that does not"));
}

Status check_first(const Argument& argument, bool scaled = false) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 2));
  TIERCEL_RETURN_IF_ERROR(scaled ? check_dtype(argument, {DType::kFloat8E4M3})
                                 : check_dtype(argument, {DType::kBFloat16, DType::kFloat16}));
  return check_cuda(argument);
}

int64_t count(const TensorView& tensor) {
  int64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= tensor.shape[i];
  return elements;
}

bool of_rows(const TensorView& scale, int64_t rows) {
  return count(scale) == 1 || count(scale) == rows;
}

bool has_shape(const TensorView& tensor, int64_t rows, int64_t columns) {
  return tensor.ndim == 2 && tensor.shape[0] == rows && tensor.shape[1] == columns;
}

// True if the scales are of blocks. Scales that fit rows as well mean the same.
bool of_blocks(const LinearActCall& call, int64_t m, int64_t n, int64_t k) {
  if (call.x_scale == nullptr) return false;
  const TensorView &x = *call.x_scale, &w = *call.w_scale;
  const int64_t down = ceil_div(n, kScaleBlock), across = ceil_div(k, kScaleBlock);
  return (has_shape(x, m, across) && !of_rows(x, m)) ||
         (has_shape(w, down, across) && !of_rows(w, n));
}

// Checks for one scale per tensor or per row, in any shape.
Status check_scale(const Argument& argument, int64_t rows, const char* letter, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  if (!of_rows(argument.view, rows)) {
    return Status::InvalidArgument(mismatch(
        argument, std::string("have 1 or ") + letter + " = " + std::to_string(rows) + " elements",
        std::to_string(count(argument.view))));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status check(const LinearActCall& call, LinearProblem* problem) {
  const char* op = op_of(call);
  const int64_t parts = call.gated ? 2 : 1;
  const Argument x{op, "x", *call.x}, w{op, "weight", *call.w}, y{op, "out", *call.y};
  const bool scaled = call.x_scale != nullptr;
  const DType dtype = scaled ? DType::kBFloat16 : call.x->dtype;
  TIERCEL_RETURN_IF_ERROR(check_first(x, scaled));
  TIERCEL_RETURN_IF_ERROR(check_rank(w, 2));
  if (call.w->shape[0] % parts != 0) {
    return Status::InvalidArgument(mismatch(w, "have an even number of rows [2N, K]",
                                            shape_text(call.w->shape, call.w->ndim)));
  }
  const int64_t m = call.x->shape[0], n = call.w->shape[0] / parts, k = call.x->shape[1];
  *problem = {LinearKind::kPlain, call.x->dtype, call.activation, m, n, k};
  if (call.gated) problem->kind = LinearKind::kGated;
  if (call.residual != nullptr || call.sums != nullptr) problem->kind = LinearKind::kExtra;
  const char* const w_shape = call.gated ? "[2N, K]" : "[N, K]";
  TIERCEL_RETURN_IF_ERROR(check_matrix(w, n * parts, k, w_shape, x, call.x->dtype));
  TIERCEL_RETURN_IF_ERROR(check_matrix(y, m, n, "[M, N]", x, dtype));
  TIERCEL_RETURN_IF_ERROR(check_multiple(w, n, "N", dtype));
  TIERCEL_RETURN_IF_ERROR(check_multiple(x, k, "K", call.x->dtype));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(y));
  if (call.gated &&
      (call.activation == Activation::kNone || call.activation == Activation::kRelu)) {
    return Status::Unimplemented(std::string(op) + ": gates are silu, gelu and gelu_tanh");
  }
  if (call.bias != nullptr) {
    const char* const shape = call.gated ? "[2N]" : "[N]";
    TIERCEL_RETURN_IF_ERROR(check_beside({op, "bias", *call.bias}, {n * parts}, shape, x, dtype));
  }
  if (scaled && (call.gated || of_blocks(call, m, n, k))) {
    problem->kind = call.gated ? LinearKind::kGatedBlocks : LinearKind::kBlocks;
    const Argument w_scale{op, "weight_scale", *call.w_scale};
    const int64_t down = ceil_div(n * parts, kScaleBlock), across = ceil_div(k, kScaleBlock);
    TIERCEL_RETURN_IF_ERROR(
        check_block_scale({op, "x_scale", *call.x_scale}, m, across, "[M, K / 128]", x));
    const char* const w_blocks = call.gated ? "[2N / 128, K / 128]" : "[N / 128, K / 128]";
    TIERCEL_RETURN_IF_ERROR(check_block_scale(w_scale, down, across, w_blocks, x));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(w_scale));
    // Else a block has rows of both halves.
    if (call.gated && n % kScaleBlock != 0) {
      return Status::Unimplemented(
          mismatch(w, "have N that is a multiple of 128 with scales", std::to_string(n)));
    }
  } else if (scaled) {
    TIERCEL_RETURN_IF_ERROR(check_scale({op, "x_scale", *call.x_scale}, m, "M", x));
    TIERCEL_RETURN_IF_ERROR(check_scale({op, "weight_scale", *call.w_scale}, n, "N", x));
  }
  if (scaled) {
    if (call.activation == Activation::kRelu) {
      return Status::Unimplemented(std::string(op) + ": activations are silu, gelu and gelu_tanh");
    }
  }
  if (call.residual != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        check_beside({op, "residual", *call.residual}, {m, n}, "[M, N]", x, dtype));
  }
  if (call.sums != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_beside({op, "sums", *call.sums}, {m, n}, "[M, N]", x, dtype));
    if (call.activation == Activation::kNone) {
      return Status::InvalidArgument(std::string(op) +
                                     ": `sums` are the result where there is no activation");
    }
  }
  if (m == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(check_maps({x, w, y}));
  return call.sums == nullptr ? Status() : check_maps({{op, "sums", *call.sums}});
}

Status check(const LinearGradientCall& call, LinearProblem* problem) {
  const bool of_x = call.of == LinearGradient::kX;
  const char* op = of_x ? "linear_act_grad_x" : "linear_act_grad_weight";
  const Argument grad{op, "grad", *call.grad}, out{op, "out", *call.out};
  const Argument other{op, of_x ? "weight" : "x", *call.other};
  TIERCEL_RETURN_IF_ERROR(check_first(grad));
  TIERCEL_RETURN_IF_ERROR(check_rank(other, 2));
  const int64_t m = call.grad->shape[0], n = call.grad->shape[1], k = call.other->shape[1];
  const char* const shape = of_x ? "[N, K]" : "[M, K]";
  TIERCEL_RETURN_IF_ERROR(check_matrix(other, of_x ? n : m, k, shape, grad, call.grad->dtype));
  TIERCEL_RETURN_IF_ERROR(
      check_matrix(out, of_x ? m : n, k, of_x ? "[M, K]" : "[N, K]", grad, call.grad->dtype));
  TIERCEL_RETURN_IF_ERROR(check_multiple(grad, n, "N", call.grad->dtype));
  TIERCEL_RETURN_IF_ERROR(check_multiple(other, k, "K", call.grad->dtype));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  *problem =
      of_x ? LinearProblem{LinearKind::kGradX, call.grad->dtype, Activation::kNone, m, k, n}
           : LinearProblem{LinearKind::kGradWeight, call.grad->dtype, Activation::kNone, n, k, m};
  return m == 0 ? Status() : check_maps({grad, other, out});
}

// Chooses the given configuration, the tuned one, or the one with the least estimated time.
Status decide(const LinearProblem& problem, int device, int multiprocessors,
              const LinearActConfig* config, LinearActChoice* choice) {
  if (config != nullptr) return linear_act_configure(*config, problem, multiprocessors, choice);
  // In the batch-invariant mode K is not split, which tuned configurations may do.
  if (!batch_invariant() &&
      (problem.kind == LinearKind::kPlain || problem.kind == LinearKind::kExtra)) {
    const LinearActConfig* tuned =
        linear_act_tuned().find({device, problem.dtype, {problem.n, problem.k}}, problem.m);
    // Tuned for another M or kind, it may not suit this one.
    if (tuned != nullptr && linear_act_configure(*tuned, problem, multiprocessors, choice).ok()) {
      return Status();
    }
  }
  *choice = linear_act_choose(problem, multiprocessors);
  return Status();
}

LinearActPlan describe(const LinearActChoice& choice) {
  const LinearActKernel& kernel = *choice.kernel;
  const LinearActVariant& v = kernel.variant;
  return {kernel.kernel.name(),
          v.tile_m,
          v.tile_n,
          v.pingpong,
          v.split_k ? choice.splits : v.cluster,
          choice.splits,
          choice.group,
          choice.rows,
          choice.blocks,
          kernel.block,
          kernel.dynamic_smem};
}

constexpr LinearActPlan kNothing{"none", 0, 0, false, 0, 0, 0, 0, 0, 0, 0};

// From a row's scale to that of the next row, or of the next 128 rows.
int32_t scale_step(const TensorView* scale, LinearKind kind) {
  if (scale == nullptr) return 0;
  if (has_block_scales(kind)) return static_cast<int32_t>(scale->strides[0]);
  return count(*scale) > 1 ? 1 : 0;
}

const void* data(const TensorView* tensor) { return tensor == nullptr ? nullptr : tensor->data; }

Status launch(const LinearProblem& problem, const LinearActCall& call, const char* op,
              void* stream) {
  const int device = call.x->device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  LinearActChoice choice;
  TIERCEL_RETURN_IF_ERROR(
      decide(problem, device, multiprocessors, call.config ? &*call.config : nullptr, &choice));
  const LinearActKernel& kernel = *choice.kernel;
  CUtensorMap x_map, w_map, y_map, sums_map;
  // A split-K kernel loads only the rows of its tile, because loading others costs time.
  TensorMapSpec x_spec = kernel.maps[0];
  if (kernel.variant.split_k) x_spec.box[0] = static_cast<uint32_t>(choice.rows);
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(x_spec, *call.x, op, "x", &x_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[1], *call.w, op, "weight", &w_map));
  const void* bias = data(call.bias);
  const void* residual = data(call.residual);
  int32_t m = static_cast<int32_t>(problem.m);
  int32_t n = static_cast<int32_t>(problem.n);
  int32_t k = static_cast<int32_t>(problem.k);
  int32_t group = choice.group;
  int32_t rows = choice.rows;
  int32_t save = call.sums != nullptr;
  const void* x_scale = data(call.x_scale);
  const void* w_scale = data(call.w_scale);
  int32_t x_step = scale_step(call.x_scale, problem.kind);
  int32_t w_step = scale_step(call.w_scale, problem.kind);
  // The last two are parameters of kernels with scales of blocks only.
  int32_t across = 0;
  if (has_block_scales(problem.kind)) across = static_cast<int32_t>(call.x_scale->strides[1]);
  int32_t activation = static_cast<int32_t>(problem.activation);

  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  if (kernel.variant.split_k) {
    const void* y = call.y->data;
    const void* sums = data(call.sums);
    config.cluster.x = static_cast<uint32_t>(choice.splits);
    void* args[] = {&x_map, &w_map, &bias, &residual, &x_scale, &w_scale, &y,      &sums,
                    &m,     &n,     &k,    &rows,     &x_step,  &w_step,  &across, &activation};
    return kernel.kernel.launch(config, device, stream, args);
  }
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[2], *call.y, op, "out", &y_map));
  if (save != 0) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[3], *call.sums, op, "sums", &sums_map));
  }
  config.cluster.x = static_cast<uint32_t>(kernel.variant.cluster);
  CUtensorMap* sums_argument = save != 0 ? &sums_map : &y_map;
  void* args[] = {&x_map,     &w_map, &y_map, sums_argument, &bias, &residual, &x_scale, &w_scale,
                  &m,         &n,     &k,     &group,        &save, &x_step,   &w_step,  &across,
                  &activation};
  return kernel.kernel.launch(config, device, stream, args);
}

}  // namespace

TunedTable<LinearActConfig>& linear_act_tuned() {
  // Never destroyed, as threads may still launch.
  static auto* table = new TunedTable<LinearActConfig>();
  return *table;
}

Status linear_act_plan(const LinearActCall& call, int multiprocessors, LinearActPlan* plan) {
  LinearProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  *plan = kNothing;
  if (problem.m == 0) return Status();
  LinearActChoice choice;
  TIERCEL_RETURN_IF_ERROR(decide(problem, call.x->device_index, multiprocessors,
                                 call.config ? &*call.config : nullptr, &choice));
  *plan = describe(choice);
  return Status();
}

Status linear_act(const LinearActCall& call, void* stream) {
  LinearProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  return problem.m == 0 ? Status() : launch(problem, call, op_of(call), stream);
}

Status linear_gradient_plan(const LinearGradientCall& call, int multiprocessors,
                            LinearActPlan* plan) {
  LinearProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  *plan =
      call.grad->shape[0] == 0 ? kNothing : describe(linear_act_choose(problem, multiprocessors));
  return Status();
}

Status linear_gradient(const LinearGradientCall& call, void* stream) {
  LinearProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  if (call.grad->shape[0] == 0) return Status();
  LinearActCall as_forward;
  as_forward.x = call.grad;
  as_forward.w = call.other;
  as_forward.y = call.out;
  return launch(problem, as_forward, "linear_act", stream);
}

}  // namespace tiercel
