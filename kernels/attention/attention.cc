// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "kernels/attention/attention_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention";
constexpr int64_t kMaxHeadDimension = 256;
constexpr double kLog2E = 1.4426950408889634;

// No limit of a window, and what lengths stay below, so that their sums fit 32 bits.
constexpr int64_t kUnlimited = int64_t{1} << 29;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Problem {
  int64_t batch, seq_q, seq_k, heads, kv_heads, d;
  AttentionMask mask;
  bool capped;
  bool growing;  // later queries see more keys
};

Status unsupported(const char* name, const std::string& expected, const std::string& got) {
  return Status::Unimplemented(std::string(kOp) + ": `" + name + "` must " + expected + ", got " +
                               got);
}

Status check_options(const AttentionOptions& options) {
  if (!(options.scale > 0.0) || !std::isfinite(options.scale)) {
    return unsupported("scale", "be positive for the precompiled kernels",
                       std::to_string(options.scale));
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    return unsupported("softcap", "be None or positive for the precompiled kernels",
                       std::to_string(options.softcap));
  }
  return Status();
}

AttentionMask mask_of(const AttentionOptions& options) {
  if (options.softcap != 0.0 || options.left >= 0 || options.right > 0) {
    return AttentionMask::kWindow;
  }
  return options.right == 0 ? AttentionMask::kCausal : AttentionMask::kNone;
}

