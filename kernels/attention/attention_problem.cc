// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// No limit of a window, and what lengths stay below, so that their sums fit 32 bits.
constexpr int64_t kUnlimited = int64_t{1} << 29;

constexpr int64_t kMaxHeadDimension = 256;
constexpr int64_t kMaxPackedHeadDimension = 128;

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

// Three warpgroups that share keys do more at once; two waste less of a short sequence.
constexpr int64_t kShort = 1024;

bool better(const AttentionVariant& a, const AttentionVariant& b, const AttentionProblem& problem) {
  if (a.d != b.d) return a.d < b.d;
  const bool small = problem.mask != AttentionMask::kNone && problem.seq_q <= kShort;
  return small ? a.tile_m < b.tile_m : a.tile_m > b.tile_m;
}

// How many heads' tiles are mixed, the longest first. Blocks go through them in rounds of
// alternating direction, so that two rounds give each the same work. Mixing all heads evens out
// best; but of many heads with short sequences the L2 should hold the keys.
constexpr int64_t kSharedBytes = int64_t{40} << 20;
constexpr int64_t kFewTiles = 16;  // of one head

}  // namespace

int attention_band(const AttentionProblem& problem, int64_t q_tiles, int64_t blocks,
                   int element_bytes) {
  const int64_t pairs = problem.batch * problem.heads;
  const int64_t rounds = 2 * blocks;
  const int64_t even = rounds / std::gcd(q_tiles, rounds);  // they fill whole rounds
  const int64_t queries_per_key = problem.heads / problem.kv_heads;
  const int64_t head_bytes = 2 * element_bytes * problem.seq_k * problem.d / queries_per_key;
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

Status attention_problem(const char* op, const TensorView& q, int64_t batch, int64_t seq_q,
                         int64_t seq_k, int64_t kv_heads, const AttentionOptions& options,
                         bool packed, AttentionProblem* problem) {
  if (!(options.scale > 0.0) || !std::isfinite(options.scale)) {
    return unsupported(op, "scale", "be positive", std::to_string(options.scale));
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    return unsupported(op, "softcap", "be None or positive", std::to_string(options.softcap));
  }
  if (packed && options.softcap != 0.0) {
    return unsupported(op, "softcap", "be None", std::to_string(options.softcap));
  }
  const int64_t heads = q.shape[q.ndim - 2], d = q.shape[q.ndim - 1];
  *problem = {batch,
              seq_q,
              seq_k,
              heads,
              kv_heads,
              d,
              mask_of(options),
              options.softcap != 0.0,
              options.right >= 0 && (options.left < 0 || options.left >= seq_k),
              packed};
  const int64_t max_d = packed ? kMaxPackedHeadDimension : kMaxHeadDimension;
  if (d < 8 || d > max_d || d % 8 != 0) {
    return unsupported(
        op, "q", "have a head dimension that is a multiple of 8 up to " + std::to_string(max_d),
        std::to_string(d));
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

AttentionChoice attention_choose(DType dtype, const AttentionProblem& problem,
                                 int multiprocessors) {
  AttentionChoice choice{nullptr, 1, 0};
  for (const AttentionKernel& kernel : KernelTable(attention_kernels)) {
    const AttentionVariant& variant = kernel.variant;
    if (variant.dtype != dtype || variant.mask != problem.mask ||
        variant.capped != problem.capped || variant.packed != problem.packed ||
        variant.d < problem.d) {
      continue;
    }
    if (choice.kernel == nullptr || better(variant, choice.kernel->variant, problem)) {
      choice.kernel = &kernel;
    }
  }
  const int64_t pairs = problem.batch * problem.heads;
  const int64_t q_tiles = ceil_div(problem.seq_q, choice.kernel->variant.tile_m);
  if (problem.growing) choice.band = attention_band(problem, q_tiles, multiprocessors, 2);
  const int64_t tiles = q_tiles * pairs;
  choice.blocks = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  return choice;
}

AttentionPlan attention_plan_of(DType dtype, const AttentionProblem& problem, int multiprocessors) {
  if (problem.empty()) return {"none", 0, 0, 0, 0, 0, 0};
  const AttentionChoice choice = attention_choose(dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;
  return {kernel.kernel.name(), kernel.variant.tile_m, kernel.variant.tile_n, choice.band,
          choice.blocks,        kernel.block,          kernel.dynamic_smem};
}

Status attention_launch(const char* op, const AttentionProblem& problem,
                        const AttentionOptions& options, const TensorView (&views)[4], void* lse,
                        AttentionPackedArgs* packed, void* stream) {
  const TensorView& q = views[0];
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(q.device_index, &multiprocessors));
  const AttentionChoice choice = attention_choose(q.dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;

  constexpr const char* kNames[] = {"q", "k", "v", "out"};
  CUtensorMap maps[4];
  for (int i = 0; i < 4; ++i) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[i], views[i], op, kNames[i], &maps[i]));
  }
  int32_t batch = static_cast<int32_t>(problem.batch);
  int32_t seq_q = static_cast<int32_t>(problem.seq_q);
  int32_t seq_k = static_cast<int32_t>(problem.seq_k);
  int32_t heads = static_cast<int32_t>(problem.heads);
  int32_t kv_heads = static_cast<int32_t>(problem.kv_heads);
  int32_t band = choice.band;
  auto [scale, slope] = attention_scales(options);
  int32_t left = attention_limit(options.left);
  int32_t right = attention_limit(options.right);

  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  if (packed != nullptr) {
    void* args[] = {&maps[0],
                    &maps[1],
                    &maps[2],
                    &maps[3],
                    &lse,
                    &packed->starts_q,
                    &packed->starts_k,
                    &packed->out,
                    &batch,
                    &seq_q,
                    &seq_k,
                    &heads,
                    &kv_heads,
                    &scale,
                    &slope,
                    &left,
                    &right,
                    &band,
                    &packed->total_q,
                    &packed->total_k,
                    &packed->step_q,
                    &packed->step_k,
                    &packed->row_step,
                    &packed->head_step,
                    &packed->columns};
    return kernel.kernel.launch(config, q.device_index, stream, args);
  }
  void* args[] = {&maps[0], &maps[1],  &maps[2], &maps[3], &lse,  &batch, &seq_q, &seq_k,
                  &heads,   &kv_heads, &scale,   &slope,   &left, &right, &band};
  return kernel.kernel.launch(config, q.device_index, stream, args);
}

}  // namespace tiercel
