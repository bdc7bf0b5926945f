// SPDX-License-Identifier: Apache-2.0
// What attention's two forms share: the problem, the choice of kernel and the launch.
#ifndef KERNELS_ATTENTION_ATTENTION_PROBLEM_H_
#define KERNELS_ATTENTION_ATTENTION_PROBLEM_H_

#include "kernels/attention/attention_kernels.h"

namespace tiercel {

struct AttentionProblem {
  int64_t batch, seq_q, seq_k, heads, kv_heads, d;  // lengths are the longest sequence's
  AttentionMask mask;
  bool capped;
  bool growing;  // later queries see more keys
  bool packed;

  bool empty() const { return batch * seq_q * heads == 0; }
};

// The problem of these options, whose lengths and head dimensions there is a kernel for.
Status attention_problem(const char* op, const TensorView& q, int64_t batch, int64_t seq_q,
                         int64_t seq_k, int64_t kv_heads, const AttentionOptions& options,
                         bool packed, AttentionProblem* problem);

struct AttentionChoice {
  const AttentionKernel* kernel;
  int band;
  unsigned blocks;
};

AttentionChoice attention_choose(DType dtype, const AttentionProblem& problem, int multiprocessors);

AttentionPlan attention_plan_of(DType dtype, const AttentionProblem& problem, int multiprocessors);

// dtypes, devices and heads, as both forms have them.
Status check_attention_tensors(const char* op, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& out, int64_t heads,
                               int64_t kv_heads);
Status check_attention_lse(const char* op, const TensorView& lse, const TensorView& q,
                           std::initializer_list<int64_t> shape, const char* why);

// What a launch needs beside the maps of q, k, v and out.
struct AttentionPointers {
  void* lse = nullptr;
  void* starts_q = nullptr;  // of packed sequences
  void* starts_k = nullptr;
  int64_t total_q = 0;
};

// Views are [batch, heads, rows, d], as the maps see them.
Status attention_launch(const char* op, const AttentionProblem& problem,
                        const AttentionOptions& options, const TensorView (&views)[4],
                        const AttentionPointers& pointers, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_ATTENTION_PROBLEM_H_
