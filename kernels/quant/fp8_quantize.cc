// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/fp8_quantize.h"

#include <algorithm>
#include <string>

#include "kernels/quant/fp8_quantize_kernels.h"
#include "kernels/quant/quant_checks.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "fp8_quantize";
constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr int64_t kMaxEights = 1 << 30;  // per row, so that a thread's next index fits an int

// The kernels of a call, in order, and their arguments.
struct Choice {
  Fp8QuantizeArgs args{};
  const Kernel* first = nullptr;  // launched before the other, or null
  LaunchConfig first_config;
  const Kernel* kernel = nullptr;
  LaunchConfig config;
  int vectors = 0;
};

Status check(const TensorView& x, const TensorView& q, const TensorView& scale,
             const TensorView* partial, Fp8Granularity granularity) {
  const Argument x_arg{kOp, "x", x};
  const Argument q_arg{kOp, "q", q};
  const Argument scale_arg{kOp, "scale", scale};
  TIERCEL_RETURN_IF_ERROR(check_rank(x_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(x_arg, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q_arg, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale_arg, {DType::kFloat32}));
  const int64_t rows = x.shape[0];
  const int64_t columns = x.shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(q_arg, {rows, columns}, "[T, K]"));
  const int64_t groups = ceil_div(columns, 128);
  switch (granularity) {
    case Fp8Granularity::kTensor:
      TIERCEL_RETURN_IF_ERROR(check_shape(scale_arg, {1, 1}, "[1, 1]"));
      break;
    case Fp8Granularity::kRow:
      TIERCEL_RETURN_IF_ERROR(check_shape(scale_arg, {rows, 1}, "[T, 1]"));
      break;
    case Fp8Granularity::kGroup:
      TIERCEL_RETURN_IF_ERROR(check_shape(scale_arg, {rows, groups}, "[T, K / 128]"));
      break;
    case Fp8Granularity::kBlock:
      TIERCEL_RETURN_IF_ERROR(
          check_shape(scale_arg, {ceil_div(rows, 128), groups}, "[T / 128, K / 128]"));
      break;
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(q_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(scale_arg));
  if (partial != nullptr) {
    const Argument partial_arg{kOp, "partial", *partial};
    TIERCEL_RETURN_IF_ERROR(check_dtype(partial_arg, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(partial_arg, {kFp8MaxPartials}, "[partials]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(partial_arg, x_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(partial_arg));
  }
  if (columns % 8 != 0) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": rows must hold a multiple of 8 values, got " +
                                 std::to_string(columns));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows_of_vectors(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_aligned(q_arg, 8));
  return check_contiguous(scale_arg);
}

void set(LaunchConfig* config, int64_t grid, int block) {
  config->grid.x = static_cast<uint32_t>(grid);
  config->block.x = static_cast<uint32_t>(block);
  config->dependent = true;
}

// The most eights per thread in the kernels that keep them in registers.
int most_vectors(DType dtype) { return dtype == DType::kFloat32 ? 4 : 8; }

void choose_row(DType dtype, Choice* choice) {
  const int eights = choice->args.eights;
  const int most = most_vectors(dtype);
  // (Measured on an H200: two eights per thread are fastest, up to the largest block.)
  const int vectors_of_most = eights <= 2 * kFp8RowMaxThreads ? 2 : most;
  int vectors = eights <= 128 ? 1 : vectors_of_most;
  int threads = static_cast<int>(ceil_div(ceil_div(eights, vectors), 32) * 32);
  if (threads > kFp8RowMaxThreads) {
    vectors = 0;
    threads = kFp8RowMaxThreads;
  }
  // More blocks than are resident at once; for longer rows, a block each is as fast.
  const bool by_warps =
      choice->args.rows > kDefaultMultiprocessors * 2048 / std::max(threads, 32) &&
      eights <= kFp8ShortRow;
  if (by_warps) {
    vectors = eights <= 32 ? 1 : eights <= 64 ? 2 : most;
    threads = 32;
    choice->config.block.y = kFp8RowsPerBlock;
  }
  choice->vectors = vectors;
  choice->kernel =
      fp8_quantize_kernel(vectors == 0 ? Fp8Kernel::kLongRow : Fp8Kernel::kRow, dtype, vectors);
  set(&choice->config, ceil_div(choice->args.rows, choice->config.block.y), std::max(threads, 32));
}

void choose_tensor(DType dtype, bool given, Choice* choice) {
  const int64_t eights = choice->args.rows * choice->args.eights;
  const int most = most_vectors(dtype);
  const int64_t threads = kFp8SmallCluster * kFp8SmallThreads;
  // (Measured on an H200: for more, two kernels on all multiprocessors are faster.)
  if (!given && eights <= threads * most / 4) {
    choice->vectors = most / 4;
    choice->kernel = fp8_quantize_kernel(Fp8Kernel::kSmallTensor, dtype, choice->vectors);
    set(&choice->config, kFp8SmallCluster, kFp8SmallThreads);
    choice->config.cluster.x = kFp8SmallCluster;
    return;
  }
  choice->vectors = kFp8TensorVectors;
  choice->kernel = fp8_quantize_kernel(Fp8Kernel::kTensor, dtype, 0);
  set(&choice->config, ceil_div(eights, kFp8TensorThreads * kFp8TensorVectors), kFp8TensorThreads);
  if (given) return;
  // Four blocks fill a multiprocessor.
  choice->args.partials = static_cast<int>(
      std::min<int64_t>(ceil_div(eights, kFp8LargestThreads), 4 * kDefaultMultiprocessors));
  choice->first = fp8_quantize_kernel(Fp8Kernel::kLargest, dtype, 0);
  set(&choice->first_config, choice->args.partials, kFp8LargestThreads);
}

Status choose(const TensorView& x, const TensorView& q, const TensorView& scale,
              const TensorView* partial, Fp8Granularity granularity, bool given, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(x, q, scale, partial, granularity));
  Fp8QuantizeArgs& args = choice->args;
  args.x = static_cast<const char*>(x.data);
  args.row_bytes = x.strides[0] * dtype_bytes(x.dtype);
  args.q = static_cast<char*>(q.data);
  args.scale = static_cast<float*>(scale.data);
  args.given = given ? args.scale : nullptr;
  args.partial = partial != nullptr ? static_cast<float*>(partial->data) : nullptr;
  args.rows = x.shape[0];
  args.columns = x.shape[1];
  args.flat = is_flat(x);
  if (args.columns / 8 > kMaxEights) {
    return Status::Unimplemented(std::string(kOp) + ": rows hold at most 2^33 values, got " +
                                 std::to_string(args.columns));
  }
  args.eights = static_cast<int>(args.columns / 8);
  const int64_t eights = args.rows * args.eights;
  switch (granularity) {
    case Fp8Granularity::kTensor:
      choose_tensor(x.dtype, given, choice);
      if (choice->first != nullptr && partial == nullptr) {
        return Status::InvalidArgument(std::string(kOp) + ": `partial` must be given here");
      }
      break;
    case Fp8Granularity::kRow:
      choose_row(x.dtype, choice);
      if (args.rows > kMaxGrid) choice->config.grid.x = 0;
      break;
    case Fp8Granularity::kGroup: {
      constexpr int64_t kPerBlock = kFp8GroupThreads * kFp8GroupVectors;
      args.flat = args.flat && args.columns % 128 == 0;
      args.row_blocks = static_cast<int>(ceil_div(args.eights, kPerBlock));
      const int64_t grid =
          args.flat ? ceil_div(eights, kPerBlock) : args.rows * std::max(args.row_blocks, 1);
      choice->vectors = kFp8GroupVectors;
      choice->kernel = fp8_quantize_kernel(Fp8Kernel::kGroup, x.dtype, 0);
      set(&choice->config, grid > kMaxGrid ? 0 : grid, kFp8GroupThreads);
      break;
    }
    case Fp8Granularity::kBlock: {
      args.row_blocks = static_cast<int>(ceil_div(args.columns, 128));
      const int64_t grid = ceil_div(args.rows, 128) * args.row_blocks;
      choice->vectors = 128 * 16 / kFp8BlockThreads;
      choice->kernel = fp8_quantize_kernel(Fp8Kernel::kBlock, x.dtype, 0);
      set(&choice->config, grid > kMaxGrid ? 0 : grid, kFp8BlockThreads);
      break;
    }
  }
  if (eights > 0 && choice->config.grid.x == 0) {
    return Status::Unimplemented(std::string(kOp) + ": too many rows for one launch, got " +
                                 std::to_string(args.rows));
  }
  args.prefetch_blocks = resident_blocks(choice->config.block);
  args.aligned16 = (reinterpret_cast<uintptr_t>(args.q) | (args.flat ? 0 : args.columns)) % 16 == 0;
  return Status();
}

Status launch(const Choice& choice, int device, void* stream) {
  void* pointers[] = {const_cast<Fp8QuantizeArgs*>(&choice.args)};
  if (choice.first != nullptr) {
    TIERCEL_RETURN_IF_ERROR(choice.first->launch(choice.first_config, device, stream, pointers));
  }
  return choice.kernel->launch(choice.config, device, stream, pointers);
}

}  // namespace

Status fp8_quantize_plan(const Fp8QuantizeCall& call, Fp8QuantizePlan* plan) {
  const TensorView& scale = *call.scale;
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(
      choose(*call.x, *call.q, scale, call.partial, call.granularity, false, &choice));
  *plan = {"none", 0, 0, 0, 0};
  if (scale.shape[0] * scale.shape[1] == 0) return Status();
  *plan = {choice.kernel->name(), choice.first != nullptr ? 2 : 1, choice.vectors,
           int64_t{choice.config.grid.x}, choice.config.block.x * choice.config.block.y};
  return Status();
}

Status fp8_quantize(const Fp8QuantizeCall& call, void* stream) {
  const TensorView& scale = *call.scale;
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(
      choose(*call.x, *call.q, scale, call.partial, call.granularity, false, &choice));
  if (scale.shape[0] * scale.shape[1] == 0) return Status();  // of nothing there is no scale
  return launch(choice, call.x->device_index, stream);
}

Status fp8_quantize_between(const Fp8QuantizeCall& call, void* stream) {
  const TensorView& x = *call.x;
  const TensorView* counters = call.counters;
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(
      choose(x, *call.q, *call.scale, nullptr, call.granularity, false, &choice));
  if (counters != nullptr) {
    const Argument argument{kOp, "counters", *counters};
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(argument, {kFp8Counters}, "[4]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
    TIERCEL_RETURN_IF_ERROR(check_same_device(argument, {kOp, "x", x}));
    TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
    if (call.x_is_older) {
      return Status::InvalidArgument(std::string(kOp) + ": `counters` may be in use: x is older");
    }
    choice.args.counters = static_cast<int32_t*>(counters->data);
  }
  if (choice.args.rows == 0) return Status();
  choice.args.waits_last = call.x_is_older;
  choice.args.starts_next = call.starts_next;
  return launch(choice, x.device_index, stream);
}

Status fp8_quantize_static(const Fp8QuantizeCall& call, void* stream) {
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(
      choose(*call.x, *call.q, *call.scale, nullptr, Fp8Granularity::kTensor, true, &choice));
  if (choice.args.rows * choice.args.columns == 0) return Status();
  return launch(choice, call.x->device_index, stream);
}

Status fp8_quantize_load(int device) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const int most = most_vectors(dtype);
    for (int vectors : {1, 2, most}) {
      TIERCEL_RETURN_IF_ERROR(fp8_quantize_kernel(Fp8Kernel::kRow, dtype, vectors)->load(device));
    }
    TIERCEL_RETURN_IF_ERROR(
        fp8_quantize_kernel(Fp8Kernel::kSmallTensor, dtype, most / 4)->load(device));
    for (Fp8Kernel kind : {Fp8Kernel::kLongRow, Fp8Kernel::kGroup, Fp8Kernel::kBlock,
                           Fp8Kernel::kLargest, Fp8Kernel::kTensor}) {
      TIERCEL_RETURN_IF_ERROR(fp8_quantize_kernel(kind, dtype, 0)->load(device));
    }
  }
  return Status();
}

}  // namespace tiercel
