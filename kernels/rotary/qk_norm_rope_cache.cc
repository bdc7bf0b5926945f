// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/qk_norm_rope_cache.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"
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
constexpr int kVector = 8;      // elements, 16 bytes
constexpr int kMostLanes = 32;  // per head

struct Choice {
  const QkNormRopeCacheKernel* kernel = nullptr;
  Dim3 grid;
  Dim3 block;
};

Status check_weight(const Argument& weight, const Argument& q) {
  if (weight.view.dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {q.view.dtype, DType::kFloat32}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(weight, {q.view.shape[2]}, "[D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(weight, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(weight));
  return check_contiguous(weight);
}

// All but what concerns keys, values and the cache alone.
Status check(const QkNormRopeCacheCall& t) {
  const Argument q{kOp, "q", *t.q}, k{kOp, "k", *t.kv.key}, q_out{kOp, "q_out", *t.q_out};
  const Argument positions{kOp, "positions", *t.positions}, angles{kOp, "cos_sin_cache", *t.angles};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {t.q->dtype}));
  const int64_t tokens = t.q->shape[0], size = t.q->shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {tokens, t.kv.key->shape[1], size}, "[T, Hk, D]"));
  if (t.q_out->dtype != DType::kFloat8E4M3) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(q_out, {t.q->dtype, DType::kFloat8E4M3}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(q_out, {tokens, t.q->shape[1], size}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(positions, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(positions, {tokens}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(angles, 2));
  if (t.angles->dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(angles, {DType::kFloat32, t.q->dtype}));
  }
  const int64_t rotated = t.angles->shape[1];
  if (rotated % 2 != 0 || rotated > size) {
    return Status::InvalidArgument(
        mismatch(angles, "have an even second dimension of at most D = " + std::to_string(size),
                 std::to_string(rotated)));
  }
  if (t.angles->shape[0] == 0 && tokens != 0 && rotated != 0) {
    return Status::InvalidArgument(
        mismatch(angles, "have at least one row", shape_text(t.angles->shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument& other : {k, q_out, positions, angles}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(positions));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(angles));
  TIERCEL_RETURN_IF_ERROR(check_inner(q));
  TIERCEL_RETURN_IF_ERROR(check_inner(q_out));
  if (t.q_weight != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_weight({kOp, "q_weight", *t.q_weight}, q));
  }
  if (t.k_weight != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_weight({kOp, "k_weight", *t.k_weight}, q));
  }
  if (t.q_scale == nullptr) return Status();
  const Argument scale{kOp, "q_scale", *t.q_scale};
  if (t.q_out->dtype != DType::kFloat8E4M3) {
    return Status::InvalidArgument(
        mismatch(scale, "be None for a `q_out` that is not float8", "a tensor"));
  }
  return check_float8_scale(scale, q, "H", t.q->shape[1]);
}

bool in_vectors(const HeadsOfTokens& heads, int bytes) {
  return (reinterpret_cast<uintptr_t>(heads.data) | static_cast<uint64_t>(heads.token_stride) |
          static_cast<uint64_t>(heads.head_stride)) %
             bytes ==
         0;
}

bool is_aligned(const TensorView* view) {
  return view == nullptr || reinterpret_cast<uintptr_t>(view->data) % 16 == 0;
}

// Few tokens: one head per thread, to use every multiprocessor.
Status choose(const QkNormRopeCacheArgs& args, const TensorView& q, bool interleaved, int lanes,
              Choice* choice) {
  const int64_t tokens = args.cache.tokens;
  const bool few = tokens * args.heads * lanes <= kDefaultMultiprocessors * 4096;
  const int heads = few ? 1 : kQkMostHeads;
  choice->kernel =
      KernelTable(qk_norm_rope_cache_kernels).find([&](const QkNormRopeCacheKernel& kernel) {
        return kernel.dtype == q.dtype && kernel.interleaved == interleaved &&
               kernel.float8 == (args.float8_q || args.float8_cache) && kernel.heads == heads;
      });
  const int64_t threads = few ? 128 : 256, slots = ceil_div(args.heads, heads);
  const int64_t blocks = ceil_div(slots, threads / lanes);  // per token
  const int64_t warp = kMostLanes / lanes;                  // heads in a warp
  choice->block.x = static_cast<uint32_t>(lanes);
  choice->block.y = static_cast<uint32_t>(ceil_div(ceil_div(slots, blocks), warp) * warp);
  const int64_t together = threads / (choice->block.x * choice->block.y);
  choice->block.z = static_cast<uint32_t>(std::max<int64_t>(std::min(together, tokens), 1));
  const int64_t grid = ceil_div(tokens, choice->block.z);
  if (grid > 0x7fffffff || blocks > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(q.shape, q.ndim));
  }
  choice->grid.x = static_cast<uint32_t>(grid);
  choice->grid.y = static_cast<uint32_t>(blocks);
  return Status();
}

