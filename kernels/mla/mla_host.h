// SPDX-License-Identifier: Apache-2.0
// Checks and launches that mla_decode and mla_sparse share.
#ifndef KERNELS_MLA_MLA_HOST_H_
#define KERNELS_MLA_MLA_HOST_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "kernels/mla/mla_decode.h"
#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr int64_t kMost = 0x7fffffff;
inline constexpr int kFewParts = 8;  // of a sequence

inline Status unsupported(const Argument& argument, const std::string& expected,
                          const std::string& got) {
  return Status::Unimplemented(mismatch(argument, expected + " for the precompiled kernels", got));
}

// The scale of a float8 cache, or null.
inline Status check_kv_scale(const Argument& q, const Argument& cache, const TensorView* view) {
  if (view == nullptr) return Status();
  const Argument scale{q.op, "kv_scale", *view};
  if (cache.view.dtype != DType::kFloat8E4M3) {
    return Status::InvalidArgument(
        mismatch(scale, "be None for a cache that is not float8_e4m3fn", "a tensor"));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(scale, {1}, "[1]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale, q));
  return check_cuda(scale);
}

// Alignment for copies of `bytes`.
inline Status check_layout(const Argument& argument, int64_t bytes) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int i = 0; i < last; ++i) {
    if (view.shape[i] > 1) aligned &= view.strides[i] * dtype_bytes(view.dtype) % bytes == 0;
  }
  if (aligned && view.strides[last] == 1) return Status();
  return unsupported(
      argument,
      "have contiguous rows that start at multiples of " + std::to_string(bytes) + " bytes",
      "strides " + shape_text(view.strides, view.ndim));
}

// The steps of 32-bit indices.
inline Status check_steps(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  if (view.shape[last] <= 1 || std::abs(view.strides[last]) <= kMost / 4) return Status();
  return unsupported(argument, "have elements that are less than 2 GiB apart",
                     "strides " + shape_text(view.strides, view.ndim));
}

inline MlaLayout layout_of(const TensorView& cache) {
  switch (cache.dtype) {
    case DType::kFloat8E4M3:
      return MlaLayout::kFloat8;
    case DType::kUInt8:
      return MlaLayout::kPacked;
    default:
      return MlaLayout::kSame;
  }
}

inline const Kernel& combine_kernel(DType dtype, const MlaDecodeArgs& args) {
  // A sequence has about lanes / batch parts.
  const bool many = args.lanes >= kMlaCombineParts * kMlaCombineGroups * args.batch;
  return KernelTable(mla_combine_kernels)
      .find([&](const auto& kernel) { return kernel.dtype == dtype && kernel.many == many; })
      ->kernel;
}

inline void set_strides(const TensorView& view, int64_t (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = view.strides[i] * dtype_bytes(view.dtype);
}

// The stride of an int32 tensor's last dimension, in bytes.
inline int32_t step_of(const TensorView& view) {
  const int last = view.ndim - 1;
  return view.shape[last] > 1 ? static_cast<int32_t>(view.strides[last] * 4) : 0;
}

// Floats of the parts, and of their sums.
inline int64_t lines(const MlaDecodeArgs& args) {
  const int64_t places = args.part_steps > 0 ? 1 : 2;
  return places * args.lanes * args.row_blocks * args.part_rows;
}

// That lanes may share.
inline int64_t sequences(const MlaDecodeArgs& args) {
  return args.by_sequence ? args.batch : args.lanes - 1;
}

// Lanes that fill the device; each has one of `units` at least.
inline int lanes_of(const MlaDecodeArgs& args, int multiprocessors, int64_t units) {
  return static_cast<int>(std::clamp<int64_t>(multiprocessors / args.row_blocks, 1, units));
}

// The launch of `args->lanes`. If none of them can have a part of a sequence, nothing is left to
// combine.
inline void plan_shares(bool split, const Kernel& kernel, DType dtype, uint32_t shared,
                        MlaDecodeArgs* args, MlaDecodePlan* plan) {
  const bool parts = args->part_steps > 0, combined = split && (parts || args->lanes > 1);
  args->by_sequence = parts || args->batch < args->lanes;
  // A sequence has about lanes / batch parts.
  const bool many = parts || args->lanes >= kFewParts * args->batch;
  args->row_groups = many ? kMlaCombineGroups : 1;
  *plan = {kernel.name(),
           combined ? combine_kernel(dtype, *args).name() : "none",
           kMlaRows,
           kMlaStep,
           args->copy_rows,
           args->lanes,
           static_cast<unsigned>(args->lanes) * static_cast<unsigned>(args->row_blocks),
           kMlaThreads,
           shared,
           combined ? lines(*args) * (kMlaLatent + 2) + 4 * sequences(*args) : 0};
}

inline Status check_workspace(const Argument& workspace, const Argument& q, int64_t needed) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(workspace, 1));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  if (workspace.view.shape[0] >= needed) return Status();
  return Status::InvalidArgument(mismatch(workspace, "have " + std::to_string(needed) + " elements",
                                          shape_text(workspace.view.shape, 1)));
}

// Launches `kernel` with `pointers`, whose first is `args`, and then what combines parts.
inline Status launch_and_combine(const Kernel& kernel, DType dtype, const MlaDecodePlan& plan,
                                 MlaDecodeArgs* args, void** pointers, int device, float* workspace,
                                 void* stream) {
  const bool combined = plan.workspace > 0;
  if (combined) {
    args->partial = workspace;
    float* const sums = workspace + lines(*args) * kMlaLatent;
    args->partial_sums = reinterpret_cast<float2*>(sums);
    args->shared = reinterpret_cast<int4*>(sums + 2 * lines(*args));
  }
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  config.cluster.x = args->pair ? 2 : 1;
  TIERCEL_RETURN_IF_ERROR(kernel.launch(config, device, stream, pointers));
  if (!combined) return Status();
  config.cluster.x = 1;
  config.grid.x = static_cast<unsigned>(sequences(*args));
  config.grid.y =
      static_cast<unsigned>(std::min(ceil_div(args->rows * args->row_groups, kMlaCombineGroups),
                                     ceil_div(kMlaCombineBlocks, static_cast<int>(config.grid.x))));
  config.block.x = kMlaCombineGroups * kMlaLatent / 4;
  config.dynamic_smem = 0;
  return combine_kernel(dtype, *args).launch(config, device, stream, pointers);
}

// A call with the workspace that it has. If one is needed and null, launches nothing and sets
// `*needed`.
template <typename Launch, typename Call>
Status run_with_workspace(const char* op, const Call& call, void* stream, int64_t* needed) {
  *needed = 0;
  Launch launch;
  TIERCEL_RETURN_IF_ERROR(launch.prepare(call));
  if (launch.workspace() == 0) return launch.run(nullptr, stream);
  if (call.workspace == nullptr) {
    *needed = launch.workspace();
    return Status();
  }
  const Argument workspace{op, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_workspace(workspace, {op, "q", *call.q}, launch.workspace()));
  return launch.run(static_cast<float*>(workspace.view.data), stream);
}

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_HOST_H_
