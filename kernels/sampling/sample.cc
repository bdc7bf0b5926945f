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

// The rows that a call's parameters belong to.
struct Owners {
  int64_t count;
  const char* shape;
};

// A value for each owner, or the number for all.
template <typename T>
Status lay_out_parameter(const char* name, const TensorView* view, DType dtype, T of_all,
                         const Argument& logits, const Owners& owners,
                         SampleParameter<T>* parameter) {
  *parameter = {nullptr, of_all};
  if (view == nullptr) return Status();
  const Argument argument{logits.op, name, *view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {owners.count}, owners.shape));
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

Status lay_out_numbers(const SampleCall& call, const Argument& logits, const Owners& owners,
                       SampleArgs* args) {
  const SampleNumbers& numbers = call.numbers;
  const auto of_float = [&](const char* name, const TensorView* view, float of_all,
                            SampleParameter<float>* parameter) {
    return lay_out_parameter(name, view, DType::kFloat32, of_all, logits, owners, parameter);
  };
  TIERCEL_RETURN_IF_ERROR(
      of_float("temperatures", call.temperatures, numbers.temperature, &args->temperature));
  const int top_k = static_cast<int>(std::clamp<int64_t>(numbers.top_k, 0, INT32_MAX));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_parameter("top_ks", call.top_ks, DType::kInt32, top_k, logits, owners, &args->top_k));
  TIERCEL_RETURN_IF_ERROR(of_float("top_ps", call.top_ps, numbers.top_p, &args->top_p));
  TIERCEL_RETURN_IF_ERROR(of_float("min_ps", call.min_ps, numbers.min_p, &args->min_p));
  TIERCEL_RETURN_IF_ERROR(lay_out_parameter("seeds", call.seeds, DType::kInt64, numbers.seed,
                                            logits, owners, &args->seed));
  TIERCEL_RETURN_IF_ERROR(lay_out_parameter("offsets", call.offsets, DType::kInt64, numbers.offset,
                                            logits, owners, &args->offset));
  TIERCEL_RETURN_IF_ERROR(of_float("repetition_penalties", call.repetition_penalties,
                                   numbers.repetition, &args->repetition));
  TIERCEL_RETURN_IF_ERROR(
      of_float("presence_penalties", call.presence_penalties, numbers.presence, &args->presence));
  return of_float("frequency_penalties", call.frequency_penalties, numbers.frequency,
                  &args->frequency);
}

Status lay_out_logits(const SampleCall& call, const Argument& logits, int rank,
                      const Owners& owners, SampleArgs* args) {
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(logits, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(logits, rank));
  if (call.logits->shape[rank - 1] == 0) {
    return Status::InvalidArgument(mismatch(logits, "have at least 1 column", "0"));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(logits));
  RowMatrix matrix;
  TIERCEL_RETURN_IF_ERROR(join_rows(logits, &matrix));
  const int64_t most = INT32_MAX / 8;
  if (matrix.columns > most) {
    return Status::Unimplemented(std::string(logits.op) + ": rows of up to " +
                                 std::to_string(most) + " logits are supported, got " +
                                 std::to_string(matrix.columns));
  }
  args->logits = static_cast<const char*>(call.logits->data);
  args->rows = matrix.rows;
  args->columns = static_cast<int>(matrix.columns);
  args->stride = matrix.rows == 1 ? 0 : matrix.row_stride * dtype_bytes(call.logits->dtype);
  args->segments = static_cast<int>(ceil_div(matrix.columns, kSampleSegment));
  args->words = static_cast<int>(ceil_div(matrix.columns, kBitsPerWord));

  return lay_out_numbers(call, logits, owners, args);
}

