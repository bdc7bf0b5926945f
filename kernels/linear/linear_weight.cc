// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_weight.h"

#include <algorithm>
#include <string>

#include "kernels/linear/linear_checks.h"
#include "kernels/linear/linear_weight_kernels.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "fp8_linear_weight_grad";
constexpr int64_t kBand = 2048;  // rows of the gradient that stay in the L2 together
// Time of a multiply-add in a tile of 128 columns, in that of one of 256: a warpgroup waits for
// each step's products, and a multiprocessor loads more for each.
constexpr double kNarrow = 1.3;
// A second launch, in steps of 128 tokens of a tile of 256 columns.
constexpr double kLaunch = 4.0;

// Rows of the gradient, and who computes them.
struct Part {
  const LinearWeightKernel* kernel = nullptr;
  int64_t first = 0;
  int64_t rows = 0;
  int group = 0;
  unsigned blocks = 0;
};

struct Choice {
  Part parts[2];
  int count = 0;  // 0: nothing to launch
  double time = 0.0;
};

Status check(const LinearWeightCall& call) {
  const Argument grad{kOp, "grad", *call.grad}, x{kOp, "x", *call.x}, out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(grad, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(grad, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(grad));
  TIERCEL_RETURN_IF_ERROR(check_rank(x, 2));
  const int64_t n = call.grad->shape[0], k = call.x->shape[0], tokens = call.grad->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_matrix(x, k, tokens, "[K, P]", grad, DType::kFloat8E4M3));
  TIERCEL_RETURN_IF_ERROR(call.add ? check_dtype(out, {DType::kFloat32})
                                   : check_dtype(out, {DType::kFloat32, DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_matrix(out, n, k, "[N, K]", grad, call.out->dtype));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  const int64_t across = ceil_div(tokens, kScaleBlock);
  TIERCEL_RETURN_IF_ERROR(
      check_block_scale({kOp, "grad_scale", *call.grad_scale}, across, n, "[P / 128, N]", grad));
  TIERCEL_RETURN_IF_ERROR(
      check_block_scale({kOp, "x_scale", *call.x_scale}, across, k, "[P / 128, K]", grad));
  if (n == 0 || k == 0 || tokens == 0) return Status();
  if (k % 8 != 0 || k > INT32_MAX) {
    const char* expected = "have a multiple of 8 rows K, fewer than 2^31";
    return Status::Unimplemented(mismatch(x, expected, std::to_string(k)));
  }
  if (n > INT32_MAX) {
    return Status::Unimplemented(mismatch(grad, "have fewer than 2^31 rows N", std::to_string(n)));
  }
  TIERCEL_RETURN_IF_ERROR(check_multiple(grad, tokens, "P", DType::kFloat8E4M3));
  if (reinterpret_cast<uintptr_t>(call.out->data) % 16 != 0) {
    return Status::Unimplemented(
        mismatch(out, "start at a multiple of 16 bytes", "an address that does not"));
  }
  return check_maps({grad, x});
}

// Adds a launch of the kernel for these rows.
void append(const LinearWeightKernel& kernel, const LinearWeightCall& call, int64_t first,
            int64_t rows, int multiprocessors, Choice* choice) {
  const LinearWeightVariant& v = kernel.variant;
  const int64_t k = call.x->shape[0], tokens = call.grad->shape[1];
  const int64_t clusters = multiprocessors / v.cluster;
  const int64_t tiles =
      ceil_div(rows, int64_t{v.tile_m} * v.cluster) * ceil_div(k, int64_t{v.tile_n});
  const double steps = static_cast<double>(ceil_div(tiles, clusters)) * v.tile_n / 256 *
                       static_cast<double>(ceil_div(tokens, kScaleBlock));
  choice->time += steps * (v.tile_n == 128 ? kNarrow : 1.0) + (choice->count > 0 ? kLaunch : 0.0);
  choice->parts[choice->count++] = {&kernel, first, rows,
                                    static_cast<int>(kBand / (v.tile_m * v.cluster)),
                                    static_cast<unsigned>(std::min(tiles, clusters) * v.cluster)};
}

// The launches whose rounds of tiles take least time: of one kernel; or of one for as many rows as
// fill whole rounds, and of one for the others.
Choice choose(const LinearWeightCall& call, int multiprocessors) {
  const int64_t n = call.grad->shape[0], k = call.x->shape[0];
  Choice best;
  if (n == 0 || k == 0 || call.grad->shape[1] == 0) return best;
  const auto consider = [&](const Choice& other) {
    if (best.count == 0 || other.time < best.time) best = other;
  };
  const KernelTable kernels(linear_weight_kernels);
  for (const LinearWeightKernel& kernel : kernels) {
    const LinearWeightVariant& v = kernel.variant;
    const int64_t clusters = multiprocessors / v.cluster;
    if (clusters == 0) continue;
    Choice alone;
    append(kernel, call, 0, n, multiprocessors, &alone);
    consider(alone);
    const int64_t height = int64_t{v.tile_m} * v.cluster, across = ceil_div(k, int64_t{v.tile_n});
    const int64_t rounds = ceil_div(n, height) * across / clusters;
    const int64_t first = rounds * clusters / across * height;
    if (v.tile_n == 128 || first == 0 || first >= n) continue;
    for (const LinearWeightKernel& other : kernels) {
      if (other.variant.tile_n != 128) continue;
      Choice two;
      append(kernel, call, 0, first, multiprocessors, &two);
      append(other, call, first, n - first, multiprocessors, &two);
      consider(two);
    }
  }
  return best;
}

Status launch(const LinearWeightCall& call, const Part& part, int device, void* stream) {
  const LinearWeightKernel& kernel = *part.kernel;
  TensorView rows = *call.grad;
  rows.data = static_cast<char*>(rows.data) + part.first * rows.strides[0];
  const int64_t shape[] = {part.rows, call.grad->shape[1]};
  rows.shape = shape;
  CUtensorMap grad_map, x_map;
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[0], rows, kOp, "grad", &grad_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[1], *call.x, kOp, "x", &x_map));
  const int64_t columns = call.x->shape[0];
  const void* grad_scale =
      static_cast<const float*>(call.grad_scale->data) + part.first * call.grad_scale->strides[1];
  const void* x_scale = call.x_scale->data;
  const void* out = static_cast<const char*>(call.out->data) +
                    part.first * columns * dtype_bytes(call.out->dtype);
  int32_t n = static_cast<int32_t>(part.rows);
  int32_t k = static_cast<int32_t>(columns);
  int32_t tokens = static_cast<int32_t>(call.grad->shape[1]);
  int32_t group = part.group;
  int32_t grad_step = static_cast<int32_t>(call.grad_scale->strides[1]);
  int32_t grad_across = static_cast<int32_t>(call.grad_scale->strides[0]);
  int32_t x_step = static_cast<int32_t>(call.x_scale->strides[1]);
  int32_t x_across = static_cast<int32_t>(call.x_scale->strides[0]);
  int32_t result =
      static_cast<int32_t>(call.add                             ? WeightResult::kFloat32Added
                           : call.out->dtype == DType::kFloat32 ? WeightResult::kFloat32
                                                                : WeightResult::kBFloat16);
  LaunchConfig config;
  config.grid.x = part.blocks;
  config.block.x = kernel.block;
  config.cluster.x = static_cast<uint32_t>(kernel.variant.cluster);
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  void* args[] = {&grad_map, &x_map, &grad_scale, &x_scale,     &out,    &n,        &k,
                  &tokens,   &group, &grad_step,  &grad_across, &x_step, &x_across, &result};
  return kernel.kernel.launch(config, device, stream, args);
}

}  // namespace

Status linear_weight_plan(const LinearWeightCall& call, int multiprocessors,
                          LinearWeightPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const Choice choice = choose(call, multiprocessors);
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0, 0};
  if (choice.count == 0) return Status();
  const Part& part = choice.parts[0];
  const LinearWeightKernel& kernel = *part.kernel;
  const LinearWeightVariant& v = kernel.variant;
  *plan = {
      kernel.kernel.name(), v.tile_m, v.tile_n, v.cluster, part.group, part.blocks, kernel.block,
      kernel.dynamic_smem,  part.rows};
  return Status();
}

Status linear_weight(const LinearWeightCall& call, void* stream) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const int device = call.grad->device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Choice choice = choose(call, multiprocessors);
  for (int i = 0; i < choice.count; ++i) {
    TIERCEL_RETURN_IF_ERROR(launch(call, choice.parts[i], device, stream));
  }
  return Status();
}

}  // namespace tiercel
