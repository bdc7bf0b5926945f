// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/paged.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/attention/common/problem.h"
#include "kernels/attention/paged/as_decode.h"
#include "kernels/attention/paged/as_wide.h"
#include "kernels/attention/paged/cache.h"
#include "kernels/attention/paged/check.h"
#include "kernels/attention/paged/head_slice.h"
#include "kernels/attention/paged/queries.h"
#include "kernels/attention/paged/split.h"
#include "kernels/attention/paged/widened.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = kPagedOp;

// Rows of q and keys of a sequence stay below it, so that their sums fit 32 bits.
constexpr int64_t kMostRows = int64_t{1} << 29;
constexpr int64_t kMostStep = 0x7fffffff;
constexpr int64_t kMostTiles = int64_t{1} << 22;  // of a key head: kernel.py's _NO_TILE
constexpr int64_t kRows = 64;                     // of a warpgroup
constexpr int64_t kWarpgroups = 2;
constexpr int64_t kMostCopies = 8;    // of the engine, for a block of keys: more start too slowly
constexpr int64_t kColumns = 64;      // of a copy
constexpr int64_t kVector = 8;        // elements of out in 16 bytes
constexpr int64_t kMostOfBoth = 128;  // head dimension of kernels for all caches
constexpr int64_t kLaneWidens = 16;   // columns of a float8 cache that a lane converts in a tile

Status check_steps(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  const int64_t bytes = dtype_bytes(view.dtype);
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] > 1 && view.strides[i] > kMostStep / (i == last ? bytes : 1)) {
      return unsupported(argument, "have elements that are less than 2 GiB apart",
                         "strides " + shape_text(view.strides, view.ndim));
    }
  }
  return Status();
}

Status check_cache(const PagedCache& cache, const TensorMapSpec& any) {
  const TensorView& view = cache.argument.view;
  const char* name = cache.argument.name;
  if (!cache.whole) {
    return unsupported(cache.argument, "have a page stride that is a multiple of the row stride",
                       "strides " + shape_text(view.strides, 4));
  }
  if (cache.shape[0] >= kMostStep) {
    return unsupported(cache.argument, "have pages that span fewer than 2^31 rows",
                       "strides " + shape_text(view.strides, 4));
  }
  const int64_t bytes = dtype_bytes(view.dtype);
  if (cache.strides[0] > kMostStep / bytes || cache.strides[1] / kVector > kMostStep / bytes) {
    return unsupported(cache.argument,
                       "have a row stride below 2 GiB and a head stride below 16 GiB",
                       "strides " + shape_text(view.strides, 4));
  }
  return check_tensor_map(any, cache.rows, kOp, name);
}

// In the batch-invariant mode decode_attention's kernels have all calls over a float8 cache that
// they can: a row has the bits of decoding in a chunk of any size.
Status check_float8(const PagedAttentionCall& call, const PagedCache& k) {
  if (!AsDecode::is_alone(call)) return Status();
  return unsupported(k.argument,
                     "be bfloat16 or float16 in the batch-invariant mode, with these strides or "
                     "this number of queries,",
                     "float8_e4m3fn");
}