// The results of the k tokens with the largest logits; `args` has the row's already.
Status lay_out_top(const SampleCall& call, const Argument& logits, TopLogprobsArgs* args) {
  args->k = 0;
  if (call.top_tokens == nullptr && call.top_logprobs == nullptr) return Status();
  if (call.top_tokens == nullptr || call.top_logprobs == nullptr) {
    return Status::InvalidArgument(
        "sample: `top_tokens` and `top_logprobs` must be given together");
  }
  const Argument tokens{kOp, "top_tokens", *call.top_tokens};
  TIERCEL_RETURN_IF_ERROR(check_dtype(tokens, {call.tokens->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_rank(tokens, 2));
  const int64_t k = call.top_tokens->shape[1];
  if (k < 1) {
    return Status::InvalidArgument(mismatch(tokens, "have at least 1 column", std::to_string(k)));
  }
  if (k > kTopLogprobs) {
    return Status::Unimplemented("sample: up to " + std::to_string(kTopLogprobs) +
                                 " top log-probabilities are supported, got " + std::to_string(k));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(tokens, {args->rows, k}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(tokens, logits));
  const Argument logprobs{kOp, "top_logprobs", *call.top_logprobs};
  TIERCEL_RETURN_IF_ERROR(check_dtype(logprobs, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(logprobs, {args->rows, k}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(logprobs, logits));
  args->k = static_cast<int>(k);
  args->top_tokens = call.top_tokens->data;
  args->top_logprobs = static_cast<float*>(call.top_logprobs->data);
  return Status();
}

Status lay_out(const SampleCall& call, TopLogprobsArgs* args) {
  const Argument logits{kOp, "logits", *call.logits};
  const Owners owners{call.logits->ndim > 0 ? call.logits->shape[0] : 0, "[T]"};
  TIERCEL_RETURN_IF_ERROR(lay_out_logits(call, logits, 2, owners, args));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("counts", call.counts, args->columns, "[T, V]", logits, &args->counts));
  constexpr const char* kMask = "[T, ceil(V / 32)]";
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("prompt", call.prompt, args->words, kMask, logits, &args->prompt));
  TIERCEL_RETURN_IF_ERROR(
      lay_out_matrix("allowed", call.allowed, args->words, kMask, logits, &args->allowed));

  const Argument tokens{kOp, "tokens", *call.tokens};
  TIERCEL_RETURN_IF_ERROR(check_dtype(tokens, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(tokens, {args->rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(tokens, logits));
  args->tokens = call.tokens->data;
  args->wide = call.tokens->dtype == DType::kInt64;
  if (call.logprobs != nullptr) {
    const Argument logprobs{kOp, "logprobs", *call.logprobs};
    TIERCEL_RETURN_IF_ERROR(check_dtype(logprobs, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(logprobs, {args->rows}, "[T]"));
    TIERCEL_RETURN_IF_ERROR(check_rest(logprobs, logits));
    args->logprobs = static_cast<float*>(call.logprobs->data);
  }
  return lay_out_top(call, logits, args);
}

// Chooses how many blocks share a row.
Status spread(const char* op, const SampleCall& call, bool penalties, SampleArgs* args,
              SamplePlan* plan) {
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
    return Status::Unimplemented(std::string(op) + ": rows of up to " +
                                 std::to_string(most * kSampleSegment) +
                                 " logits are supported, got " + std::to_string(args->columns));
  }
  if (args->rows * blocks > INT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too many rows for one launch, got " +
                                 std::to_string(args->rows));
  }
  args->blocks = static_cast<uint32_t>(blocks);
  args->segments_per_block = static_cast<int>(each(blocks));
  *plan = {"", static_cast<int>(blocks), static_cast<unsigned>(args->rows * blocks), kSampleThreads,
           static_cast<unsigned>(smem)};
  return Status();
}

bool has_filters(const SampleCall& call, const SampleArgs& args) {
  const SampleNumbers& numbers = call.numbers;
  return call.top_ks != nullptr || call.top_ps != nullptr || call.min_ps != nullptr ||
         (numbers.top_k > 0 && numbers.top_k < args.columns) || numbers.top_p < 1.0f ||
         numbers.min_p > 0.0f;
}

// Measured: where top-k leaves a few segments to read again, long rows, of which a multiprocessor
// holds few, gain; the last round of rows must be nearly full.
bool streams_filtered(const SampleCall& call, const SampleArgs& args) {
  const int64_t rounds = ceil_div(args.rows, int64_t{kDefaultMultiprocessors});
  return call.top_ks == nullptr && call.numbers.top_k > 0 && call.numbers.top_k <= kStreamTopK &&
         args.segments >= kStreamFilteredSegments &&
         5 * args.rows >= 4 * rounds * kDefaultMultiprocessors;
}

// The kernel of rows without penalties and mask that copies can bring, or null. Few bytes are
// sooner read by more blocks; float16 logits, and filters of float32 ones, are too rare for a
// kernel.
const SampleStreamKernel* streams(const SampleCall& call, const SampleArgs& args, bool penalties) {
  const DType dtype = call.logits->dtype;
  const bool filters = has_filters(call, args);
  if (filters && !streams_filtered(call, args)) return nullptr;
  const int64_t bytes = args.rows * args.columns * dtype_bytes(dtype);
  if (penalties || args.allowed != nullptr || args.segments > kStreamSegments ||
      bytes < kStreamLeast || reinterpret_cast<uintptr_t>(args.logits) % 16 != 0 ||
      args.stride % 16 != 0) {
    return nullptr;
  }
  return KernelTable(sample_stream_kernels).find([&](const SampleStreamKernel& one) {
    return one.dtype == dtype && one.filters == filters;
  });
}

// Chooses how many blocks share a row: those that make clearly the fewest rounds of rows.
void stream(const SampleStreamKernel& kernel, SampleArgs* args, SamplePlan* plan) {
  const auto fit = [](int64_t blocks) {
    // Clusters of more than two blocks do not fill all multiprocessors.
    return (blocks > 2 ? kClusteredMultiprocessors : kDefaultMultiprocessors) / blocks;
  };
  int64_t best = 0, least = 0;
  const int64_t most = kernel.filters ? 1 : kSampleBlocks;
  for (int64_t blocks = 1; blocks <= most; blocks *= 2) {
    if (blocks > 1 && ceil_div(args->segments, blocks) < kStreamLeastSegments) break;
    const int64_t cost = ceil_div(args->rows, fit(blocks)) * kSampleBlocks / blocks;
    if (best == 0 || 8 * cost < 7 * least) best = blocks, least = cost;
  }
  args->blocks = static_cast<uint32_t>(best);
  args->segments_per_block = static_cast<int>(ceil_div(args->segments, best));
  int64_t smem = kStreamRing + args->segments * kStreamTableBytes;
  if (kernel.filters) {
    smem += kSampleThreads / 32 * kStagedSegments * kSampleSegment * dtype_bytes(kernel.dtype);
  }
  *plan = {"", static_cast<int>(best),
           static_cast<unsigned>(std::min(args->rows, fit(best)) * best), kernel.threads,
           static_cast<unsigned>(smem)};
}

// The launches of a call.
struct Launches {
  TopLogprobsArgs args{};  // of the second launch, if there is one
  SampleArgs draw{};
  SamplePlan top{"none", 0, 0, 0, 0}, plan{"none", 0, 0, 0, 0};
  const Kernel* kernel = nullptr;
};

Status prepare(const SampleCall& call, Launches* made) {
  TopLogprobsArgs& args = made->args;
  TIERCEL_RETURN_IF_ERROR(lay_out(call, &args));
  if (args.rows == 0) return Status();
  const bool penalties = args.counts != nullptr || args.prompt != nullptr;
  TIERCEL_RETURN_IF_ERROR(spread(kOp, call, penalties, &args, &made->top));
  made->draw = args;
  made->plan = made->top;
  const DType dtype = call.logits->dtype;
  const SampleStreamKernel* streamed = streams(call, args, penalties);
  if (streamed != nullptr) {
    stream(*streamed, &made->draw, &made->plan);
    made->kernel = &streamed->kernel;
  } else {
    made->kernel = &KernelTable(sample_kernels)
                        .find([&](const SampleKernel& one) {
                          return one.dtype == dtype && one.penalties == penalties;
                        })
                        ->kernel;
  }
  made->plan.kernel = made->kernel->name();
  return Status();
}

LaunchConfig config_of(const SamplePlan& plan) {
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.cluster.x = static_cast<uint32_t>(plan.blocks_per_row);
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  return config;
}

}  // namespace

Status sample_plan(const SampleCall& call, SamplePlan* plan) {
  Launches made;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &made));
  *plan = made.plan;
  return Status();
}

Status sample(const SampleCall& call, void* stream) {
  Launches made;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &made));
  if (made.kernel == nullptr) return Status();
  const int device = call.logits->device_index;
  void* draw[] = {&made.draw};
  TIERCEL_RETURN_IF_ERROR(made.kernel->launch(config_of(made.plan), device, stream, draw));
  if (made.args.k == 0) return Status();
  LaunchConfig config = config_of(made.top);
  config.dynamic_smem = static_cast<unsigned>(made.args.segments * 2 * sizeof(float));
  void* top[] = {&made.args};
  return KernelTable(top_logprobs_kernels)
      .find([&](const TopLogprobsKernel& one) { return one.dtype == call.logits->dtype; })
      ->kernel.launch(config, device, stream, top);
}