Status prepare(const QkNormRopeCacheCall& t, QkNormRopeCacheArgs* args, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(t));
  int elements = 1;
  TIERCEL_RETURN_IF_ERROR(prepare_kv_cache(kNames, t.kv, &args->cache, &elements));
  const int64_t size = t.q->shape[2], rotated = t.angles->shape[1];
  args->q = heads_of(*t.q);
  args->q_out = heads_of(*t.q_out);
  args->float8_q = t.q_out->dtype == DType::kFloat8E4M3;
  args->float8_cache = t.kv.key_cache->dtype == DType::kFloat8E4M3;
  const bool aligned = elements == kVector && in_vectors(args->q, 16) &&
                       in_vectors(args->q_out, args->float8_q ? 8 : 16) && is_aligned(t.angles) &&
                       is_aligned(t.q_weight) && is_aligned(t.k_weight);
  if (!aligned || size % kVector != 0) {
    return Status::Unimplemented(
        std::string(kOp) +
        ": heads, weights and lines of the cache must begin at multiples of 16 bytes (of 8 where "
        "they are float8) and D must be a multiple of 8");
  }
  if (rotated % (2 * kVector) != 0) {
    return Status::Unimplemented(mismatch({kOp, "cos_sin_cache", *t.angles},
                                          "have a multiple of 16 columns",
                                          std::to_string(rotated)));
  }
  constexpr int64_t kMost = 0x3fffffff;  // the kernels count heads and rows in 32 bits
  if (size > kMostLanes * 2 * kVector || t.q->shape[1] > kMost || t.kv.key->shape[1] > kMost / 2 ||
      t.angles->shape[0] > kMost) {
    return Status::Unimplemented(std::string(kOp) + ": too large for the kernels, got shapes " +
                                 shape_text(t.q->shape, 3) + ", " + shape_text(t.kv.key->shape, 3) +
                                 " and " + shape_text(t.angles->shape, 2));
  }
  args->positions = t.positions->data;
  args->wide_positions = t.positions->dtype == DType::kInt64;
  args->angles = static_cast<const char*>(t.angles->data);
  args->wide_angles = t.angles->dtype == DType::kFloat32;
  args->last_position = static_cast<uint32_t>(std::max<int64_t>(t.angles->shape[0] - 1, 0));
  if (t.q_weight != nullptr) {
    args->q_weight = static_cast<const char*>(t.q_weight->data);
    args->wide_q_weight = t.q_weight->dtype == DType::kFloat32;
  }
  if (t.k_weight != nullptr) {
    args->k_weight = static_cast<const char*>(t.k_weight->data);
    args->wide_k_weight = t.k_weight->dtype == DType::kFloat32;
  }
  args->q_scale = set_scale(t.q_scale, &args->q_scale_per_head);
  args->eps = static_cast<float>(t.eps);
  args->q_heads = static_cast<int>(t.q->shape[1]);
  args->kv_heads = static_cast<int>(t.kv.key->shape[1]);
  args->heads = args->q_heads + 2 * args->kv_heads;
  args->rotated = static_cast<int>(rotated);
  args->turning = static_cast<int>(rotated / (2 * kVector));
  args->rest = static_cast<int>((size - rotated) / kVector);
  if (args->cache.tokens == 0 || args->heads == 0 || size == 0) return Status();
  args->inverse_size = 1.0f / static_cast<float>(size);
  const int places = args->turning + (args->rest + 1) / 2;
  int lanes = 1;
  while (lanes < places) lanes *= 2;
  TIERCEL_RETURN_IF_ERROR(choose(*args, *t.q, t.interleaved, lanes, choice));
  args->cache.prefetch_blocks = resident_blocks(choice->block) / 2;  // as for kv_cache_write
  args->early_launch = launches_early(int64_t{choice->grid.x} * choice->grid.y);
  return Status();
}

}  // namespace

Status qk_norm_rope_cache_plan(const QkNormRopeCacheCall& call, QkNormRopeCachePlan* plan) {
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

Status qk_norm_rope_cache(const QkNormRopeCacheCall& call, void* stream) {
  QkNormRopeCacheArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid = choice.grid;
  config.block = choice.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.q->device_index, stream, pointers);
}

}  // namespace tiercel
