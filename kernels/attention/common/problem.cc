// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/common/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// No limit of a window, and what lengths stay below, so that their sums fit 32 bits.
constexpr int64_t kUnlimited = int64_t{1} << 29;

constexpr int64_t kMaxHeadDimension = 256;

bool fits(int64_t d) { return d >= 8 && d <= kMaxHeadDimension && d % 8 == 0; }

Status unsupported(const char* op, const char* name, const std::string& expected,
                   const std::string& got) {
  return Status::Unimplemented(std::string(op) + ": `" + name + "` must " + expected +
                               " for the precompiled kernels, got " + got);
}

AttentionMask mask_of(const AttentionOptions& options) {
  if (options.softcap != 0.0 || options.left >= 0 || options.right > 0) {
    return AttentionMask::kWindow;
  }
  return options.right == 0 ? AttentionMask::kCausal : AttentionMask::kNone;
}

// The number of heads whose tiles are mixed, longest first. Blocks go through them in rounds of
// alternating direction, so that two rounds give each the same work. Mixing all heads evens out
// best; but of many heads with short sequences the L2 should hold the keys.
constexpr int64_t kSharedBytes = int64_t{40} << 20;
constexpr int64_t kFewTiles = 16;  // of one head

// With more heads, long sequences and more keys and values in all, mixing all of them leaves
// each tile alone with its keys, and memory is the limit. Fewer heads at a time, each with several
// tiles that read the same keys, are faster: of 128 heads by a tenth to a quarter on an H200.
constexpr int64_t kManyHeads = 64;
constexpr int64_t kManyBytes = int64_t{256} << 20;
constexpr int64_t kBandBytes = int64_t{112} << 20;
constexpr int64_t kLeastBand = 6, kLargestBand = 12;

// The most heads of so many bytes whose tiles fill all blocks evenly.
int64_t band_of_many(int64_t head_bytes, int64_t blocks) {
  const int64_t most = std::clamp(kBandBytes / head_bytes, kLeastBand, kLargestBand);
  for (int64_t band = most; band >= kLeastBand; --band) {
    if (blocks % band == 0) return band;
  }
  return most;
}

}  // namespace

int attention_band(const AttentionProblem& problem, int64_t q_tiles, int64_t blocks,
                   int element_bytes) {
  const int64_t pairs = problem.batch * problem.heads;
  const int64_t rounds = 2 * blocks;
  const int64_t even = rounds / std::gcd(q_tiles, rounds);  // they fill whole rounds
  const int64_t queries_per_key = problem.heads / problem.kv_heads;
  const int64_t row_bytes = element_bytes * (problem.d + problem.d_v);
  const int64_t head_bytes = problem.seq_k * row_bytes / queries_per_key;
  const bool many = pairs > kManyHeads && pairs * head_bytes > kManyBytes;
  if (many && q_tiles > kFewTiles && queries_per_key == 1) {
    return static_cast<int>(band_of_many(head_bytes, blocks));
  }
  const bool short_heads = q_tiles <= kFewTiles && pairs * head_bytes > kSharedBytes;
  const bool mixed = short_heads && even < pairs && even * head_bytes <= kSharedBytes;
  return static_cast<int>(mixed ? even : pairs);
}

int32_t attention_float_bits(double value) {
  const float narrow = static_cast<float>(value);
  int32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return bits;
}

int32_t attention_limit(int64_t keys) {
  return static_cast<int32_t>(keys < 0 ? kUnlimited : std::min(keys, kUnlimited));
}

// With a cap, powers are of the cap times a hyperbolic tangent.
AttentionScales attention_scales(const AttentionOptions& options) {
  const bool capped = options.softcap != 0.0;
  return {attention_float_bits((capped ? options.softcap : options.scale) * kLog2E),
          attention_float_bits(capped ? options.scale / options.softcap : 0.0)};
}