Status check(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
             const TensorView* lse, const AttentionOptions& options, Problem* problem) {
  const Argument q_arg{kOp, "q", q};
  const Argument k_arg{kOp, "k", k};
  const Argument v_arg{kOp, "v", v};
  const Argument out_arg{kOp, "out", out};
  for (const Argument* argument : {&q_arg, &k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 4));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(q_arg, {DType::kBFloat16, DType::kFloat16}));
  const int64_t batch = q.shape[0], seq_q = q.shape[1], heads = q.shape[2], d = q.shape[3];
  const int64_t seq_k = k.shape[1], kv_heads = k.shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(k_arg, {batch, seq_k, kv_heads, d}, "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(v_arg, {batch, seq_k, kv_heads, d}, "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {batch, seq_q, heads, d}, "[B, Sq, H, D]"));
  if (heads > 0 && (kv_heads < 1 || heads % kv_heads != 0)) {
    return Status::InvalidArgument(
        mismatch(k_arg, "have a number of heads that divides that of `q`, " + std::to_string(heads),
                 std::to_string(kv_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q_arg));
  for (const Argument* argument : {&k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {q.dtype}));
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  if (lse != nullptr) {
    const Argument lse_arg{kOp, "lse", *lse};
    TIERCEL_RETURN_IF_ERROR(check_dtype(lse_arg, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(lse_arg, {batch, heads, seq_q}, "[B, H, Sq]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(lse_arg, q_arg));
    TIERCEL_RETURN_IF_ERROR(check_cuda(lse_arg));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(lse_arg));
  }
  TIERCEL_RETURN_IF_ERROR(check_options(options));
  *problem = {batch, seq_q, seq_k, heads, kv_heads, d, mask_of(options), options.softcap != 0.0,
              false};
  problem->growing = options.right >= 0 && (options.left < 0 || options.left >= seq_k);
  if (d < 8 || d > kMaxHeadDimension || d % 8 != 0) {
    return unsupported(
        "q", "have a head dimension that is a multiple of 8 up to 256 for the precompiled kernels",
        std::to_string(d));
  }
  if (batch * seq_q * heads == 0) return Status();
  if (seq_k == 0) return unsupported("k", "have at least one key", "none");
  for (const Argument* argument : {&q_arg, &k_arg}) {
    if (argument->view.shape[1] >= kUnlimited) {
      return Status::Unimplemented(mismatch(*argument,
                                            "have fewer than 2^29 rows for the precompiled kernels",
                                            std::to_string(argument->view.shape[1])));
    }
  }
  // Tiles are counted in 32 bits.
  if (ceil_div(seq_q, 64) > (int64_t{1} << 30) / (batch * heads)) {
    return unsupported("q", "have fewer than 2^30 tiles of 64 queries",
                       "shape " + shape_text(q.shape, q.ndim));
  }
  const TensorMapSpec any{
      4, {1, 64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, kOp, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, k, kOp, "k"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, v, kOp, "v"));
  return check_tensor_map(any, out, kOp, "out");
}

struct Choice {
  const AttentionKernel* kernel;
  int band;
  unsigned blocks;
};

// Three warpgroups that share keys do more at once; two waste less of a short sequence.
constexpr int64_t kShort = 1024;

bool better(const AttentionVariant& a, const AttentionVariant& b, const Problem& problem) {
  if (a.d != b.d) return a.d < b.d;
  const bool small = problem.mask != AttentionMask::kNone && problem.seq_q <= kShort;
  return small ? a.tile_m < b.tile_m : a.tile_m > b.tile_m;
}

// How many heads' tiles are mixed, the longest first. Blocks go through them in rounds of
// alternating direction, so that two rounds give each the same work. Mixing all heads evens out
// best; but of many heads with short sequences the L2 should hold the keys.
constexpr int64_t kSharedBytes = int64_t{40} << 20;
constexpr int64_t kFewTiles = 16;  // of one head

int64_t band(const Problem& problem, int64_t q_tiles, int64_t pairs, int64_t blocks) {
  const int64_t rounds = 2 * blocks;
  const int64_t even = rounds / std::gcd(q_tiles, rounds);  // they fill whole rounds
  const int64_t queries_per_key = problem.heads / problem.kv_heads;
  const int64_t head_bytes = 4 * problem.seq_k * problem.d / queries_per_key;
  const bool short_heads = q_tiles <= kFewTiles && pairs * head_bytes > kSharedBytes;
  return short_heads && even < pairs && even * head_bytes <= kSharedBytes ? even : pairs;
}

Choice choose(DType dtype, const Problem& problem, int multiprocessors) {
  int count = 0;
  const AttentionKernel* kernels = attention_kernels(&count);
  Choice choice{nullptr, 1, 0};
  for (int i = 0; i < count; ++i) {
    const AttentionVariant& variant = kernels[i].variant;
    if (variant.dtype != dtype || variant.mask != problem.mask ||
        variant.capped != problem.capped || variant.d < problem.d) {
      continue;
    }
    if (choice.kernel == nullptr || better(variant, choice.kernel->variant, problem)) {
      choice.kernel = &kernels[i];
    }
  }
  const int64_t pairs = problem.batch * problem.heads;
  const int64_t q_tiles = ceil_div(problem.seq_q, choice.kernel->variant.tile_m);
  if (problem.growing) {
    choice.band = static_cast<int>(band(problem, q_tiles, pairs, multiprocessors));
  }
  const int64_t tiles = q_tiles * pairs;
  choice.blocks = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  return choice;
}

// [B, S, H, D] as [B, H, S, D]: a copy takes rows of one head.
struct ByHead {
  explicit ByHead(const TensorView& view)
      : shape{view.shape[0], view.shape[2], view.shape[1], view.shape[3]},
        strides{view.strides[0], view.strides[2], view.strides[1], view.strides[3]},
        view(view) {
    this->view.shape = shape;
    this->view.strides = strides;
  }
  ByHead(const ByHead&) = delete;
  ByHead& operator=(const ByHead&) = delete;

  int64_t shape[4];
  int64_t strides[4];
  TensorView view;
};

// Scalars of the kernels are integers; some are a float's bits.
int32_t float_bits(double value) {
  const float narrow = static_cast<float>(value);
  int32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return bits;
}

int32_t limit(int64_t keys) {
  return static_cast<int32_t>(keys < 0 ? kUnlimited : std::min(keys, kUnlimited));
}

}  // namespace

Status attention_plan(const TensorView& q, const TensorView& k, const TensorView& v,
                      const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                      int multiprocessors, AttentionPlan* plan) {
  Problem problem;
  TIERCEL_RETURN_IF_ERROR(check(q, k, v, out, lse, options, &problem));
  *plan = {"none", 0, 0, 0, 0, 0, 0};
  if (problem.batch * problem.seq_q * problem.heads == 0) return Status();
  const Choice choice = choose(q.dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;
  *plan = {kernel.kernel.name(), kernel.variant.tile_m, kernel.variant.tile_n, choice.band,
           choice.blocks,        kernel.block,          kernel.dynamic_smem};
  return Status();
}

Status attention(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                 void* stream) {
  Problem problem;
  TIERCEL_RETURN_IF_ERROR(check(q, k, v, out, lse, options, &problem));
  if (problem.batch * problem.seq_q * problem.heads == 0) return Status();
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(q.device_index, &multiprocessors));
  const Choice choice = choose(q.dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;

  CUtensorMap q_map, k_map, v_map, out_map;
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[0], ByHead(q).view, kOp, "q", &q_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[1], ByHead(k).view, kOp, "k", &k_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[2], ByHead(v).view, kOp, "v", &v_map));
  TIERCEL_RETURN_IF_ERROR(
      encode_tensor_map(kernel.maps[3], ByHead(out).view, kOp, "out", &out_map));
  const void* lse_data = lse == nullptr ? nullptr : lse->data;
  int32_t batch = static_cast<int32_t>(problem.batch);
  int32_t seq_q = static_cast<int32_t>(problem.seq_q);
  int32_t seq_k = static_cast<int32_t>(problem.seq_k);
  int32_t heads = static_cast<int32_t>(problem.heads);
  int32_t kv_heads = static_cast<int32_t>(problem.kv_heads);
  int32_t band = choice.band;
  // Powers are of 2; with a cap, what they are of is the cap times a hyperbolic tangent.
  int32_t scale = float_bits((problem.capped ? options.softcap : options.scale) * kLog2E);
  int32_t slope = float_bits(problem.capped ? options.scale / options.softcap : 0.0);
  int32_t left = limit(options.left);
  int32_t right = limit(options.right);

  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  void* args[] = {&q_map, &k_map,    &v_map, &out_map, &lse_data, &batch, &seq_q, &seq_k,
                  &heads, &kv_heads, &scale, &slope,   &left,     &right, &band};
  return kernel.kernel.launch(config, q.device_index, stream, args);
}

}  // namespace tiercel