// Checks that there is a kernel for arguments that fit together and are not empty.
Status check_supported(const PagedAttentionCall& call, const PagedCache& k, const PagedCache& v) {
  const TensorView& q = *call.q;
  const AttentionOptions& options = call.options;
  const Argument q_arg{kOp, "q", q}, k_arg{kOp, "k_cache", *call.k_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const int64_t d = q.shape[2], places = call.k_cache->shape[1];
  const int64_t group = q.shape[1] / call.k_cache->shape[2];
  if (d < 8 || d > kWideColumns || d % 8 != 0) {
    return unsupported(q_arg, "have a head dimension that is a multiple of 8 up to 512",
                       std::to_string(d));
  }
  TIERCEL_RETURN_IF_ERROR(check_paged_values(call));
  if (is_float8(*call.k_cache) && call.tree == nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_float8(call, k));
  }
  if (call.prefix != nullptr && options.left >= 0) {
    return unsupported({kOp, "prefix", *call.prefix},
                       "be None with a window that limits the keys before a query, where a "
                       "sequence may have many new tokens,",
                       "a tensor");
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
  if (call.prefix != nullptr) TIERCEL_RETURN_IF_ERROR(check_steps({kOp, "prefix", *call.prefix}));
  const TensorMapSpec any{
      3, {64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, kOp, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, *call.out, kOp, "out"));
  TIERCEL_RETURN_IF_ERROR(check_cache(k, any));
  TIERCEL_RETURN_IF_ERROR(check_cache(v, any));
  if (k.page_rows != v.page_rows) {
    return unsupported(v.argument, "have the page stride of `k_cache`",
                       "strides " + shape_text(v.argument.view.strides, 4));
  }
  if (call.tree != nullptr) {
    const Argument tree{kOp, "tree_mask", *call.tree};
    TIERCEL_RETURN_IF_ERROR(check_steps(tree));
    if (d <= kMostOfTiles && !AsDecode::may_be_tiles(call)) {
      return unsupported(tree,
                         call.one_head_dimension() ? "be None with these strides of other tensors"
                                                   : "be None with these head dimensions",
                         "a tensor");
    }
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

bool is_empty(const PagedAttentionCall& call) {
  return call.q->shape[0] == 0 || call.q->shape[1] == 0 || call.cu_seqlens_q->shape[0] == 1;
}

// True if few new tokens go to decode_attention's kernels. In the batch-invariant mode chunks of
// any size go to the same kernels: to decode_attention's where the cache is float8 or there is a
// tree, which the others do not take in that mode up to a head dimension of 256.
bool decodes(const PagedAttentionCall& call) {
  return !batch_invariant() || is_float8(*call.k_cache) || call.tree != nullptr;
}

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

struct Choice {
  // Null for an empty output, or one of them is.
  const AttentionPagedKernel* kernel = nullptr;
  const PagedWideKernel* wide = nullptr;
  int64_t tile_n, d;                         // keys of a step; columns of the tiles
  int64_t most;                              // queries of a tile
  int64_t group, queries, tiles, copy_rows;  // as in AttentionPagedArguments
  int64_t parts = 1;
  int64_t part_keys = 0;  // of a part in the batch-invariant mode, or kPagedGrowing
  int64_t part_blocks = 0;
  int64_t heads = 0;      // of keys, of a launch: all but in that mode
  int64_t widened = 0;    // heads of a float8 cache that are copied to 16 bits before a launch
  bool combined = false;  // by a second kernel
  unsigned blocks;

  int64_t heads_at_once() const { return widened > 0 ? std::min(widened, heads) : heads; }

  // Floats of the workspace: results of parts in 16 bits, then their logarithms.
  int64_t partial(const TensorView& out) const {
    return combined ? parts * out.shape[0] * out.shape[1] * out.shape[2] / 2 : 0;
  }
  int64_t workspace(const TensorView& out) const {
    return combined ? partial(out) + parts * out.shape[0] * out.shape[1] : 0;
  }
  int64_t tiles_of_blocks(int64_t kv_heads) const {
    return ceil_div(int64_t{blocks}, kv_heads * parts);
  }
};

// kernel.py's kernel for head dimensions, a mask and a cap. Small head dimensions have one for all
// caches. A causal kernel of wide ones over float8 caches would spill: they have those of windows.
const AttentionPagedKernel* find_kernel(const PagedAttentionCall& call, bool chained, bool tree) {
  const AttentionOptions& options = call.options;
  const bool capped = options.softcap != 0.0;
  const bool float8 = is_float8(*call.k_cache);
  const bool causal = !capped && options.left < 0 && options.right == 0 && call.prefix == nullptr &&
                      !(float8 && call.widest() > kMostOfBoth);
  const AttentionPagedKernel* found = nullptr;
  int count = 0;
  const AttentionPagedKernel* kernels = attention_paged_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const AttentionPagedVariant& variant = kernels[i].variant;
    if (variant.dtype != call.q->dtype || variant.d < call.widest() || variant.capped != capped ||
        (variant.mask == AttentionMask::kCausal) != causal || variant.chained != chained ||
        variant.tree != tree || (float8 && !variant.float8)) {
      continue;
    }
    const bool closer = found != nullptr && variant.d == found->variant.d && !float8 &&
                        found->variant.float8 && !variant.float8;
    if (found == nullptr || variant.d < found->variant.d || closer) found = &kernels[i];
  }
  return found;
}

void choose_kernel(const PagedAttentionCall& call, Choice* choice) {
  const TensorView& q = *call.q;
  const int64_t places = call.k_cache->shape[1];
  if (call.widest() > kMostOfTiles) {
    choice->wide = &wide_kernel(q.dtype, is_float8(*call.k_cache));
    choice->tile_n = kWideStep;
    choice->d = kWideColumns;
    choice->copy_rows = std::min<int64_t>(places, kWideStep);
    choice->most = choice->queries;
    return;
  }
  choice->kernel = find_kernel(call, false, call.tree != nullptr);
  choice->tile_n = choice->kernel->variant.tile_n;
  choice->d = choice->kernel->variant.d;
  choice->copy_rows = std::min<int64_t>(places, choice->tile_n);
  choice->most = kWarpgroups * choice->queries;
}

// Keys that a tile sees are split at fixed places, so a row's sums depend on its own keys alone.
// The first parts are shorter where there is a kernel whose blocks have all parts of a tile.
Status choose_fixed(const PagedAttentionCall& call, const PagedLoad& load, int multiprocessors,
                    Choice* choice) {
  const AttentionOptions& options = call.options;
  const AttentionPagedKernel* chained = nullptr;
  if (choice->wide == nullptr && call.sinks == nullptr && call.prefix == nullptr &&
      !is_float8(*call.k_cache)) {
    chained = find_kernel(call, true, false);
    if (chained != nullptr && chained->variant.d != choice->d) chained = nullptr;
  }
  const bool spans = options.left >= 0 && options.right >= 0;
  const int64_t seen =
      attention_limit(options.left) + attention_limit(options.right) + choice->most;
  const int64_t parts = chained != nullptr ? std::max(paged_growing_parts(narrow(load.keys)), 1)
                                           : paged_fixed_parts(load.keys, spans ? seen : load.keys);
  if (options.left >= 0 && parts > kPagedMostFixedParts) {
    return unsupported({kOp, "page_table", *call.page_table},
                       "have room for at most " +
                           std::to_string(kPagedMostFixedParts * kPagedPartKeys) +
                           " keys in the batch-invariant mode, unless a window holds fewer",
                       shape_text(call.page_table->shape, 2));
  }
  choice->parts = std::min(parts, kPagedMostFixedParts);
  choice->part_keys = chained != nullptr ? kPagedGrowing : kPagedPartKeys;
  choice->part_blocks = chained != nullptr ? kPagedGrowing : kPagedPartKeys / choice->tile_n;
  choice->heads = call.k_cache->shape[2];
  if (chained != nullptr && paged_chains(load, choice->parts, multiprocessors)) {
    choice->kernel = chained;
    choice->parts = 1;
    return Status();
  }
  // A sink, and a logarithm, has other bits where it joins in the first kernel.
  choice->combined = choice->parts > 1 || call.sinks != nullptr || call.lse != nullptr;
  if (choice->combined) {
    choice->heads = paged_heads_at_once(choice->heads, call.q->shape[0] * choice->group,
                                        call.out->shape[2], choice->tiles, choice->parts);
  }
  return Status();
}

// 0 where the tiles widen what they read. A window may leave out most keys, which all would be
// copied. Tiles widen whole groups of columns only; of other head dimensions all keys are copied.
int64_t widened_heads(const PagedAttentionCall& call, const Choice& choice, double steps) {
  if (!is_float8(*call.k_cache) || choice.wide != nullptr) return 0;
  PagedWidenSizes sizes = widen_sizes(call);
  sizes.pages *= call.page_table->shape[0];
  sizes.kv_heads = 1;
  const int64_t heads = call.k_cache->shape[2];
  if (sizes.d % kLaneWidens != 0) {
    const int64_t most = std::max<int64_t>(kPagedMostCopied / sizes.floats(), 1);
    return ceil_div(heads, ceil_div(heads, most));
  }
  if (call.options.left >= 0 || batch_invariant()) return 0;
  return paged_widened_heads(steps, choice.d, sizes.floats(), heads);
}

Status choose(const PagedAttentionCall& call, const PagedMixed& mixed, int multiprocessors,
              const PagedCache& k, const PagedCache& v, Choice* choice) {
  const TensorView& q = *call.q;
  if (is_empty(call)) return Status();
  TIERCEL_RETURN_IF_ERROR(check_supported(call, k, v));
  const AttentionOptions& options = call.options;
  const int64_t kv_heads = call.k_cache->shape[2], batch = call.cu_seqlens_q->shape[0] - 1;
  choice->group = q.shape[1] / kv_heads;
  choice->queries = kRows / choice->group;
  if (batch > kMostTiles) return too_many(q);
  choose_kernel(call, choice);
  const int64_t most = choice->most;
  choice->tiles = (q.shape[0] + batch * (most - 1)) / most;
  if (choice->tiles > kMostTiles || choice->tiles > kMostStep / 2 / kv_heads) return too_many(q);
  PagedLoad load;
  load.tiles = (mixed.few > 0 ? mixed.tiles : choice->tiles) * kv_heads;
  load.keys = most_keys(call);
  load.tile_n = choice->tile_n;
  load.result_bytes = 2 * q.shape[0] * q.shape[1] * call.out->shape[2];
  if (batch_invariant()) {
    TIERCEL_RETURN_IF_ERROR(choose_fixed(call, load, multiprocessors, choice));
    choice->widened = widened_heads(call, *choice, 0.0);
  } else {
    if (options.left >= 0) load.keys = std::min(load.keys, attention_limit(options.left) + most);
    choice->parts = paged_parts(load, multiprocessors);
    choice->combined = choice->parts > 1;
    choice->heads = kv_heads;
    if (mixed.few == 0) {
      // Under a causal mask a sequence's first new token sees fewer keys than the last one.
      const double hidden = options.right >= 0 ? std::min(call.max_q, load.keys) / 2 : 0;
      const double seen = 1.0 - hidden / static_cast<double>(std::max<int64_t>(load.keys, 1));
      const double steps = seen * paged_time(load, choice->parts, multiprocessors);
      choice->widened = widened_heads(call, *choice, steps);
    }
  }
  const int64_t items = choice->tiles * choice->heads * choice->parts;
  choice->blocks = static_cast<unsigned>(std::min<int64_t>(items, multiprocessors));
  return Status();
}

// The factors of stored keys or values, and the step from a head's to the next.
void* scale_of(const TensorView* scale, int32_t* step) {
  if (scale == nullptr) return nullptr;
  for (int i = 0; i < scale->ndim; ++i) *step |= scale->shape[i] > 1;
  return scale->data;
}

// Who fills stages: kernel.py's BY_ENGINE and so on.
enum Loader : int32_t { kByEngine, kByLanes, kByWidening };

void set_copies(const PagedAttentionCall& call, const Choice& choice, const PagedCache& k,
                const PagedCache& v, AttentionPagedArguments* a) {
  const int64_t bytes = dtype_bytes(k.rows.dtype);
  a->k_data = k.rows.data;
  a->v_data = v.rows.data;
  a->k_row = narrow(k.strides[0] * bytes);
  a->v_row = narrow(v.strides[0] * bytes);
  a->k_head = narrow(k.strides[1] * bytes / 16);
  a->v_head = narrow(v.strides[1] * bytes / 16);
  const int64_t copies = choice.tile_n / choice.copy_rows * (choice.d / kColumns);
  // Lanes copy as many columns of keys as of values.
  const bool by_engine = copies <= kMostCopies || !call.one_head_dimension();
  a->loader = is_float8(k.rows) ? kByWidening : by_engine ? kByEngine : kByLanes;
}

void set_arguments(const PagedAttentionCall& call, const Choice& choice, const PagedCache& k,
                   const PagedCache& v, AttentionPagedArguments* a) {
  const TensorView &q = *call.q, &out = *call.out, &table = *call.page_table;
  const int64_t batch = table.shape[0], places = call.k_cache->shape[1];
  const auto [scale, slope] = attention_scales(call.options);
  a->lse = call.lse == nullptr ? nullptr : call.lse->data;
  a->starts_q = call.cu_seqlens_q->data;
  a->lengths = call.seqused_k->data;
  a->table = table.data;
  a->sinks = call.sinks == nullptr ? nullptr : call.sinks->data;
  a->k_scale = scale_of(call.k_scale, &a->k_scale_step);
  a->v_scale = scale_of(call.v_scale, &a->v_scale_step);
  a->o = out.data;
  if (call.prefix != nullptr) {
    a->prefixes = call.prefix->data;
    a->prefix_step = step_of(*call.prefix);
  }
  if (call.tree != nullptr) {
    a->tree = call.tree->data;
    a->tree_step = step_of(*call.tree);
  }
  a->batch = narrow(batch);
  a->seq_q = a->total_q = narrow(q.shape[0]);
  a->seq_k = a->capacity = narrow(table.shape[1] * places);
  a->heads = narrow(q.shape[1]);
  a->kv_heads = narrow(call.k_cache->shape[2]);
  a->scale = scale;
  a->slope = slope;
  a->left = attention_limit(call.options.left);
  // A row of a tree sees new tokens by its word alone.
  a->right = attention_limit(call.tree == nullptr ? call.options.right : -1);
  a->band = 1;
  a->part_blocks = narrow(choice.part_blocks);
  a->least_parts = narrow(ceil_div(int64_t{choice.blocks}, choice.tiles * a->kv_heads));
  a->tile_starts = a->starts_q;
  a->step_q = a->tile_step = step_of(*call.cu_seqlens_q);
  a->tile_extra = narrow(choice.most - 1);
  a->tile_divisor = narrow(choice.most);
  a->length_step = step_of(*call.seqused_k);
  a->table_step = step_of(table);
  a->table_row = batch > 1 ? narrow(table.strides[0]) : 0;
  a->row_step = narrow(out.strides[0] / kVector);
  a->head_step = narrow(out.strides[1] / kVector);
  a->columns = narrow(out.shape[2]);
  while ((int64_t{1} << a->page_bits) < places) ++a->page_bits;
  a->page_rows = narrow(k.page_rows);
  a->last_page = narrow(call.k_cache->shape[0] - 1);
  a->copy_rows = narrow(choice.copy_rows);
  a->copies = narrow(choice.tile_n / choice.copy_rows);
  a->group = narrow(choice.group);
  a->queries = narrow(choice.queries);
  a->tiles = narrow(choice.tiles);
  while ((int64_t{1} << a->halvings) < batch) ++a->halvings;
  a->parts = narrow(choice.parts);
  // One sequence has more than twice the average of new tokens.
  a->mixed = call.max_q / 2 > q.shape[0] / batch;
  set_copies(call, choice, k, v, a);
}

void set_combine(const PagedAttentionCall& call, const Choice& choice,
                 const AttentionPagedArguments& of_parts, PagedCombineArgs* a) {
  const TensorView &q = *call.q, &out = *call.out;
  a->starts = static_cast<const char*>(call.cu_seqlens_q->data);
  a->lengths = static_cast<const char*>(call.seqused_k->data);
  a->sinks = static_cast<const float*>(of_parts.sinks);
  a->out = static_cast<char*>(out.data);
  a->lse = static_cast<float*>(of_parts.lse);
  for (int i = 0; i < 2; ++i) a->out_strides[i] = out.strides[i] * 2;
  a->row_vectors = narrow(out.shape[2] / kVector);
  a->vectors = q.shape[0] * q.shape[1] * a->row_vectors;
  a->total = of_parts.total_q;
  a->heads = of_parts.heads;
  a->parts = of_parts.parts;
  a->batch = of_parts.batch;
  a->step = of_parts.step_q;
  a->length_step = of_parts.length_step;
  a->capacity = of_parts.capacity;
  a->part_keys = narrow(choice.part_keys);
}

Status encode_rows(const AttentionPagedKernel& kernel, int index, const TensorView& view,
                   const char* name, int64_t heads, int64_t rows, CUtensorMap* map) {
  TensorMapSpec spec = kernel.maps[index];
  spec.box[2] = static_cast<uint32_t>(heads);
  spec.box[3] = static_cast<uint32_t>(rows);
  return encode_tensor_map(spec, AttentionPackedRows(view).view, kOp, name, map);
}

const PagedCombineKernel& combine_for(DType dtype, bool fixed) {
  return *KernelTable(paged_combine_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype && kernel.fixed == fixed;
  });
}

Status plan_tiles(const PagedAttentionCall& call, const PagedMixed& mixed, int multiprocessors,
                  PagedAttentionPlan* plan) {
  const PagedCache k(kOp, "k_cache", *call.k_cache), v(kOp, "v_cache", *call.v_cache);
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, mixed, multiprocessors, k, v, &choice));
  const int64_t heads = choice.heads_at_once();
  const int64_t kv_heads = call.k_cache->shape[2];
  if (heads < kv_heads) {
    const HeadSlice first(call, 0, heads);
    TIERCEL_RETURN_IF_ERROR(plan_tiles(first.call(), mixed, multiprocessors, plan));
    const int64_t rest = kv_heads % heads;
    if (rest == 0) return Status();
    // Fewer heads may be divided into more parts, and may be copied where others are not.
    PagedAttentionPlan last{};
    const HeadSlice slice(call, kv_heads - rest, rest);
    TIERCEL_RETURN_IF_ERROR(plan_tiles(slice.call(), mixed, multiprocessors, &last));
    plan->workspace = std::max(plan->workspace, last.workspace);
    return Status();
  }
  const PagedMixed copied = choice.widened > 0 ? paged_copied(call) : mixed;
  const AttentionPagedKernel* kernel = choice.kernel;
  *plan = {
      kernel == nullptr ? choice.wide->kernel.name() : kernel->kernel.name(),
      choice.combined ? combine_for(call.q->dtype, choice.part_keys != 0).kernel.name() : "none",
      copied.pages() > 0 ? widen_for(call.q->dtype).kernel.name() : "none",
      "none",
      "none",
      kernel == nullptr ? kWideRows : kernel->variant.tile_m,
      static_cast<int>(choice.tile_n),
      static_cast<int>(choice.most),
      static_cast<int>(choice.copy_rows),
      static_cast<int>(choice.parts),
      choice.blocks,
      kernel == nullptr ? kWideThreads : kernel->block,
      kernel == nullptr ? kWideShared : kernel->dynamic_smem,
      choice.workspace(*call.out) + (copied.batch > 0 ? copied.floats() : 0)};
  return Status();
}

