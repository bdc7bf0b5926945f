// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_AS_WIDE_H_
#define KERNELS_ATTENTION_PAGED_AS_WIDE_H_

#include <cstdint>
#include <cstring>

#include "kernels/attention/paged/cache.h"
#include "kernels/attention/paged/kernels.h"
#include "kernels/attention/paged/paged.h"
#include "kernels/attention/paged/split.h"
#include "kernels/attention/paged/wide.h"
#include "kernels/sm90/kernel_table.h"

namespace tiercel {

inline const PagedWideKernel& wide_kernel(DType dtype, bool float8) {
  return *KernelTable(paged_wide_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype && kernel.float8 == float8;
  });
}

// The arguments of paged_wide.cu, of those of kernel.py.
inline void set_wide(const PagedAttentionCall& call, const AttentionPagedArguments& a, bool split,
                     const PagedCache& k, const PagedCache& v, PagedWideArgs* w) {
  w->q = static_cast<const char*>(call.q->data);
  w->out = w->result = static_cast<char*>(call.out->data);
  w->lse = static_cast<float*>(a.lse);
  w->sinks = split ? nullptr : static_cast<const float*>(a.sinks);
  w->tree = call.tree == nullptr ? nullptr : static_cast<const char*>(call.tree->data);
  w->prefixes = static_cast<const char*>(a.prefixes);
  w->k_scale = static_cast<const float*>(a.k_scale);
  w->v_scale = static_cast<const float*>(a.v_scale);
  w->starts = static_cast<const char*>(a.starts_q);
  w->lengths = static_cast<const char*>(a.lengths);
  w->table = static_cast<const char*>(a.table);
  const PagedCache* caches[] = {&k, &v};
  for (int i = 0; i < 2; ++i) {
    const int64_t bytes = dtype_bytes(call.q->dtype), of_cache = dtype_bytes(caches[i]->rows.dtype);
    w->cache[i] = {static_cast<const char*>(caches[i]->rows.data), caches[i]->strides[0] * of_cache,
                   caches[i]->strides[1] * of_cache};
    w->q_strides[i] = call.q->strides[i] * bytes;
    w->out_strides[i] = w->result_strides[i] = call.out->strides[i] * bytes;
  }
  w->table_row = int64_t{a.table_row} * 4;
  w->start_step = a.step_q;
  w->length_step = a.length_step;
  w->table_step = a.table_step;
  w->prefix_step = a.prefix_step;
  w->k_scale_step = a.k_scale_step;
  w->v_scale_step = a.v_scale_step;
  w->tree_step = call.tree == nullptr ? 0 : step_of(*call.tree);
  w->batch = a.batch;
  w->total = a.total_q;
  w->heads = a.heads;
  w->kv_heads = a.kv_heads;
  w->group = a.group;
  w->columns = a.columns;
  w->queries = a.queries;
  w->tiles = a.tiles;
  w->parts = a.parts;
  w->part_keys = a.part_blocks * kWideStep;
  w->left = a.left;
  w->right = a.right;
  w->capacity = a.capacity;
  w->page_bits = a.page_bits;
  w->page_rows = a.page_rows;
  w->last_page = a.last_page;
  w->copy_rows = a.copy_rows;
  w->split = split;
  static_assert(sizeof(w->scale) == sizeof(a.scale));
  std::memcpy(&w->scale, &a.scale, sizeof(w->scale));
  std::memcpy(&w->slope, &a.slope, sizeof(w->slope));
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_AS_WIDE_H_
