// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/kv_cache_write.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "kv_cache_write";
constexpr KvNames kNames = {kOp, "key", "value", "H", "[T, H, D]", "[blocks, block size, H, D]"};

struct Choice {
  const KvCacheKernel* kernel = nullptr;
  Dim3 grid;
  Dim3 block;
};

Status check_cache_scale(const Argument& scale, const Argument& key, const KvNames& names,
                         int64_t heads, bool to_float8) {
  if (to_float8) return check_float8_scale(scale, key, names.heads, heads);
  return Status::InvalidArgument(
      mismatch(scale, "be None for a cache that is not float8", "a tensor"));
}

Status check(const KvNames& names, const KvCacheCall& t) {
  const char* const op = names.op;
  const Argument key{op, names.key, *t.key}, value{op, names.value, *t.value};
  const Argument key_cache{op, "key_cache", *t.key_cache};
  const Argument value_cache{op, "value_cache", *t.value_cache};
  const Argument slots{op, "slots", *t.slots};
  TIERCEL_RETURN_IF_ERROR(check_rank(key, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(key, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(value, {t.key->dtype}));
  const int64_t tokens = t.key->shape[0], heads = t.key->shape[1], size = t.key->shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(value, {tokens, heads, size}, names.shape));
  TIERCEL_RETURN_IF_ERROR(check_rank(key_cache, 4));
  if (t.key_cache->dtype != DType::kFloat8E4M3) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(key_cache, {t.key->dtype, DType::kFloat8E4M3}));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(value_cache, {t.key_cache->dtype}));
  const int64_t blocks = t.key_cache->shape[0], places = t.key_cache->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(key_cache, {blocks, places, heads, size}, names.cache_shape));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(value_cache, {blocks, places, heads, size}, names.cache_shape));
  TIERCEL_RETURN_IF_ERROR(check_dtype(slots, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(slots, {tokens}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(key));
  for (const Argument& other : {value, key_cache, value_cache, slots}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, key));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(slots));
  for (const Argument& inner : {key, value, key_cache, value_cache}) {
    TIERCEL_RETURN_IF_ERROR(check_inner(inner));
  }
  const bool to_float8 = t.key_cache->dtype == DType::kFloat8E4M3;
  if (t.key_scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        check_cache_scale({op, "key_scale", *t.key_scale}, key, names, heads, to_float8));
  }
  if (t.value_scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        check_cache_scale({op, "value_scale", *t.value_scale}, key, names, heads, to_float8));
  }
  return Status();
}

void set_strides(const TensorView& cache, int64_t (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = step_along(cache, i);
}

}  // namespace

Status check_inner(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  if (view.shape[last] <= 1 || view.strides[last] == 1) return Status();
  return Status::Unimplemented(mismatch(argument, "be contiguous in its last dimension",
                                        "strides " + shape_text(view.strides, view.ndim)));
}

Status check_float8_scale(const Argument& scale, const Argument& like, const char* symbol,
                          int64_t heads) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  int64_t count = 1;
  for (int i = 0; i < scale.view.ndim; ++i) count *= scale.view.shape[i];
  if (count != 1 && count != heads) {
    const std::string many = std::string(symbol) + " = " + std::to_string(heads);
    return Status::InvalidArgument(
        mismatch(scale, "have 1 element or " + many, std::to_string(count)));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(scale));
  return check_contiguous(scale);
}

HeadsOfTokens heads_of(const TensorView& view) {
  return {static_cast<char*>(view.data), step_along(view, 0), step_along(view, 1)};
}

const float* set_scale(const TensorView* scale, bool* per_head) {
  if (scale == nullptr) return nullptr;
  *per_head = false;
  for (int i = 0; i < scale->ndim; ++i) *per_head |= scale->shape[i] > 1;
  return static_cast<const float*>(scale->data);
}

