// SPDX-License-Identifier: Apache-2.0
// float8 queries over a float8 cache: a kernel converts them to bfloat16, which is exact, and folds
// their factor into that of the keys. The other kernels then take a call of 16-bit queries.
#ifndef KERNELS_ATTENTION_PAGED_QUERIES_H_
#define KERNELS_ATTENTION_PAGED_QUERIES_H_

#include <cstdint>

#include "kernels/attention/paged/paged.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kPagedQueriesThreads = 128;

// A block has a row of q. The first one multiplies the factors.
struct PagedQueriesArgs {
  const char* q;
  char* to;              // [rows, heads, 8 * vectors] bfloat16
  const float* q_scale;  // one element, or null: no factors
  const float* k_scale;  // or null: 1
  float* factors;        // [key heads]
  int64_t row;           // bytes of q, from a row to the next
  int64_t head;          // the same
  int32_t heads;
  int32_t kv_heads;
  int32_t vectors;  // of 8 columns, of a head
  int32_t k_scale_step;
};

struct PagedQueriesKernel {
  Kernel kernel;
};

const PagedQueriesKernel* paged_queries_kernels(int* count);

// Checks what a call of 16-bit queries does not: the types of float8 queries, and their layout.
Status check_paged_queries(const PagedAttentionCall& call);

// A call whose q is float8, with q in bfloat16 and the factors at `memory`.
class WideQueries {
 public:
  WideQueries(const PagedAttentionCall& call, float* memory);
  WideQueries(const WideQueries&) = delete;
  WideQueries& operator=(const WideQueries&) = delete;

  const PagedAttentionCall& call() const { return call_; }

  // Floats at `memory`, a multiple of 16 bytes.
  static int64_t floats(const PagedAttentionCall& call);

  // Converts on `stream`.
  Status run(void* stream) const;

 private:
  PagedAttentionCall call_;
  const TensorView& from_;
  TensorView q_{}, factors_{};
  int64_t q_strides_[3], factors_shape_[1], factors_strides_[1];
  PagedQueriesArgs args_{};
};

// paged_attention_plan for float8 queries.
Status paged_queries_plan(const PagedAttentionCall& call, int multiprocessors,
                          PagedAttentionPlan* plan);

// A call that was checked, of any queries. The call and its tensors must outlive it.
class PagedQueriesLaunch {
 public:
  // For the tensors' device; launches nothing.
  Status prepare(const PagedAttentionCall& call);

  // See PagedAttentionLaunch.
  int64_t workspace() const { return workspace_; }

  // On `stream`, a CUstream; `workspace` starts at a multiple of 16 bytes.
  Status run(float* workspace, void* stream);

 private:
  PagedAttentionLaunch launch_;
  const PagedAttentionCall* narrow_ = nullptr;  // a call of float8 queries that are not empty
  int64_t workspace_ = 0;
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_QUERIES_H_