PagedMixed divided(const PagedAttentionCall& call) {
  return paged_mixed(
      call, kWarpgroups * std::max<int64_t>(kRows * call.k_cache->shape[2] / call.q->shape[1], 1));
}

PagedAttentionCall with_few(PagedAttentionCall call, const PagedMixed& mixed) {
  call.max_q = mixed.few;
  return call;
}

Status plan_mixed(const PagedAttentionCall& call, int multiprocessors, PagedAttentionPlan* plan) {
  const PagedMixed mixed = divided(call);
  if (mixed.few == 0) return plan_tiles(call, {}, multiprocessors, plan);
  DecodePlan few;
  const AsDecode decoding(with_few(call, mixed), true);
  const Status status = decoding.fits()
                            ? decode_attention_plan(decoding.call(), multiprocessors, &few)
                            : Status::Unimplemented("");
  if (!status.ok() && status.code() != StatusCode::kUnimplemented) return status;
  if (!status.ok()) return plan_tiles(call, {}, multiprocessors, plan);
  TIERCEL_RETURN_IF_ERROR(plan_tiles(call, mixed, multiprocessors, plan));
  plan->decode = few.kernel;
  plan->workspace = std::max(plan->workspace, few.workspace);
  return Status();
}

}  // namespace

Status paged_attention_plan(const PagedAttentionCall& call, int multiprocessors,
                            PagedAttentionPlan* plan) {
  if (is_float8(*call.q)) return paged_queries_plan(call, multiprocessors, plan);
  TIERCEL_RETURN_IF_ERROR(check_paged(call));
  *plan = {"none", "none", "none", "none", "none", 0, 0, 0, 0, 1, 0, 0, 0, 0};
  if (is_empty(call)) return Status();
  const AsDecode few(call);
  if (few.fits() && decodes(call)) {
    DecodePlan of;
    const Status status = decode_attention_plan(few.call(), multiprocessors, &of);
    if (status.ok()) {
      *plan = {of.kernel, of.combine,  "none",  "none",
               "none",    of.rows,     of.step, static_cast<int>(call.max_q),
               1,         of.cluster,  of.grid, of.block,
               0,         of.workspace};
      return status;
    }
    if (status.code() != StatusCode::kUnimplemented) return status;
  }
  return plan_mixed(call, multiprocessors, plan);
}

