// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/qk_norm_rope_cache.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"
#include "kernels/rotary/qk_heads.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/early_launch.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "qk_norm_rope_cache";
constexpr KvNames kNames = {kOp, "k", "v", "Hk", "[T, Hk, D]", "[blocks, block size, Hk, D]"};
constexpr char kWithoutCache[] = "qk_norm_rope";

struct Choice {
  const QkNormRopeCacheKernel* kernel = nullptr;
  Dim3 grid;
  Dim3 block;
};

// The result for queries; queries have been checked.
Status check_q_out(const QkNormRopeCacheCall& t) {
  const TensorView& view = *t.heads.q;
  const Argument q{kOp, "q", view}, q_out{kOp, "q_out", *t.q_out};
  const bool float8 = t.q_out->dtype == DType::kFloat8E4M3;
  if (!float8) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(q_out, {view.dtype, DType::kFloat8E4M3}));
  }
  const int64_t* const shape = view.shape;
  TIERCEL_RETURN_IF_ERROR(check_shape(q_out, {shape[0], shape[1], shape[2]}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(q_out, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q_out));
  TIERCEL_RETURN_IF_ERROR(check_inner(q_out));
  if (t.q_scale == nullptr) return Status();
  const Argument scale{kOp, "q_scale", *t.q_scale};
  if (!float8) {
    return Status::InvalidArgument(
        mismatch(scale, "be None for a `q_out` that is not float8", "a tensor"));
  }
  return check_float8_scale(scale, q, "H", shape[1]);
}

// Few tokens: one head per thread, to use every multiprocessor.
Status choose(const char* op, const QkHeads& tensors, QkNormRopeCacheArgs* filled, Choice* choice) {
  const QkNormRopeCacheArgs& args = *filled;
  const TensorView& q = *tensors.q;
  if (args.cache.tokens == 0 || args.heads == 0 || q.shape[2] == 0) return Status();
  const int lanes = qk_lanes(args);
  const int64_t tokens = args.cache.tokens;
  const bool few = tokens * args.heads * lanes <= kDefaultMultiprocessors * 4096;
  const int heads = few ? 1 : kQkMostHeads;
  choice->kernel =
      KernelTable(qk_norm_rope_cache_kernels).find([&](const QkNormRopeCacheKernel& kernel) {
        return kernel.dtype == q.dtype && kernel.interleaved == tensors.interleaved &&
               kernel.float8 == (args.float8_q || args.float8_cache) &&
               kernel.sections == tensors.has_sections && kernel.heads == heads;
      });
  const int64_t threads = few ? 128 : 256, slots = ceil_div(args.heads, heads);
  const int64_t blocks = ceil_div(slots, threads / lanes);  // per token
  const int64_t warp = kQkMostLanes / lanes;                // heads in a warp
  choice->block.x = static_cast<uint32_t>(lanes);
  choice->block.y = static_cast<uint32_t>(ceil_div(ceil_div(slots, blocks), warp) * warp);
  const int64_t together = threads / (choice->block.x * choice->block.y);
  choice->block.z = static_cast<uint32_t>(std::max<int64_t>(std::min(together, tokens), 1));
  const int64_t grid = ceil_div(tokens, choice->block.z);
  if (grid > 0x7fffffff || blocks > 65535) {
    return Status::Unimplemented(std::string(op) + ": too large for one launch, got shape " +
                                 shape_text(q.shape, q.ndim));
  }
  choice->grid.x = static_cast<uint32_t>(grid);
  choice->grid.y = static_cast<uint32_t>(blocks);
  filled->cache.prefetch_blocks = resident_blocks(choice->block) / 2;  // as for kv_cache_write
  filled->early_launch = launches_early(int64_t{choice->grid.x} * choice->grid.y);
  return Status();
}

std::string text_of(const int64_t (&sections)[3]) {
  return "[" + std::to_string(sections[0]) + ", " + std::to_string(sections[1]) + ", " +
         std::to_string(sections[2]) + "]";
}

Status check_sections(const QkNormRopeCacheCall& t) {
  const std::string op = std::string(kOp) + ": ";
  if (!t.heads.has_sections) {
    if (!t.sections_interleaved) return Status();
    return Status::InvalidArgument(op + "`sections_interleaved` needs `sections`");
  }
  const int64_t (&sections)[3] = t.sections;
  const int64_t pairs = t.heads.angles->shape[1] / 2;
  if (std::min({sections[0], sections[1], sections[2]}) < 0) {
    return Status::InvalidArgument(op + "`sections` must not be negative, got " +
                                   text_of(sections));
  }
  // Each at most all pairs, so that the sum does not overflow.
  if (std::max({sections[0], sections[1], sections[2]}) > pairs ||
      sections[0] + sections[1] + sections[2] != pairs) {
    return Status::InvalidArgument(op + "`sections` must add up to R / 2 = " +
                                   std::to_string(pairs) + ", got " + text_of(sections));
  }
  const int64_t second = (pairs + 1) / 3, third = pairs / 3;  // pairs 3 i + 1 and 3 i + 2
  if (t.sections_interleaved && (sections[1] > second || sections[2] > third)) {
    return Status::InvalidArgument(op + "`sections` must be at most " + std::to_string(second) +
                                   " and " + std::to_string(third) +
                                   " for the second and third position, interleaved, got " +
                                   text_of(sections));
  }
  return Status();
}

