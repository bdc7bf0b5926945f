// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/paged.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/attention/common/problem.h"
#include "kernels/attention/paged/kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "paged_attention";

// Rows of q and keys of a sequence stay below it, so that their sums fit 32 bits.
constexpr int64_t kMostRows = int64_t{1} << 29;
constexpr int64_t kMostStep = 0x7fffffff;
constexpr int64_t kMostTiles = int64_t{1} << 22;  // of a key head: kernel.py's _NO_TILE
constexpr int64_t kRows = 64;                     // of a warpgroup
constexpr int64_t kWarpgroups = 2;
constexpr int64_t kVector = 8;  // elements of out in 16 bytes
constexpr int64_t kMaxHeadDimension = 256;

Status unsupported(const Argument& argument, const std::string& expected, const std::string& got) {
  return Status::Unimplemented(mismatch(argument, expected + " for the precompiled kernels", got));
}

Status check_integers(const Argument& argument, const Argument& q) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, q));
  return check_cuda(argument);
}

// Kernels there are for 16 bits only.
Status check_dtypes(const Argument& q, const Argument& k, const Argument& v, const Argument& out) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}));
  for (const Argument* argument : {&q, &k}) {
    if (argument->view.dtype == DType::kFloat8E4M3) {
      return unsupported(*argument, "be bfloat16 or float16", "float8_e4m3fn");
    }
  }
  for (const Argument* argument : {&k, &v, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {q.view.dtype}));
  }
  return Status();
}