Status PagedAttentionLaunch::prepare(const PagedAttentionCall& call) {
  TIERCEL_RETURN_IF_ERROR(check_paged(call));
  if (is_empty(call)) return Status();
  const AsDecode few(call);
  if (few.fits() && decodes(call)) {
    const Status status = decode_.prepare(few.call());
    decodes_ = status.ok();
    if (decodes_ || status.code() != StatusCode::kUnimplemented) return status;
  }
  const PagedMixed mixed = divided(call);
  if (mixed.few > 0) {
    const AsDecode decoding(with_few(call, mixed), true);
    const Status status =
        decoding.fits() ? decode_.prepare(decoding.call()) : Status::Unimplemented("");
    if (!status.ok() && status.code() != StatusCode::kUnimplemented) return status;
    if (status.ok()) mixed_ = mixed;
  }
  return prepare_tiles(call);
}

Status PagedAttentionLaunch::prepare_tiles(const PagedAttentionCall& call) {
  const TensorView &q = *call.q, &out = *call.out;
  const PagedCache k(kOp, "k_cache", *call.k_cache), v(kOp, "v_cache", *call.v_cache);
  device_ = q.device_index;
  dtype_ = q.dtype;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device_, &multiprocessors));
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(choose(call, mixed_, multiprocessors, k, v, &choice));
  const int64_t kv_heads = call.k_cache->shape[2], heads = choice.heads_at_once();
  if (heads < kv_heads) {
    for (int64_t first = 0; first < kv_heads; first += heads) {
      slices_.emplace_back();
      const HeadSlice slice(call, first, heads);
      TIERCEL_RETURN_IF_ERROR(slices_.back().prepare_tiles(slice.call()));
    }
    return Status();
  }
  if (choice.widened > 0) mixed_ = paged_copied(call);
  kernel_ = choice.kernel;
  blocks_ = choice.blocks;
  AttentionPagedArguments& a = arguments_;
  set_arguments(call, choice, k, v, &a);
  if (mixed_.batch > 0) {
    a.mixed *= mixed_.few == 0;
    a.capacity = narrow(mixed_.copies.capacity);
    a.least_tiles = narrow(choice.tiles_of_blocks(kv_heads));
    a.tile_step = 4;
    a.tile_extra = 0;
    a.tile_divisor = 1;
    widen_ = mixed_.pages() > 0 ? &widen_for(dtype_) : nullptr;
    set_widen(call, mixed_.copies, k, v, &widen_arguments_);
    set_mixed(mixed_, a, narrow(choice.most), multiprocessors, &mixed_arguments_);
  }
  if (choice.combined) {
    combine_ = &combine_for(dtype_, choice.part_keys != 0);
    partial_ = choice.partial(out);
    set_combine(call, choice, a, &combined_);
  }
  if (choice.wide != nullptr) {
    wide_ = choice.wide;
    set_wide(call, a, choice.combined, k, v, &wide_arguments_);
    if (wide_->float8) return Status();  // its rows are loaded by lanes
    const TensorMapSpec spec{3,
                             {static_cast<uint32_t>(choice.copy_rows), 1, 64},
                             CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(spec, k.rows, kOp, "k_cache", &a.k_map));
    return encode_tensor_map(spec, v.rows, kOp, "v_cache", &a.v_map);
  }
  TIERCEL_RETURN_IF_ERROR(encode_rows(*kernel_, 0, q, "q", choice.group, choice.queries, &a.q_map));
  if (a.loader == kByWidening) {
    a.k_map = a.v_map = a.q_map;  // only prefetched, or replaced by `widen`
  } else {
    TIERCEL_RETURN_IF_ERROR(
        encode_rows(*kernel_, 1, k.rows, "k_cache", 1, choice.copy_rows, &a.k_map));
    TIERCEL_RETURN_IF_ERROR(
        encode_rows(*kernel_, 2, v.rows, "v_cache", 1, choice.copy_rows, &a.v_map));
  }
  if (!choice.combined) {
    return encode_rows(*kernel_, 3, out, "out", choice.group, choice.queries, &a.o_map);
  }
  a.sinks = nullptr;
  return Status();
}

