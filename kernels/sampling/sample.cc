// SPDX-License-Identifier: Apache-2.0
#include "kernels/sampling/sample.h"

#include <algorithm>
#include <string>

#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/row_matrix.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "sample";
constexpr int64_t kBitsPerWord = 32;

Status check_rest(const Argument& argument, const Argument& logits) {
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, logits));
  return check_cuda(argument);
}

// A value for each row, or the number for all.
template <typename T>
Status lay_out_parameter(const char* name, const TensorView* view, DType dtype, T of_all,
                         const Argument& logits, SampleParameter<T>* parameter) {
  *parameter = {nullptr, of_all};
  if (view == nullptr) return Status();
  const Argument argument{kOp, name, *view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {logits.view.shape[0]}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(argument, logits));
  parameter->of_rows = static_cast<const T*>(view->data);
  return Status();
}

// An int32 matrix with a row for each row of logits.
template <typename T>
Status lay_out_matrix(const char* name, const TensorView* view, int64_t columns, const char* shape,
                      const Argument& logits, const T** data) {
  if (view == nullptr) return Status();
  const Argument argument{kOp, name, *view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {logits.view.shape[0], columns}, shape));
  TIERCEL_RETURN_IF_ERROR(check_rest(argument, logits));
  *data = static_cast<const T*>(view->data);
  return Status();
}

Status lay_out_numbers(const SampleCall& call, const Argument& logits, SampleArgs* args) {
  const SampleNumbers& numbers = call.numbers;
  const auto of_float = [&](const char* name, const TensorView* view, float of_all,
                            SampleParameter<float>* parameter) {
    return lay_out_parameter(name, view, DType::kFloat32, of_all, logits, parameter);
  };
  TIERCEL_RETURN_IF_ERROR(
      of_float("temperatures", call.temperatures, numbers.temperature, &args->temperature));
  const int top_k = static_cast<int>(std::clamp<int64_t>(numbers.top_k, 0, INT32_MAX));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_parameter("top_ks", call.top_ks, DType::kInt32, top_k, logits, &args->top_k));
  TIERCEL_RETURN_IF_ERROR(of_float("top_ps", call.top_ps, numbers.top_p, &args->top_p));
  TIERCEL_RETURN_IF_ERROR(of_float("min_ps", call.min_ps, numbers.min_p, &args->min_p));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_parameter("seeds", call.seeds, DType::kInt64, numbers.seed, logits, &args->seed));
  TIERCEL_RETURN_IF_ERROR(lay_out_parameter("offsets", call.offsets, DType::kInt64, numbers.offset,
                                            logits, &args->offset));
  TIERCEL_RETURN_IF_ERROR(of_float("repetition_penalties", call.repetition_penalties,
                                   numbers.repetition, &args->repetition));
  TIERCEL_RETURN_IF_ERROR(
      of_float("presence_penalties", call.presence_penalties, numbers.presence, &args->presence));
  return of_float("frequency_penalties", call.frequency_penalties, numbers.frequency,
                  &args->frequency);
}