// The position, 0 to 2, that turns a pair.
uint32_t axis_of(const QkNormRopeCacheCall& t, int64_t pair) {
  if (!t.sections_interleaved) {
    return pair < t.sections[0] ? 0 : pair < t.sections[0] + t.sections[1] ? 1 : 2;
  }
  const int64_t third = pair % 3;
  return third != 0 && pair / 3 < t.sections[third] ? static_cast<uint32_t>(third) : 0;
}

Status prepare(const QkNormRopeCacheCall& t, QkNormRopeCacheArgs* args, Choice* choice) {
  QkHeads heads = t.heads;
  heads.k = t.kv.key;
  TIERCEL_RETURN_IF_ERROR(check_qk_heads(kOp, heads));
  TIERCEL_RETURN_IF_ERROR(check_sections(t));
  TIERCEL_RETURN_IF_ERROR(check_q_out(t));
  int elements = 1;
  TIERCEL_RETURN_IF_ERROR(prepare_kv_cache(kNames, t.kv, &args->cache, &elements));
  args->q = heads_of(*heads.q);
  args->q_out = heads_of(*t.q_out);
  args->float8_q = t.q_out->dtype == DType::kFloat8E4M3;
  args->float8_cache = t.kv.key_cache->dtype == DType::kFloat8E4M3;
  const bool aligned = elements == kQkVector && in_vectors(args->q_out, args->float8_q ? 8 : 16);
  TIERCEL_RETURN_IF_ERROR(prepare_qk_heads(kOp, heads, aligned, args));
  args->q_scale = set_scale(t.q_scale, &args->q_scale_per_head);
  args->heads = args->q_heads + 2 * args->kv_heads;
  for (int pair = 0; heads.has_sections && pair < args->rotated / 2; ++pair) {
    args->axes[pair / kQkVector] |= static_cast<uint16_t>(axis_of(t, pair) << pair % kQkVector * 2);
  }
  return choose(kOp, heads, args, choice);
}

// Keys' results are a cache in which each token has a slot of its own.
Status prepare(const QkNormRopeCall& t, QkNormRopeCacheArgs* args, Choice* choice) {
  const QkHeads& heads = t.heads;
  TIERCEL_RETURN_IF_ERROR(check_qk_heads(kWithoutCache, heads));
  const Argument q{kWithoutCache, "q", *heads.q}, k{kWithoutCache, "k", *heads.k};
  TIERCEL_RETURN_IF_ERROR(check_like({kWithoutCache, "q_out", *t.q_out}, q, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_like({kWithoutCache, "k_out", *t.k_out}, k, "[T, Hk, D]"));
  args->q = heads_of(*heads.q);
  args->q_out = heads_of(*t.q_out);
  KvCacheArgs& cache = args->cache;
  cache.key = heads_of(*heads.k);
  const HeadsOfTokens k_out = heads_of(*t.k_out);
  const bool aligned = in_vectors(args->q_out, 16) && in_vectors(k_out, 16);
  TIERCEL_RETURN_IF_ERROR(prepare_qk_heads(kWithoutCache, heads, aligned, args));
  cache.key_cache = k_out.data;
  cache.key_strides[0] = k_out.token_stride;
  cache.key_strides[2] = k_out.head_stride;
  cache.tokens = cache.slot_count = heads.q->shape[0];
  cache.block_size = 1;
  args->heads = args->q_heads + args->kv_heads;
  return choose(kWithoutCache, heads, args, choice);
}

template <typename Call>
Status plan(const Call& call, QkNormRopeCachePlan* plan) {
  QkNormRopeCacheArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  *plan = {"none", 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.block.x, choice.grid.x * choice.grid.y,
             choice.block.x * choice.block.y * choice.block.z};
  }
  return Status();
}

template <typename Call>
Status launch(const Call& call, void* stream) {
  QkNormRopeCacheArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid = choice.grid;
  config.block = choice.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.heads.q->device_index, stream, pointers);
}

}  // namespace

Status qk_norm_rope_cache_plan(const QkNormRopeCacheCall& call, QkNormRopeCachePlan* result) {
  return plan(call, result);
}

Status qk_norm_rope_cache(const QkNormRopeCacheCall& call, void* stream) {
  return launch(call, stream);
}

Status qk_norm_rope_plan(const QkNormRopeCall& call, QkNormRopeCachePlan* result) {
  return plan(call, result);
}

Status qk_norm_rope(const QkNormRopeCall& call, void* stream) { return launch(call, stream); }

}  // namespace tiercel
