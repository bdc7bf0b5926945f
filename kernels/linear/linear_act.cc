// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_act.h"

#include <string>

#include "kernels/linear/linear_act_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "linear_act";

// The copy engine moves 16 bytes at a time: eight elements.
constexpr int64_t kAlignedElements = 8;

Status check_multiple(const Argument& argument, int dimension, const char* letter) {
  const int64_t size = argument.view.shape[dimension];
  if (size > 0 && size % kAlignedElements == 0 && size <= INT32_MAX) return Status();
  return Status::Unimplemented(
      mismatch(argument, std::string("have a multiple of 8 as its dimension ") + letter,
               std::to_string(size) + " (shape " +
                   shape_text(argument.view.shape, argument.view.ndim) + ")"));
}

Status check(const TensorView& x, const TensorView& w, const TensorView* bias,
             const TensorView& y) {
  const Argument x_arg{kOp, "x", x};
  const Argument w_arg{kOp, "weight", w};
  const Argument y_arg{kOp, "out", y};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(w_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(y_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(w_arg, {x.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(y_arg, {x.dtype}));
  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(w_arg, {n, k}, "[N, K]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(y_arg, {m, n}, "[M, N]"));
  TIERCEL_RETURN_IF_ERROR(check_multiple(w_arg, 0, "N"));
  TIERCEL_RETURN_IF_ERROR(check_multiple(x_arg, 1, "K"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(w_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(y_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(w_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(y_arg));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(y_arg));
  if (bias != nullptr) {
    const Argument bias_arg{kOp, "bias", *bias};
    TIERCEL_RETURN_IF_ERROR(check_dtype(bias_arg, {x.dtype}));
    TIERCEL_RETURN_IF_ERROR(check_shape(bias_arg, {n}, "[N]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(bias_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(bias_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(bias_arg));
    if (reinterpret_cast<uintptr_t>(bias->data) % 8 != 0) {
      return Status::Unimplemented(
          mismatch(bias_arg, "start at a multiple of 8 bytes", "an address that does not"));
    }
  }
  if (m == 0) return Status();
  // The maps' own rules, said before a driver is asked for: any kernel's will do.
  const TensorMapSpec matrix{
      2, {64, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(matrix, x, kOp, "x"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(matrix, w, kOp, "weight"));
  return check_tensor_map(matrix, y, kOp, "out");
}

}  // namespace

namespace {

// What was asked for, what was tuned, or the least expected time.
Status decide(const TensorView& x, const TensorView& w, Activation activation, int multiprocessors,
              const LinearActConfig* config, LinearActChoice* choice) {
  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1];
  if (config != nullptr) {
    return linear_act_configure(*config, x.dtype, activation, m, n, k, multiprocessors, choice);
  }
  const LinearActConfig* tuned = linear_act_tuned().find({x.device_index, x.dtype, n, k}, m);
  // Tuned for another M, it may not suit this one.
  if (tuned != nullptr &&
      linear_act_configure(*tuned, x.dtype, activation, m, n, k, multiprocessors, choice).ok()) {
    return Status();
  }
  *choice = linear_act_choose(x.dtype, activation, m, n, k, multiprocessors);
  return Status();
}

}  // namespace

TunedTable<LinearActConfig>& linear_act_tuned() {
  static auto* table = new TunedTable<LinearActConfig>();  // never destroyed: threads may launch
  return *table;
}

Status linear_act_launch(const LinearActChoice& choice, const TensorView& x, const TensorView& w,
                         const TensorView* bias, const TensorView& y, void* stream) {
  const LinearActKernel& kernel = *choice.kernel;
  CUtensorMap x_map, w_map, y_map;
  // A split-K kernel loads only the rows of its tile: filling in others would cost time.
  TensorMapSpec x_spec = kernel.maps[0];
  if (kernel.variant.split_k) x_spec.box[0] = static_cast<uint32_t>(choice.rows);
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(x_spec, x, kOp, "x", &x_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[1], w, kOp, "weight", &w_map));
  const void* bias_data = bias == nullptr ? nullptr : bias->data;
  int32_t m = static_cast<int32_t>(x.shape[0]);
  int32_t n = static_cast<int32_t>(w.shape[0]);
  int32_t k = static_cast<int32_t>(x.shape[1]);
  int32_t group = choice.group;
  int32_t rows = choice.rows;
  void* y_data = y.data;

  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  if (kernel.variant.split_k) {
    config.cluster.x = static_cast<uint32_t>(choice.splits);
    void* args[] = {&x_map, &w_map, &bias_data, &y_data, &m, &n, &k, &rows};
    return kernel.kernel.launch(config, x.device_index, stream, args);
  }
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[2], y, kOp, "out", &y_map));
  config.cluster.x = static_cast<uint32_t>(kernel.variant.cluster);
  void* args[] = {&x_map, &w_map, &y_map, &bias_data, &m, &n, &k, &group};
  return kernel.kernel.launch(config, x.device_index, stream, args);
}

Status linear_act_plan(const TensorView& x, const TensorView& w, const TensorView* bias,
                       const TensorView& y, Activation activation, int multiprocessors,
                       const LinearActConfig* config, LinearActPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(x, w, bias, y));
  *plan = {"none", 0, 0, false, 0, 0, 0, 0, 0, 0, 0};
  if (x.shape[0] == 0) return Status();
  LinearActChoice choice;
  TIERCEL_RETURN_IF_ERROR(decide(x, w, activation, multiprocessors, config, &choice));
  const LinearActKernel& kernel = *choice.kernel;
  *plan = {kernel.kernel.name(),
           kernel.variant.tile_m,
           kernel.variant.tile_n,
           kernel.variant.pingpong,
           kernel.variant.split_k ? choice.splits : kernel.variant.cluster,
           choice.splits,
           choice.group,
           choice.rows,
           choice.blocks,
           kernel.block,
           kernel.dynamic_smem};
  return Status();
}

Status linear_act(const TensorView& x, const TensorView& w, const TensorView* bias,
                  const TensorView& y, Activation activation, const LinearActConfig* config,
                  void* stream) {
  TIERCEL_RETURN_IF_ERROR(check(x, w, bias, y));
  if (x.shape[0] == 0) return Status();
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(x.device_index, &multiprocessors));
  LinearActChoice choice;
  TIERCEL_RETURN_IF_ERROR(decide(x, w, activation, multiprocessors, config, &choice));
  return linear_act_launch(choice, x, w, bias, y, stream);
}

}  // namespace tiercel