Status lay_out(const SampleCall& call, SampleArgs* args) {
  const Argument logits{kOp, "logits", *call.logits};
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(logits, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(logits, 2));
  if (call.logits->shape[1] == 0) {
    return Status::InvalidArgument(mismatch(logits, "have at least 1 column", "0"));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(logits));
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(join_rows(logits, &matrix));
  const int64_t most = INT32_MAX / 8;
  if (matrix.columns > most) {
    return Status::Unimplemented(std::string(kOp) + ": rows of up to " + std::to_string(most) +
                                 " logits are supported, got " + std::to_string(matrix.columns));
  }
  args->logits = static_cast<const char*>(call.logits->data);
  args->rows = matrix.rows;
  args->columns = static_cast<int>(matrix.columns);
  args->stride = matrix.rows == 1 ? 0 : matrix.row_stride * dtype_bytes(call.logits->dtype);
  args->segments = static_cast<int>(ceil_div(matrix.columns, kSampleSegment));
  args->words = static_cast<int>(ceil_div(matrix.columns, kBitsPerWord));

  TIERCEL_RETURN_IF_ERROR(lay_out_numbers(call, logits, args));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("counts", call.counts, args->columns, "[T, V]", logits, &args->counts));
  constexpr const char* kMask = "[T, ceil(V / 32)]";
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("prompt", call.prompt, args->words, kMask, logits, &args->prompt));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("allowed", call.allowed, args->words, kMask, logits, &args->allowed));

  const Argument tokens{kOp, "tokens", *call.tokens};
  TIERCEL_RETURN_IF_ERROR(check_dtype(tokens, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(tokens, {matrix.rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(tokens, logits));
  args->tokens = call.tokens->data;
  args->wide = call.tokens->dtype == DType::kInt64;
  if (call.logprobs == nullptr) return Status();
  const Argument logprobs{kOp, "logprobs", *call.logprobs};
  TIERCEL_RETURN_IF_ERROR(check_dtype(logprobs, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(logprobs, {matrix.rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(logprobs, logits));
  args->logprobs = static_cast<float*>(call.logprobs->data);
  return Status();
}

// Chooses how many blocks share a row.
Status prepare(const SampleCall& call, SampleArgs* args, SamplePlan* plan, const Kernel** kernel) {
  *plan = {"none", 0, 0, 0, 0};
  TIERCEL_RETURN_IF_ERROR(lay_out(call, args));
  if (args->rows == 0) return Status();
  const bool penalties = args->counts != nullptr || args->prompt != nullptr;
  const int64_t held = penalties ? dtype_bytes(DType::kFloat32) : dtype_bytes(call.logits->dtype);
  const int64_t tables = kSampleTableBytes + (args->logprobs == nullptr ? 0 : kSampleLogprobBytes);
  const auto each = [&](int64_t blocks) { return ceil_div(args->segments, blocks); };
  const auto part = [&](int64_t blocks) { return each(blocks) * kSampleSegment * held; };
  int64_t blocks = 1;
  while (blocks < kSampleBlocks && part(blocks) > kSamplePart) blocks *= 2;
  // Few rows are spread over more blocks, as long as each warp has a segment.
  while (blocks < kSampleBlocks && 2 * args->rows * blocks <= 3 * kDefaultMultiprocessors &&
         each(2 * blocks) >= kSampleThreads / 32) {
    blocks *= 2;
  }
  const int64_t smem = part(blocks) + args->segments * tables;
  if (smem > kSampleLargestSmem) {
    const int64_t per_segment = kSampleSegment * held / kSampleBlocks + tables;
    const int64_t most = (kSampleLargestSmem - kSampleSegment * held) / per_segment;
    return Status::Unimplemented(std::string(kOp) + ": rows of up to " +
                                 std::to_string(most * kSampleSegment) +
                                 " logits are supported, got " + std::to_string(args->columns));
  }
  if (args->rows * blocks > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too many rows for one launch, got " +
                                 std::to_string(args->rows));
  }
  args->blocks = static_cast<uint32_t>(blocks);
  args->segments_per_block = static_cast<int>(each(blocks));
  *kernel = &KernelTable(sample_kernels)
                 .find([&](const SampleKernel& one) {
                   return one.dtype == call.logits->dtype && one.penalties == penalties;
                 })
                 ->kernel;
  *plan = {(*kernel)->name(), static_cast<int>(blocks), static_cast<unsigned>(args->rows * blocks),
           kSampleThreads, static_cast<unsigned>(smem)};
  return Status();
}

}  // namespace

Status sample_plan(const SampleCall& call, SamplePlan* plan) {
  SampleArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status sample(const SampleCall& call, void* stream) {
  SampleArgs args{};
  SamplePlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.cluster.x = args.blocks;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  void* arguments[] = {&args};
  return kernel->launch(config, call.logits->device_index, stream, arguments);
}

Status sample_load(int device) { return KernelTable(sample_kernels).load_all(device); }

}  // namespace tiercel