// Copies the cache to the begin of the workspace, and sets the arguments of what reads it there.
Status PagedAttentionLaunch::widen(float* workspace, void* stream) {
  const WidenedCache copies(mixed_.copies, workspace);
  const PagedCache k(kOp, "k_cache", copies.keys()), v(kOp, "v_cache", copies.values());
  AttentionPagedArguments& a = arguments_;
  a.copied = mixed_arguments_.copied;
  a.states = mixed_arguments_.states;
  a.k_copies = k.rows.data;
  a.v_copies = v.rows.data;
  const int64_t rows = kernel_->variant.tile_n;
  TIERCEL_RETURN_IF_ERROR(encode_rows(*kernel_, 1, k.rows, "k_cache", 1, rows, &a.k_map));
  TIERCEL_RETURN_IF_ERROR(encode_rows(*kernel_, 2, v.rows, "v_cache", 1, rows, &a.v_map));
  PagedWidenArgs& w = widen_arguments_;
  w.caches[0].to = static_cast<char*>(k.rows.data);
  w.caches[1].to = static_cast<char*>(v.rows.data);
  w.sources = mixed_arguments_.sources;
  LaunchConfig config;
  config.grid = {static_cast<unsigned>(2 * w.kv_heads), static_cast<unsigned>(mixed_.before)};
  constexpr int64_t kOfLane = 2 * kPagedWidenElements;
  config.block = {static_cast<unsigned>(ceil_div(mixed_.copies.d, kOfLane)), kPagedWidenRows};
  config.dependent = true;
  void* pointers[] = {&w};
  return widen_->kernel.launch(config, device_, stream, pointers);
}

