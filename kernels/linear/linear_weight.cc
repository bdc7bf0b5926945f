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

struct Choice {
  const LinearWeightKernel* kernel = nullptr;  // null: nothing to launch
  int group = 0;
  unsigned blocks = 0;
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

// The kernel whose rounds of tiles take less time.
Choice choose(const LinearWeightCall& call, int multiprocessors) {
  const int64_t n = call.grad->shape[0], k = call.x->shape[0];
  Choice best;
  if (n == 0 || k == 0 || call.grad->shape[1] == 0) return best;
  double best_time = 0.0;
  for (const LinearWeightKernel& kernel : KernelTable(linear_weight_kernels)) {
    const LinearWeightVariant& v = kernel.variant;
    const int64_t clusters = multiprocessors / v.cluster;
    if (clusters == 0) continue;
    const int64_t tiles =
        ceil_div(n, int64_t{v.tile_m} * v.cluster) * ceil_div(k, int64_t{v.tile_n});
    const double time = static_cast<double>(ceil_div(tiles, clusters) * v.tile_n) *
                        (v.tile_n == 128 ? kNarrow : 1.0);
    if (best.kernel != nullptr && time >= best_time) continue;
    best_time = time;
    best.kernel = &kernel;
    best.group = static_cast<int>(kBand / (v.tile_m * v.cluster));
    best.blocks = static_cast<unsigned>(std::min(tiles, clusters) * v.cluster);
  }
  return best;
}

}  // namespace

Status linear_weight_plan(const LinearWeightCall& call, int multiprocessors,
                          LinearWeightPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const Choice choice = choose(call, multiprocessors);
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const LinearWeightKernel& kernel = *choice.kernel;
  const LinearWeightVariant& v = kernel.variant;
  *plan = {kernel.kernel.name(), v.tile_m,      v.tile_n,     v.cluster,
           choice.group,         choice.blocks, kernel.block, kernel.dynamic_smem};
  return Status();
}

Status linear_weight(const LinearWeightCall& call, void* stream) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const int device = call.grad->device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Choice choice = choose(call, multiprocessors);
  if (choice.kernel == nullptr) return Status();
  const LinearWeightKernel& kernel = *choice.kernel;
  CUtensorMap grad_map, x_map;
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[0], *call.grad, kOp, "grad", &grad_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[1], *call.x, kOp, "x", &x_map));
  const void* grad_scale = call.grad_scale->data;
  const void* x_scale = call.x_scale->data;
  const void* out = call.out->data;
  int32_t n = static_cast<int32_t>(call.grad->shape[0]);
  int32_t k = static_cast<int32_t>(call.x->shape[0]);
  int32_t tokens = static_cast<int32_t>(call.grad->shape[1]);
  int32_t group = choice.group;
  int32_t grad_step = static_cast<int32_t>(call.grad_scale->strides[1]);
  int32_t grad_across = static_cast<int32_t>(call.grad_scale->strides[0]);
  int32_t x_step = static_cast<int32_t>(call.x_scale->strides[1]);
  int32_t x_across = static_cast<int32_t>(call.x_scale->strides[0]);
  int32_t result =
      static_cast<int32_t>(call.add                             ? WeightResult::kFloat32Added
                           : call.out->dtype == DType::kFloat32 ? WeightResult::kFloat32
                                                                : WeightResult::kBFloat16);
  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.cluster.x = static_cast<uint32_t>(kernel.variant.cluster);
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  void* args[] = {&grad_map, &x_map, &grad_scale, &x_scale,     &out,    &n,        &k,
                  &tokens,   &group, &grad_step,  &grad_across, &x_step, &x_across, &result};
  return kernel.kernel.launch(config, device, stream, args);
}

}  // namespace tiercel