Status prepare_kv_cache(const KvNames& names, const KvCacheCall& t, KvCacheArgs* args,
                        int* elements) {
  TIERCEL_RETURN_IF_ERROR(check(names, t));
  const bool to_float8 = t.key_cache->dtype == DType::kFloat8E4M3;
  args->key = heads_of(*t.key);
  args->value = heads_of(*t.value);
  args->key_cache = static_cast<char*>(t.key_cache->data);
  args->value_cache = static_cast<char*>(t.value_cache->data);
  set_strides(*t.key_cache, args->key_strides);
  set_strides(*t.value_cache, args->value_strides);
  args->slots = t.slots->data;
  args->wide_slots = t.slots->dtype == DType::kInt64;
  args->key_scale = set_scale(t.key_scale, &args->key_scale_per_head);
  args->value_scale = set_scale(t.value_scale, &args->value_scale_per_head);
  args->tokens = t.key->shape[0];
  args->block_size = static_cast<int>(t.key_cache->shape[1]);

  const int64_t size = t.key->shape[2];
  uint64_t in = static_cast<uint64_t>(size * 2), out = 0;
  for (const HeadsOfTokens& heads : {args->key, args->value}) {
    in |= reinterpret_cast<uintptr_t>(heads.data) | static_cast<uint64_t>(heads.token_stride) |
          static_cast<uint64_t>(heads.head_stride);
  }
  for (int i = 0; i < 3; ++i) out |= args->key_strides[i] | args->value_strides[i];
  out |=
      reinterpret_cast<uintptr_t>(args->key_cache) | reinterpret_cast<uintptr_t>(args->value_cache);
  const bool vectors = in % 16 == 0 && out % (to_float8 ? 8 : 16) == 0;
  *elements = vectors ? 8 : 1;
  constexpr int64_t kMost = 0x7fffffff;  // the kernels count vectors and places in 32 bits
  if (t.key->shape[1] * (size / *elements) > kMost || t.key_cache->shape[1] > kMost) {
    return Status::Unimplemented(std::string(names.op) + ": too large for the kernels, got shape " +
                                 shape_text(t.key_cache->shape, t.key_cache->ndim) +
                                 " of `key_cache`");
  }
  args->head_vectors = static_cast<int>(size / *elements);
  args->token_vectors = static_cast<int>(t.key->shape[1]) * args->head_vectors;
  if (args->block_size == 0) return Status();  // slot_count stays 0
  // More blocks than 64 bits count may come from a stride of 0.
  args->slot_count =
      std::min(t.key_cache->shape[0], INT64_MAX / args->block_size) * args->block_size;
  args->block_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (args->block_size == 1 << shift) args->block_shift = shift;
  }
  return Status();
}

namespace {

Status choose(const KvCacheArgs& args, const TensorView& key, bool to_float8, int elements,
              Choice* choice) {
  choice->kernel = KernelTable(kv_cache_kernels).find([&](const KvCacheKernel& kernel) {
    return kernel.dtype == key.dtype && kernel.to_float8 == to_float8 &&
           kernel.elements == elements;
  });
  const int64_t columns = ceil_div(args.token_vectors, kKvCacheThreads);
  choice->block.x = static_cast<uint32_t>(ceil_div(args.token_vectors, columns));
  const int64_t together = std::min(int64_t{kKvCacheThreads} / choice->block.x, args.tokens);
  choice->block.y = static_cast<uint32_t>(together);
  const int64_t grid = ceil_div(args.tokens, together);
  if (grid > 0x7fffffff || columns > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(key.shape, key.ndim));
  }
  choice->grid.x = static_cast<uint32_t>(grid);
  choice->grid.y = static_cast<uint32_t>(columns);
  return Status();
}

Status prepare(const KvCacheCall& t, KvCacheArgs* args, Choice* choice) {
  int elements = 1;
  TIERCEL_RETURN_IF_ERROR(prepare_kv_cache(kNames, t, args, &elements));
  if (args->tokens == 0 || args->token_vectors == 0 || args->slot_count == 0) return Status();
  const bool to_float8 = t.key_cache->dtype == DType::kFloat8E4M3;
  TIERCEL_RETURN_IF_ERROR(choose(*args, *t.key, to_float8, elements, choice));
  args->prefetch_blocks = resident_blocks(choice->block) / 2;  // all are too many on an H200
  return Status();
}

}  // namespace

Status kv_cache_plan(const KvCacheCall& call, KvCachePlan* plan) {
  KvCacheArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  *plan = {"none", 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.kernel->elements * 2,
             choice.grid.x * choice.grid.y, choice.block.x * choice.block.y};
  }
  return Status();
}

Status kv_cache_write(const KvCacheCall& call, void* stream) {
  KvCacheArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid = choice.grid;
  config.block = choice.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.key->device_index, stream, pointers);
}

}  // namespace tiercel