Status check_attention_tensors(const char* op, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& out, int64_t heads,
                               int64_t kv_heads, DType out_dtype) {
  const Argument q_arg{op, "q", q};
  const Argument k_arg{op, "k", k};
  const Argument v_arg{op, "v", v};
  const Argument out_arg{op, "out", out};
  if (heads > 0 && (kv_heads < 1 || heads % kv_heads != 0)) {
    return Status::InvalidArgument(
        mismatch(k_arg, "have a number of heads that divides that of `q`, " + std::to_string(heads),
                 std::to_string(kv_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q_arg));
  for (const Argument* argument : {&k_arg, &v_arg, &out_arg}) {
    const DType dtype = argument == &out_arg ? out_dtype : q.dtype;
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {dtype}));
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  return Status();
}

Status check_attention_lse(const char* op, const TensorView& lse, const TensorView& q,
                           std::initializer_list<int64_t> shape, const char* why) {
  const Argument argument{op, "lse", lse};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, shape, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status attention_problem(const char* op, const TensorView& q, const TensorView& v, int64_t batch,
                         int64_t seq_q, int64_t seq_k, int64_t kv_heads,
                         const AttentionOptions& options, bool packed, AttentionProblem* problem) {
  if (!(options.scale > 0.0) || !std::isfinite(options.scale)) {
    return unsupported(op, "scale", "be positive", std::to_string(options.scale));
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    return unsupported(op, "softcap", "be None or positive", std::to_string(options.softcap));
  }
  if (packed && q.dtype == DType::kFloat8E4M3 && options.softcap != 0.0) {
    return unsupported(op, "softcap", "be None unless tensors are bfloat16 or float16",
                       std::to_string(options.softcap));
  }
  const int64_t heads = q.shape[q.ndim - 2], d = q.shape[q.ndim - 1], d_v = v.shape[v.ndim - 1];
  *problem = {batch,
              seq_q,
              seq_k,
              heads,
              kv_heads,
              d,
              d_v,
              mask_of(options),
              options.softcap != 0.0,
              options.right >= 0 && (options.left < 0 || options.left >= seq_k),
              packed};
  if (!fits(d) || !fits(d_v)) {
    return unsupported(
        op, fits(d) ? "v" : "q",
        "have a head dimension that is a multiple of 8 up to " + std::to_string(kMaxHeadDimension),
        std::to_string(fits(d) ? d_v : d));
  }
  if (problem->empty()) return Status();
  if (seq_k == 0) return unsupported(op, "k", "have at least one key", "none");
  for (const int64_t length : {seq_q, seq_k}) {
    if (length >= kUnlimited) {
      return unsupported(op, length == seq_q ? "q" : "k", "have fewer than 2^29 rows a sequence",
                         std::to_string(length));
    }
  }
  // Tiles are counted in 32 bits.
  if (ceil_div(seq_q, 64) > (int64_t{1} << 30) / batch / heads) {
    return unsupported(op, "q", "have fewer than 2^30 tiles of 64 queries",
                       "shape " + shape_text(q.shape, q.ndim));
  }
  return Status();
}

Status check_attention_sinks(const char* op, const char* name, const TensorView& sinks,
                             int64_t heads, const TensorView& q) {
  const Argument argument{op, name, sinks};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {heads}, "[H]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status check_attention_same_d(const char* op, const TensorView& v,
                              const AttentionProblem& problem) {
  if (problem.d_v == problem.d) return Status();
  return unsupported(op, "v", "have the head dimension of `q`, " + std::to_string(problem.d) + ",",
                     std::to_string(problem.d_v));
}

Status check_attention(const char* op, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& out, const TensorView* lse,
                       const AttentionOptions& options, AttentionProblem* problem,
                       AttentionElements elements) {
  const Argument q_arg{op, "q", q};
  const Argument k_arg{op, "k", k};
  const Argument v_arg{op, "v", v};
  const Argument out_arg{op, "out", out};
  for (const Argument* argument : {&q_arg, &k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 4));
  }
  const bool fp8 = elements == AttentionElements::kFp8;
  TIERCEL_RETURN_IF_ERROR(fp8 ? check_dtype(q_arg, {DType::kFloat8E4M3})
                              : check_dtype(q_arg, {DType::kBFloat16, DType::kFloat16}));
  const int64_t batch = q.shape[0], seq_q = q.shape[1], heads = q.shape[2], d = q.shape[3];
  const int64_t seq_k = k.shape[1], kv_heads = k.shape[2], d_v = v.shape[3];
  TIERCEL_RETURN_IF_ERROR(check_shape(k_arg, {batch, seq_k, kv_heads, d}, "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(v_arg, {batch, seq_k, kv_heads, d_v}, "[B, Sk, Hk, Dv]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {batch, seq_q, heads, d_v}, "[B, Sq, H, Dv]"));
  TIERCEL_RETURN_IF_ERROR(
      check_attention_tensors(op, q, k, v, out, heads, kv_heads, fp8 ? DType::kBFloat16 : q.dtype));
  if (lse != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_attention_lse(op, *lse, q, {batch, heads, seq_q}, "[B, H, Sq]"));
  }
  TIERCEL_RETURN_IF_ERROR(
      attention_problem(op, q, v, batch, seq_q, seq_k, kv_heads, options, false, problem));
  if (problem->empty()) return Status();
  const TensorMapSpec any{
      4, {1, 64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, op, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, k, op, "k"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, v, op, "v"));
  return check_tensor_map(any, out, op, "out");
}

AttentionArgs::AttentionArgs(const AttentionProblem& problem, const AttentionOptions& options,
                             int band) {
  const auto [scale, slope] = attention_scales(options);
  const int64_t scalars[] = {problem.batch,
                             problem.seq_q,
                             problem.seq_k,
                             problem.heads,
                             problem.kv_heads,
                             scale,
                             slope,
                             attention_limit(options.left),
                             attention_limit(options.right),
                             band};
  std::copy(std::begin(scalars), std::end(scalars), scalars_);
}

void** AttentionArgs::list(CUtensorMap (&maps)[4], void** lse, void* more,
                           AttentionPackedArgs* packed) {
  void** next = list_;
  for (CUtensorMap& map : maps) *next++ = &map;
  *next++ = lse;
  *next++ = more;
  if (packed != nullptr) {
    for (void** pointer : {&packed->starts_q, &packed->starts_k, &packed->out}) *next++ = pointer;
  }
  for (int32_t& scalar : scalars_) *next++ = &scalar;
  if (packed != nullptr) {
    for (int32_t* size : {&packed->total_q, &packed->total_k, &packed->step_q, &packed->step_k,
                          &packed->row_step, &packed->head_step, &packed->columns}) {
      *next++ = size;
    }
  }
  return list_;
}

}  // namespace tiercel