int64_t PagedAttentionLaunch::workspace() const {
  if (decodes_) return decode_.workspace();
  // All slices but the last have as many heads.
  if (!slices_.empty()) return std::max(slices_.front().workspace(), slices_.back().workspace());
  const int64_t tiles = partial_floats() + (mixed_.batch > 0 ? mixed_.floats() : 0);
  return mixed_.few > 0 ? std::max(tiles, decode_.workspace()) : tiles;
}

int64_t PagedAttentionLaunch::partial_floats() const {
  if (combine_ == nullptr) return 0;
  return partial_ + int64_t{combined_.parts} * combined_.heads * combined_.total;
}

// Divides the sequences, copies the keys of some, and sets the arguments of what reads them.
Status PagedAttentionLaunch::divide(float* workspace, void* stream) {
  PagedMixedArgs& m = mixed_arguments_;
  m.sources = reinterpret_cast<int4*>(workspace + mixed_.copies.floats());
  m.states = reinterpret_cast<int32_t*>(m.sources + mixed_.before);
  m.tile_starts = m.states + mixed_.states();
  m.copied = m.tile_starts + mixed_.batch + 1;
  AttentionPagedArguments& a = arguments_;
  a.tile_starts = m.tile_starts;
  LaunchConfig config;
  config.grid.x = 1;
  config.block.x = kPagedMixedThreads;
  config.dependent = true;
  void* pointers[] = {&m};
  int count = 0;
  const Kernel& kernel = paged_mixed_kernels(&count)->kernel;
  TIERCEL_RETURN_IF_ERROR(kernel.launch(config, device_, stream, pointers));
  return widen_ == nullptr ? Status() : widen(workspace, stream);
}