// Checks that arguments fit together.
Status check(const PagedAttentionCall& call) {
  const Argument q{kOp, "q", *call.q}, out{kOp, "out", *call.out};
  const Argument k{kOp, "k_cache", *call.k_cache}, v{kOp, "v_cache", *call.v_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const Argument lengths{kOp, "seqused_k", *call.seqused_k};
  const Argument starts{kOp, "cu_seqlens_q", *call.cu_seqlens_q};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtypes(q, k, v, out));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 4));
  const int64_t total = q.view.shape[0], heads = q.view.shape[1], d = q.view.shape[2];
  const int64_t pages = k.view.shape[0], places = k.view.shape[1], kv_heads = k.view.shape[2];
  for (const Argument* cache : {&k, &v}) {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(*cache, {pages, places, kv_heads, d}, "[pages, page size, Hk, D]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {total, heads, d}, "[Tq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(starts, 1));
  const int64_t batch = starts.view.shape[0] - 1;
  if (batch < 0) {
    return Status::InvalidArgument(mismatch(starts, "have at least one element", "none"));
  }
  TIERCEL_RETURN_IF_ERROR(check_rank(table, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(table, {batch, table.view.shape[1]}, "[B, pages of a sequence]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(lengths, {batch}, "[B]"));
  for (const Argument* argument : {&table, &lengths, &starts}) {
    TIERCEL_RETURN_IF_ERROR(check_integers(*argument, q));
  }
  if (heads > 0 && (kv_heads < 1 || heads % kv_heads != 0)) {
    return Status::InvalidArgument(
        mismatch(k, "have a number of heads that divides that of `q`, " + std::to_string(heads),
                 std::to_string(kv_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument* argument : {&k, &v, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  if (call.sinks != nullptr) {
    const Argument sinks{kOp, "sinks", *call.sinks};
    TIERCEL_RETURN_IF_ERROR(check_dtype(sinks, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(sinks, {heads}, "[H]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(sinks, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(sinks));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(sinks));
  }
  if (call.lse == nullptr) return Status();
  return check_attention_lse(kOp, *call.lse, *call.q, {heads, total}, "[H, Tq]");
}

// A cache as rows of its heads, one page after the other.
struct Cache {
  Cache(const TensorView& from, const char* name) : argument{kOp, name, from}, rows(from) {
    // The stride of a single place or page is arbitrary.
    const bool single = from.shape[1] == 1;
    const int64_t step = single ? from.strides[0] : from.strides[1];
    page_rows =
        single || from.shape[0] == 1 ? from.shape[1] : from.strides[0] / std::max<int64_t>(step, 1);
    whole = single || from.shape[0] == 1 || (step > 0 && from.strides[0] % step == 0);
    shape[0] = (from.shape[0] - 1) * page_rows + from.shape[1];
    shape[1] = from.shape[2];
    shape[2] = from.shape[3];
    strides[0] = shape[0] == 1 ? std::max<int64_t>(from.shape[2] * from.shape[3], kVector) : step;
    strides[1] = from.strides[2];
    strides[2] = from.strides[3];
    rows.ndim = 3;
    rows.shape = shape;
    rows.strides = strides;
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  Argument argument;
  bool whole;  // pages are whole rows apart
  int64_t page_rows;
  int64_t shape[3];
  int64_t strides[3];
  TensorView rows;
};

Status check_steps(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] > 1 && view.strides[i] > kMostStep / (i == last ? 4 : 1)) {
      return unsupported(argument, "have elements that are less than 2 GiB apart",
                         "strides " + shape_text(view.strides, view.ndim));
    }
  }
  return Status();
}

Status check_cache(const Cache& cache, const TensorMapSpec& any) {
  const TensorView& view = cache.argument.view;
  const char* name = cache.argument.name;
  if (!cache.whole) {
    return unsupported(cache.argument, "have pages that are whole rows apart",
                       "strides " + shape_text(view.strides, 4));
  }
  if (cache.shape[0] >= kMostStep) {
    return unsupported(cache.argument, "have pages that span fewer than 2^31 rows",
                       "strides " + shape_text(view.strides, 4));
  }
  return check_tensor_map(any, cache.rows, kOp, name);
}

// Checks that there is a kernel for arguments that fit together and are not empty.
Status check_supported(const PagedAttentionCall& call, const Cache& k, const Cache& v) {
  const TensorView& q = *call.q;
  const AttentionOptions& options = call.options;
  const Argument q_arg{kOp, "q", q}, k_arg{kOp, "k_cache", *call.k_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const int64_t d = q.shape[2], places = call.k_cache->shape[1];
  const int64_t group = q.shape[1] / call.k_cache->shape[2];
  if (d < 8 || d > kMaxHeadDimension || d % 8 != 0) {
    return unsupported(q_arg, "have a head dimension that is a multiple of 8 up to 256",
                       std::to_string(d));
  }
  if (group > kRows) {
    return unsupported(q_arg, "have at most 64 heads for each of `k_cache`", std::to_string(group));
  }
  if (!(options.scale > 0.0) || !std::isfinite(options.scale)) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `scale` must be positive for the precompiled kernels, got " +
                                 std::to_string(options.scale));
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    return Status::Unimplemented(
        std::string(kOp) +
        ": `softcap` must be None or positive for the precompiled kernels, got " +
        std::to_string(options.softcap));
  }
  if (places < 1 || (places & (places - 1)) != 0) {
    return unsupported(k_arg, "have a page size that is a power of two", std::to_string(places));
  }
  if (call.k_cache->shape[0] < 1) return unsupported(k_arg, "have at least one page", "none");
  if (table.view.shape[1] < 1 || table.view.shape[1] > kMostRows / places) {
    return unsupported(table, "have room for 1 to 2^29 keys of a sequence",
                       "shape " + shape_text(table.view.shape, 2));
  }
  if (q.shape[0] >= kMostRows) {
    return unsupported(q_arg, "have fewer than 2^29 rows", "shape " + shape_text(q.shape, 3));
  }
  TIERCEL_RETURN_IF_ERROR(check_steps(table));
  TIERCEL_RETURN_IF_ERROR(check_steps({kOp, "seqused_k", *call.seqused_k}));
  TIERCEL_RETURN_IF_ERROR(check_steps({kOp, "cu_seqlens_q", *call.cu_seqlens_q}));
  const TensorMapSpec any{
      3, {64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, kOp, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, *call.out, kOp, "out"));
  TIERCEL_RETURN_IF_ERROR(check_cache(k, any));
  TIERCEL_RETURN_IF_ERROR(check_cache(v, any));
  if (k.page_rows != v.page_rows) {
    return unsupported(v.argument, "have pages as many rows apart as `k_cache`",
                       "strides " + shape_text(v.argument.view.strides, 4));
  }
  for (int i = 0; i < 2; ++i) {
    if (call.out->shape[i] > 1 && call.out->strides[i] / kVector > kMostStep) {
      return unsupported({kOp, "out", *call.out}, "have rows that are less than 32 GiB apart",
                         "strides " + shape_text(call.out->strides, 3));
    }
  }
  return Status();
}

Status too_many(const TensorView& q) {
  return unsupported({kOp, "q", q}, "have fewer than 2^22 tiles of a key head",
                     "shape " + shape_text(q.shape, 3));
}

struct Choice {
  const AttentionPagedKernel* kernel = nullptr;  // null for an empty output
  int64_t group, queries, tiles, copy_rows;      // as in AttentionPagedArguments
  unsigned blocks;
};

Status choose(const PagedAttentionCall& call, int multiprocessors, const Cache& k, const Cache& v,
              Choice* choice) {
  const TensorView& q = *call.q;
  if (q.shape[0] == 0 || q.shape[1] == 0 || call.cu_seqlens_q->shape[0] == 1) return Status();
  TIERCEL_RETURN_IF_ERROR(check_supported(call, k, v));
  const AttentionOptions& options = call.options;
  const bool capped = options.softcap != 0.0;
  const bool causal = !capped && options.left < 0 && options.right == 0;
  int count = 0;
  const AttentionPagedKernel* kernels = attention_paged_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const AttentionPagedVariant& variant = kernels[i].variant;
    if (variant.dtype != q.dtype || variant.d < q.shape[2] || variant.capped != capped ||
        (variant.mask == AttentionMask::kCausal) != causal) {
      continue;
    }
    if (choice->kernel == nullptr || variant.d < choice->kernel->variant.d) {
      choice->kernel = &kernels[i];
    }
  }
  const int64_t kv_heads = call.k_cache->shape[2], batch = call.cu_seqlens_q->shape[0] - 1;
  choice->group = q.shape[1] / kv_heads;
  choice->queries = kRows / choice->group;
  const int64_t most = kWarpgroups * choice->queries;  // of a tile
  if (batch > kMostTiles) return too_many(q);
  choice->tiles = (q.shape[0] + batch * (most - 1)) / most;
  choice->copy_rows = std::min<int64_t>(call.k_cache->shape[1], choice->kernel->variant.tile_n);
  if (choice->tiles > kMostTiles || choice->tiles > kMostStep / 2 / kv_heads) return too_many(q);
  choice->blocks =
      static_cast<unsigned>(std::min<int64_t>(choice->tiles * kv_heads, multiprocessors));
  return Status();
}

// The stride of an int32 tensor's last dimension, in bytes.
int32_t step_of(const TensorView& view) {
  const int last = view.ndim - 1;
  return view.shape[last] > 1 ? static_cast<int32_t>(view.strides[last] * 4) : 0;
}

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

void set_arguments(const PagedAttentionCall& call, const Choice& choice, const Cache& k,
                   AttentionPagedArguments* a) {
  const TensorView &q = *call.q, &out = *call.out, &table = *call.page_table;
  const int64_t batch = table.shape[0], places = call.k_cache->shape[1];
  const auto [scale, slope] = attention_scales(call.options);
  a->lse = call.lse == nullptr ? nullptr : call.lse->data;
  a->starts_q = call.cu_seqlens_q->data;
  a->lengths = call.seqused_k->data;
  a->table = table.data;
  a->sinks = call.sinks == nullptr ? nullptr : call.sinks->data;
  a->o = out.data;
  a->batch = narrow(batch);
  a->seq_q = a->total_q = narrow(q.shape[0]);
  a->seq_k = a->capacity = narrow(table.shape[1] * places);
  a->heads = narrow(q.shape[1]);
  a->kv_heads = narrow(call.k_cache->shape[2]);
  a->scale = scale;
  a->slope = slope;
  a->left = attention_limit(call.options.left);
  a->right = attention_limit(call.options.right);
  a->band = 1;
  a->step_q = step_of(*call.cu_seqlens_q);
  a->length_step = step_of(*call.seqused_k);
  a->table_step = step_of(table);
  a->table_row = batch > 1 ? narrow(table.strides[0]) : 0;
  a->row_step = narrow(out.strides[0] / kVector);
  a->head_step = narrow(out.strides[1] / kVector);
  a->columns = narrow(q.shape[2]);
  while ((int64_t{1} << a->page_bits) < places) ++a->page_bits;
  a->page_rows = narrow(k.page_rows);
  a->last_page = narrow(call.k_cache->shape[0] - 1);
  a->copy_rows = narrow(choice.copy_rows);
  a->copies = narrow(choice.kernel->variant.tile_n / choice.copy_rows);
  a->group = narrow(choice.group);
  a->queries = narrow(choice.queries);
  a->tiles = narrow(choice.tiles);
  while ((int64_t{1} << a->halvings) < batch) ++a->halvings;
}

}  // namespace

Status paged_attention_plan(const PagedAttentionCall& call, int multiprocessors,
                            PagedAttentionPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const Cache k(*call.k_cache, "k_cache"), v(*call.v_cache, "v_cache");
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, multiprocessors, k, v, &choice));
  *plan = {"none", 0, 0, 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const AttentionPagedKernel& kernel = *choice.kernel;
  *plan = {kernel.kernel.name(),
           kernel.variant.tile_m,
           kernel.variant.tile_n,
           static_cast<int>(kWarpgroups * choice.queries),
           static_cast<int>(choice.copy_rows),
           choice.blocks,
           kernel.block,
           kernel.dynamic_smem};
  return Status();
}

Status paged_attention(const PagedAttentionCall& call, void* stream) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  const Cache k(*call.k_cache, "k_cache"), v(*call.v_cache, "v_cache");
  const int device = call.q->device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, multiprocessors, k, v, &choice));
  if (choice.kernel == nullptr) return Status();
  const AttentionPagedKernel& kernel = *choice.kernel;

  AttentionPagedArguments arguments{};
  set_arguments(call, choice, k, &arguments);
  const AttentionPackedRows q_rows(*call.q), k_rows(k.rows), v_rows(v.rows), o_rows(*call.out);
  const struct {
    const TensorView& view;
    const char* name;
    int64_t heads, rows;  // of a copy
    CUtensorMap* map;
  } maps[] = {{q_rows.view, "q", choice.group, choice.queries, &arguments.q_map},
              {k_rows.view, "k_cache", 1, choice.copy_rows, &arguments.k_map},
              {v_rows.view, "v_cache", 1, choice.copy_rows, &arguments.v_map},
              {o_rows.view, "out", choice.group, choice.queries, &arguments.o_map}};
  for (int i = 0; i < 4; ++i) {
    TensorMapSpec spec = kernel.maps[i];
    spec.box[2] = static_cast<uint32_t>(maps[i].heads);
    spec.box[3] = static_cast<uint32_t>(maps[i].rows);
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(spec, maps[i].view, kOp, maps[i].name, maps[i].map));
  }
  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  return kernel.launch(config, device, stream, &arguments);
}

}  // namespace tiercel
