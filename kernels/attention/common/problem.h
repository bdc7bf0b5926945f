// SPDX-License-Identifier: Apache-2.0
// Host code that forward, fp8 and backward share: checks, the problem, and the maps' views.
#ifndef KERNELS_ATTENTION_COMMON_PROBLEM_H_
#define KERNELS_ATTENTION_COMMON_PROBLEM_H_

#include <initializer_list>

#include "kernels/attention/common/options.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {

struct AttentionProblem {
  int64_t batch, seq_q, seq_k, heads, kv_heads;  // lengths are the longest sequence's
  int64_t d, d_v;                                // columns of q and k, and of v and out
  AttentionMask mask;
  bool capped;
  bool growing;  // later queries see more keys
  bool packed;

  bool empty() const { return batch == 0 || seq_q == 0 || heads == 0; }
};

// The problem of these options, whose lengths and head dimensions there is a kernel for.
Status attention_problem(const char* op, const TensorView& q, const TensorView& v, int64_t batch,
                         int64_t seq_q, int64_t seq_k, int64_t kv_heads,
                         const AttentionOptions& options, bool packed, AttentionProblem* problem);

// An error unless v has q's head dimension: FP8's kernels know no other.
Status check_attention_same_d(const char* op, const TensorView& v, const AttentionProblem& problem);

// A check of sinks or their gradient: [H], float32 and contiguous, on q's device.
Status check_attention_sinks(const char* op, const char* name, const TensorView& sinks,
                             int64_t heads, const TensorView& q);

// The number of heads whose tiles are mixed, for a problem whose later queries see more keys;
// elements of k and v have `element_bytes`.
int attention_band(const AttentionProblem& problem, int64_t q_tiles, int64_t blocks,
                   int element_bytes);

// The dtypes of q, k and v: bfloat16 or float16, as the result; or e4m3, with a bfloat16 result.
enum class AttentionElements { k16Bits, kFp8 };

// All checks of a call with q, k, v and out of four dimensions; `lse` may be null.
Status check_attention(const char* op, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& out, const TensorView* lse,
                       const AttentionOptions& options, AttentionProblem* problem,
                       AttentionElements elements = AttentionElements::k16Bits);

Status check_attention_varlen(const PackedAttention& call, AttentionProblem* problem,
                              AttentionElements elements = AttentionElements::k16Bits);

// Its parts that do not look at max_q, max_k and options: dtypes, shapes and devices, and of a
// problem that is not empty the strides of q, k, v and out.
Status check_attention_packed(const char* op, const PackedAttention& call,
                              AttentionElements elements);
Status check_attention_packed_maps(const char* op, const PackedAttention& call);

// dtypes, devices and heads, as both forms have them.
Status check_attention_tensors(const char* op, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& out, int64_t heads,
                               int64_t kv_heads, DType out_dtype);
Status check_attention_lse(const char* op, const TensorView& lse, const TensorView& q,
                           std::initializer_list<int64_t> shape, const char* why);

// [B, S, H, D] as [B, H, S, D]: a copy takes rows of one head.
struct AttentionByHead {
  explicit AttentionByHead(const TensorView& from)
      : shape{from.shape[0], from.shape[2], from.shape[1], from.shape[3]},
        strides{from.strides[0], from.strides[2], from.strides[1], from.strides[3]},
        view(from) {
    view.shape = shape;
    view.strides = strides;
  }
  AttentionByHead(const AttentionByHead&) = delete;
  AttentionByHead& operator=(const AttentionByHead&) = delete;

  int64_t shape[4];
  int64_t strides[4];
  TensorView view;
};

// [T, H, D] as [T + 1, 2^30 + 1, H, 2^30, D]: element (end, 2^30, h, 2^30 - n + i, c) is row i of a
// sequence of n rows that ends before row `end`. The first dimension and the fourth both go by
// rows, and 2^30 steps of the second are 2^64 bytes less 2^30 rows: addresses wrap, and the map
// begins where the tensor does. (The copy engine loads nothing through a map that begins in
// unmapped memory. The trick is of Triton's tools/ragged_tma.py.)
struct AttentionPackedRows {
  static constexpr int64_t kRows = int64_t{1} << 30;  // PACKED_ROWS in layouts.py
  static constexpr int64_t kWrap = int64_t{1} << 34;  // bytes; 2^30 times it is 2^64

  explicit AttentionPackedRows(const TensorView& from)
      : shape{from.shape[0] + 1, kRows + 1, from.shape[1], kRows, from.shape[2]},
        strides{from.strides[0], kWrap / dtype_bytes(from.dtype) - from.strides[0], from.strides[1],
                from.strides[0], from.strides[2]},
        view(from) {
    view.ndim = 5;
    view.shape = shape;
    view.strides = strides;
  }
  AttentionPackedRows(const AttentionPackedRows&) = delete;
  AttentionPackedRows& operator=(const AttentionPackedRows&) = delete;

  int64_t shape[5];
  int64_t strides[5];
  TensorView view;
};

// The bits of `value` as a float32: the kernels' scalars are integers.
int32_t attention_float_bits(double value);

// One side of a window as the kernels take it; a large number for no limit.
int32_t attention_limit(int64_t keys);

// The factors of scores before a power of 2 is taken, and before the cap's tangent.
struct AttentionScales {
  int32_t scale;
  int32_t slope;
};
AttentionScales attention_scales(const AttentionOptions& options);

// The parameters of packed sequences, beside the maps; Packed in packed.py.
struct AttentionPackedArgs {
  explicit AttentionPackedArgs(const PackedAttention& call);

  void* starts_q;
  void* starts_k;
  void* out;
  int32_t total_q;  // rows of q, and of k
  int32_t total_k;
  int32_t step_q;  // from one of the starts to the next, in bytes
  int32_t step_k;
  int32_t row_step;  // of out, in 16 bytes
  int32_t head_step;
  int32_t columns;
};

// The parameters of a forward kernel, in its order. Problem in problem.py names the scalars.
class AttentionArgs {
 public:
  AttentionArgs(const AttentionProblem& problem, const AttentionOptions& options, int band);

  // The argument list of a launch, which points to all of these. `more` points to the sinks, or to
  // FP8's factors; `packed` is null unless the problem is packed.
  void** list(CUtensorMap (&maps)[4], void** lse, void* more, AttentionPackedArgs* packed);

 private:
  int32_t scalars_[10];
  void* list_[26];
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_COMMON_PROBLEM_H_