Status sample_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(sample_kernels).load_all(device));
  TIERCEL_RETURN_IF_ERROR(KernelTable(sample_stream_kernels).load_all(device));
  return KernelTable(top_logprobs_kernels).load_all(device);
}

namespace {

constexpr const char* kVerifyOp = "verify_draft";

struct Verification {
  VerifyArgs draw{};
  VerifyTreeArgs compare{};  // parents are null for a chain
  SamplePlan plan{"none", 0, 0, 0, 0};
};

Status lay_out_tree(const VerifyDraftCall& call, const Argument& logits, int64_t sequences,
                    int64_t count, VerifyTreeArgs* args) {
  if (call.parents == nullptr && call.path == nullptr) return Status();
  if (call.parents == nullptr || call.path == nullptr) {
    return Status::InvalidArgument("verify_draft: `parents` and `path` must be given together");
  }
  const Argument parents{kVerifyOp, "parents", *call.parents};
  const Argument path{kVerifyOp, "path", *call.path};
  for (const Argument& argument : {parents, path}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(argument, {sequences, count}, "[B, S]"));
    TIERCEL_RETURN_IF_ERROR(check_rest(argument, logits));
  }
  if (count > kTreeNodes) {
    return Status::Unimplemented("verify_draft: trees of up to " + std::to_string(kTreeNodes) +
                                 " nodes are supported, got " + std::to_string(count));
  }
  args->parents = static_cast<const int*>(call.parents->data);
  args->path = static_cast<int*>(call.path->data);
  args->dtype = call.sample.logits->dtype;
  return Status();
}

