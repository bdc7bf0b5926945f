// SPDX-License-Identifier: Apache-2.0
#include "kernels/toy/toy.h"

#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/toy/toy_kernels.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "toy_shift";
constexpr int64_t kThreads = 256;

Status prepare(const ToyShiftCall& call, ToyShiftArgs* args, LaunchConfig* config) {
  const Argument x{kOp, "x", *call.x};
  const Argument out{kOp, "out", *call.out};
  for (const Argument& each : {x, out}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(each, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_cuda(each));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(each));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(out, x));
  TIERCEL_RETURN_IF_ERROR(check_rank(out, call.x->ndim));
  int64_t count = 1;
  for (int i = 0; i < call.x->ndim; ++i) {
    if (call.x->shape[i] != call.out->shape[i]) {
      return Status::InvalidArgument(
          mismatch(out, "have x's shape", shape_text(call.out->shape, call.out->ndim)));
    }
    count *= call.x->shape[i];
  }
  const int64_t grid = ceil_div(count, kThreads);
  if (grid > INT32_MAX) return Status::Unimplemented(std::string(kOp) + ": too many elements");
  *args = {static_cast<const float*>(call.x->data), static_cast<float*>(call.out->data), count,
           static_cast<float>(call.amount)};
  config->grid = {static_cast<uint32_t>(grid), 1, 1};
  config->block = {static_cast<uint32_t>(kThreads), 1, 1};
  config->dependent = true;
  return Status();
}

const Kernel& kernel() { return KernelTable(toy_shift_kernels).begin()->kernel; }

}  // namespace

Status toy_shift_plan(const ToyShiftCall& call, ToyShiftPlan* plan) {
  ToyShiftArgs args;
  LaunchConfig config;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &config));
  *plan = {kernel().name(), config.grid.x, config.block.x};
  if (args.count == 0) *plan = {"none", 0, 0};
  return Status();
}

Status toy_shift(const ToyShiftCall& call, void* stream) {
  ToyShiftArgs args;
  LaunchConfig config;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &config));
  if (args.count == 0) return Status();
  void* pointers[] = {&args};
  return kernel().launch(config, call.x->device_index, stream, pointers);
}

}  // namespace tiercel