Status PagedAttentionLaunch::run(float* workspace, void* stream) {
  if (decodes_) return decode_.run(workspace, stream);
  if (mixed_.batch == 0) return run_tiles(workspace, stream);
  TIERCEL_RETURN_IF_ERROR(divide(workspace, stream));
  TIERCEL_RETURN_IF_ERROR(run_tiles(workspace + mixed_.floats(), stream));
  return mixed_.few > 0 ? decode_.run(workspace, stream) : Status();
}

Status PagedAttentionLaunch::run_tiles(float* workspace, void* stream) {
  for (PagedAttentionLaunch& slice : slices_) {
    TIERCEL_RETURN_IF_ERROR(slice.run(workspace, stream));
  }
  if (kernel_ == nullptr && wide_ == nullptr) return Status();
  AttentionPagedArguments& a = arguments_;
  PagedWideArgs& w = wide_arguments_;
  if (combine_ != nullptr) {
    // The parts' results as heads of one tensor.
    const int64_t heads = int64_t{a.parts} * a.heads, d = int64_t{combined_.row_vectors} * kVector;
    const int64_t shape[] = {a.total_q, heads, d}, strides[] = {heads * d, d, 1};
    const TensorView view{workspace, dtype_, DeviceType::kCUDA, device_, 3, shape, strides};
    if (kernel_ != nullptr) {
      TIERCEL_RETURN_IF_ERROR(
          encode_rows(*kernel_, 3, view, "workspace", a.group, a.queries, &a.o_map));
    }
    w.out = reinterpret_cast<char*>(workspace);
    for (int i = 0; i < 2; ++i) w.out_strides[i] = strides[i] * dtype_bytes(dtype_);
    combined_.partial = w.out;
    combined_.partial_lse = workspace + partial_;
    a.lse = w.lse = workspace + partial_;
  }
  LaunchConfig config;
  config.grid.x = blocks_;
  if (wide_ != nullptr) {
    config.block.x = kWideThreads;
    config.dynamic_smem = kWideShared;
    config.dependent = true;
    void* pointers[] = {&w, &a.k_map, &a.v_map};
    TIERCEL_RETURN_IF_ERROR(wide_->kernel.launch(config, device_, stream, pointers));
  } else {
    config.block.x = kernel_->block;
    config.dynamic_smem = kernel_->dynamic_smem;
    config.dependent = kernel_->dependent;
    TIERCEL_RETURN_IF_ERROR(kernel_->launch(config, device_, stream, &a));
  }
  if (combine_ == nullptr) return Status();
  LaunchConfig second;
  second.grid.x = static_cast<unsigned>(ceil_div(combined_.vectors, int64_t{kPagedCombineThreads}));
  second.block.x = kPagedCombineThreads;
  second.dependent = true;
  void* pointers[] = {&combined_};
  return combine_->kernel.launch(second, device_, stream, pointers);
}

Status paged_attention_check_workspace(const PagedAttentionCall& call, int64_t needed) {
  const Argument workspace{kOp, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(workspace, 1));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, {kOp, "q", *call.q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  if (workspace.view.shape[0] >= needed) return Status();
  return Status::InvalidArgument(mismatch(workspace, "have " + std::to_string(needed) + " elements",
                                          shape_text(workspace.view.shape, 1)));
}

}  // namespace tiercel