Status prepare(const VerifyDraftCall& call, Verification* made) {
  const SampleCall& sample = call.sample;
  const Argument logits{kVerifyOp, "logits", *sample.logits};
  const Argument draft{kVerifyOp, "draft_tokens", *call.draft};
  TIERCEL_RETURN_IF_ERROR(check_dtype(draft, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_rank(draft, 2));
  const int64_t sequences = call.draft->shape[0], count = call.draft->shape[1];
  VerifyArgs& args = made->draw;
  TIERCEL_RETURN_IF_ERROR(
      lay_out_logits(sample, logits, 3, {sequences, "[B]"}, static_cast<SampleArgs*>(&args)));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(logits, {sequences, count + 1, sample.logits->shape[2]}, "[B, S + 1, V]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(draft, logits));
  VerifyTreeArgs& compare = made->compare;
  TIERCEL_RETURN_IF_ERROR(lay_out_tree(call, logits, sequences, count, &compare));
  if (call.probs != nullptr) {
    const Argument probs{kVerifyOp, "draft_probs", *call.probs};
    TIERCEL_RETURN_IF_ERROR(check_dtype(probs, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(probs, {sequences, count, args.columns}, "[B, S, V]"));
    TIERCEL_RETURN_IF_ERROR(check_rest(probs, logits));
    compare.probs = static_cast<const float*>(call.probs->data);
  }
  const Argument tokens{kVerifyOp, "tokens", *call.tokens};
  TIERCEL_RETURN_IF_ERROR(check_dtype(tokens, {call.draft->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(tokens, {sequences, count + 1}, "[B, S + 1]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(tokens, logits));
  const Argument accepted{kVerifyOp, "accepted", *call.accepted};
  TIERCEL_RETURN_IF_ERROR(check_dtype(accepted, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(accepted, {sequences}, "[B]"));
  TIERCEL_RETURN_IF_ERROR(check_rest(accepted, logits));
  const int64_t rows = args.rows;
  Kept* kept = nullptr;
  if (call.workspace != nullptr) {
    const Argument space{kVerifyOp, "workspace", *call.workspace};
    TIERCEL_RETURN_IF_ERROR(check_dtype(space, {DType::kInt64}));
    TIERCEL_RETURN_IF_ERROR(check_shape(space, {verify_draft_workspace(rows)}, "[words]"));
    TIERCEL_RETURN_IF_ERROR(check_rest(space, logits));
    kept = static_cast<Kept*>(call.workspace->data);
  }
  if (rows == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(spread(kVerifyOp, sample, false, &args, &made->plan));
  args.positions = static_cast<int>(count + 1);
  args.kept = kept;
  args.tokens = kept == nullptr ? nullptr : kept + rows;
  compare.logits = args.logits;
  compare.stride = args.stride;
  compare.columns = args.columns;
  compare.positions = args.positions;
  compare.kept = kept;
  compare.drawn = static_cast<const int*>(args.tokens);
  compare.draft = call.draft->data;
  compare.seed = args.seed;
  compare.offset = args.offset;
  compare.tokens = call.tokens->data;
  compare.accepted = static_cast<int*>(call.accepted->data);
  compare.wide = call.draft->dtype == DType::kInt64;
  return Status();
}

const Kernel& find(DType dtype, bool draws) {
  return KernelTable(verify_kernels)
      .find([&](const VerifyKernel& one) { return one.dtype == dtype && one.draws == draws; })
      ->kernel;
}

}  // namespace

// The values kept of each row, and then the rows' tokens.
int64_t verify_draft_workspace(int64_t rows) {
  static_assert(sizeof(Kept) % sizeof(int64_t) == 0);
  return rows * static_cast<int64_t>(sizeof(Kept) / sizeof(int64_t)) + ceil_div(rows, 2);
}

Status verify_draft_plan(const VerifyDraftCall& call, SamplePlan* plan) {
  Verification made;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &made));
  *plan = made.plan;
  if (plan->grid != 0) plan->kernel = find(call.sample.logits->dtype, true).name();
  return Status();
}

Status verify_draft(const VerifyDraftCall& call, void* stream) {
  if (call.workspace == nullptr) {
    return Status::InvalidArgument(std::string(kVerifyOp) + ": `workspace` must be given");
  }
  Verification made;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &made));
  if (made.plan.grid == 0) return Status();
  const DType dtype = call.sample.logits->dtype;
  const int device = call.sample.logits->device_index;
  void* draw[] = {&made.draw};
  TIERCEL_RETURN_IF_ERROR(find(dtype, true).launch(config_of(made.plan), device, stream, draw));
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(call.draft->shape[0]);
  config.block.x = kVerifyThreads;
  config.dependent = true;
  if (made.compare.parents != nullptr) {
    void* walk[] = {&made.compare};
    return KernelTable(verify_tree_kernels).begin()->kernel.launch(config, device, stream, walk);
  }
  VerifyDraftArgs chain = made.compare;
  void* compare[] = {&chain};
  return find(dtype, false).launch(config, device, stream, compare);
}

Status verify_draft_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(verify_tree_kernels).load_all(device));
  return KernelTable(verify_kernels).load_all(device);
}

}  // namespace tiercel
