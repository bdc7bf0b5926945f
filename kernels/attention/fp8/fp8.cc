// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/fp8/fp8.h"

#include <algorithm>
#include <string>

#include "kernels/attention/common/problem.h"
#include "kernels/attention/fp8/kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr int64_t kMaxHeadDimension = 128;

bool is_one(const TensorView& scale) {
  return std::all_of(scale.shape, scale.shape + scale.ndim, [](int64_t n) { return n == 1; });
}

Status check_descale(const char* op, const char* name, const TensorView* scale, const TensorView& q,
                     int64_t batch, int64_t kv_heads) {
  if (scale == nullptr) return Status();
  const Argument argument{op, name, *scale};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  const int64_t* shape = scale->shape;
  const bool per_head = scale->ndim == 1 && shape[0] == kv_heads;
  const bool per_entry = scale->ndim == 2 && shape[0] == batch && shape[1] == kv_heads;
  if (is_one(*scale) || per_head || per_entry) return Status();
  return Status::InvalidArgument(mismatch(argument,
                                          "have shape [B, Hk] = [" + std::to_string(batch) + ", " +
                                              std::to_string(kv_heads) + "], [Hk] or one element",
                                          shape_text(shape, scale->ndim)));
}

PackedAttention packed_of(const AttentionFp8Call& call) {
  return {call.q,        call.k,        call.v,     call.out,   call.lse,
          call.starts_q, call.starts_k, call.max_q, call.max_k, call.options};
}

// An upper bound of the keys in the tiles of packed sequences.
int64_t packed_keys(const AttentionFp8Call& call) {
  return call.k->shape[0] + call.starts_k->shape[0] * kAttentionFp8Keys;
}

Status check(const AttentionFp8Call& call, AttentionProblem* problem) {
  const TensorView& q = *call.q;
  const char* op = call.op();
  constexpr AttentionElements kElements = AttentionElements::kFp8;
  TIERCEL_RETURN_IF_ERROR(call.starts_q == nullptr
                              ? check_attention(op, q, *call.k, *call.v, *call.out, call.lse,
                                                call.options, problem, kElements)
                              : check_attention_varlen(packed_of(call), problem, kElements));
  TIERCEL_RETURN_IF_ERROR(check_attention_same_d(op, *call.v, *problem));
  const int64_t batch = problem->batch, kv_heads = problem->kv_heads;
  TIERCEL_RETURN_IF_ERROR(check_descale(op, "q_descale", call.q_descale, q, batch, kv_heads));
  TIERCEL_RETURN_IF_ERROR(check_descale(op, "k_descale", call.k_descale, q, batch, kv_heads));
  TIERCEL_RETURN_IF_ERROR(check_descale(op, "v_descale", call.v_descale, q, batch, kv_heads));
  if (problem->d % 16 != 0 || problem->d > kMaxHeadDimension) {
    return Status::Unimplemented(
        mismatch(Argument{op, "q", q},
                 "have a head dimension that is a multiple of 16 up to 128 for the precompiled "
                 "kernels of float8_e4m3fn",
                 std::to_string(problem->d)));
  }
  if (problem->empty()) return Status();
  // Blocks of keys and columns of packed values have 32-bit numbers.
  constexpr int64_t kMaxBlocks = int64_t{1} << 30, kMaxPackedKeys = int64_t{1} << 29;
  const bool many = ceil_div(problem->seq_k, kAttentionFp8Keys) > kMaxBlocks / batch / kv_heads;
  if (many || (problem->packed && packed_keys(call) > kMaxPackedKeys)) {
    return Status::Unimplemented(mismatch(Argument{op, "k", *call.k},
                                          "have fewer than 2^30 blocks of 128 keys",
                                          "shape " + shape_text(call.k->shape, call.k->ndim)));
  }
  return Status();
}

struct Choice {
  const AttentionFp8Kernel* kernel = nullptr;
  int band = 1;
  unsigned grid = 0;
  int blocks = 0;       // of keys, to be transposed
  int64_t columns = 0;  // of a row of transposed values
  int64_t factors = 0;  // bytes, before the values
  int64_t workspace = 0;
};

// Three warpgroups that share keys do more at once; two waste less of a short sequence.
constexpr int64_t kShort = 1024;

bool better(const AttentionFp8Variant& a, const AttentionFp8Variant& b, int64_t seq_q) {
  if (a.max_d != b.max_d) return a.max_d < b.max_d;
  return seq_q <= kShort && !batch_invariant() ? a.tile_m < b.tile_m : a.tile_m > b.tile_m;
}

Choice choose(const AttentionFp8Call& call, const AttentionProblem& problem, int multiprocessors) {
  Choice choice;
  for (const AttentionFp8Kernel& kernel : KernelTable(attention_fp8_kernels)) {
    const AttentionFp8Variant& variant = kernel.variant;
    if (variant.mask == problem.mask && variant.capped == problem.capped &&
        variant.packed == problem.packed && variant.max_d >= problem.d &&
        (choice.kernel == nullptr || better(variant, choice.kernel->variant, problem.seq_q))) {
      choice.kernel = &kernel;
    }
  }
  const int64_t q_tiles = ceil_div(problem.seq_q, choice.kernel->variant.tile_m);
  if (problem.growing) choice.band = attention_band(problem, q_tiles, multiprocessors, 1);
  const int64_t tiles = q_tiles * problem.batch * problem.heads;
  choice.grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  const int64_t pairs = problem.batch * problem.kv_heads;
  const AttentionFp8Variant& variant = choice.kernel->variant;
  const int64_t k_tiles = ceil_div(problem.seq_k, variant.tile_n);
  choice.blocks = static_cast<int>(ceil_div(k_tiles * variant.tile_n, kAttentionFp8Keys));
  choice.factors = round_up(pairs * 2 * static_cast<int64_t>(sizeof(float)), 128);
  const int64_t tiles_of_row =
      problem.packed ? call.k->shape[0] / variant.tile_n + problem.batch : k_tiles;
  choice.columns = tiles_of_row * variant.tile_columns;
  const int64_t rows = (problem.packed ? problem.kv_heads : pairs) * problem.d;
  choice.workspace = choice.factors + rows * choice.columns;
  return choice;
}

AttentionFp8Scale scale_of(const TensorView* scale) {
  if (scale == nullptr) return {nullptr, 0, 0};
  const float* data = static_cast<const float*>(scale->data);
  if (is_one(*scale)) return {data, 0, 0};
  if (scale->ndim == 1) return {data, 0, scale->strides[0]};
  return {data, scale->strides[0], scale->strides[1]};
}

// `Rows` is the view that the maps have of q, k and out. Transposed values are [batch, heads, d,
// columns]; packed sequences are a batch of one.
template <typename Rows>
Status encode_maps(const AttentionFp8Call& call, const AttentionProblem& problem,
                   const Choice& choice, void* values, CUtensorMap (&maps)[4]) {
  const int64_t head = problem.d * choice.columns;
  const int64_t shape[] = {problem.packed ? 1 : problem.batch, problem.kv_heads, problem.d,
                           choice.columns};
  const int64_t strides[] = {problem.kv_heads * head, head, choice.columns, 1};
  TensorView transposed = *call.v;
  transposed.data = values;
  transposed.ndim = 4;
  transposed.shape = shape;
  transposed.strides = strides;
  const Rows q(*call.q), k(*call.k), out(*call.out);
  const TensorView views[] = {q.view, k.view, transposed, out.view};
  constexpr const char* kNames[] = {"q", "k", "workspace", "out"};
  for (int i = 0; i < 4; ++i) {
    TIERCEL_RETURN_IF_ERROR(
        encode_tensor_map(choice.kernel->maps[i], views[i], call.op(), kNames[i], &maps[i]));
  }
  return Status();
}

}  // namespace

Status attention_fp8_plan(const AttentionFp8Call& call, int multiprocessors,
                          AttentionFp8Plan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  *plan = {{"none", 0, 0, 0, 0, 0, 0}, 0};
  if (problem.empty()) return Status();
  const Choice choice = choose(call, problem, multiprocessors);
  const AttentionFp8Kernel& kernel = *choice.kernel;
  *plan = {{kernel.kernel.name(), kernel.variant.tile_m, kernel.variant.tile_n, choice.band,
            choice.grid, kernel.block, kernel.dynamic_smem},
           choice.workspace};
  return Status();
}

Status attention_fp8(const AttentionFp8Call& call, void* stream) {
  const AttentionOptions& options = call.options;
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  if (problem.empty()) return Status();
  const TensorView &q = *call.q, &v = *call.v;
  const int device = q.device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Choice choice = choose(call, problem, multiprocessors);
  const AttentionFp8Kernel& kernel = *choice.kernel;
  const char* op = call.op();
  const Argument workspace{op, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kUInt8}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {choice.workspace}, "what the plan says"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));

  AttentionFp8ValuesArgs values{};
  values.v = static_cast<const char*>(v.data);
  const int64_t* strides = v.strides + v.ndim - 3;
  values.batch_stride = problem.packed ? 0 : v.strides[0];
  values.key_stride = strides[0];
  values.head_stride = strides[1];
  values.factors = static_cast<float*>(call.workspace->data);
  values.transposed = static_cast<char*>(call.workspace->data) + choice.factors;
  values.row_bytes = choice.columns;
  if (problem.packed) {
    values.starts = static_cast<const int*>(call.starts_k->data);
    values.start_step = static_cast<int>(call.starts_k->strides[0]);
  }
  values.q_scale = scale_of(call.q_descale);
  values.k_scale = scale_of(call.k_descale);
  values.v_scale = scale_of(call.v_descale);
  values.keys = static_cast<int>(problem.packed ? call.k->shape[0] : problem.seq_k);
  values.heads = static_cast<int>(problem.kv_heads);
  values.blocks = choice.blocks;
  values.tile_n = kernel.variant.tile_n;
  values.tile_columns = kernel.variant.tile_columns;
  values.d = static_cast<int>(problem.d);
  LaunchConfig values_config;
  values_config.grid.x = static_cast<unsigned>(problem.batch * problem.kv_heads * values.blocks);
  values_config.block.x = kAttentionFp8Threads;
  values_config.dependent = true;
  void* values_args[] = {&values};

  CUtensorMap maps[4];
  TIERCEL_RETURN_IF_ERROR(
      problem.packed
          ? encode_maps<AttentionPackedRows>(call, problem, choice, values.transposed, maps)
          : encode_maps<AttentionByHead>(call, problem, choice, values.transposed, maps));
  void* lse = call.lse == nullptr ? nullptr : call.lse->data;
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  TIERCEL_RETURN_IF_ERROR(
      attention_fp8_values_kernel().launch(values_config, device, stream, values_args));
  AttentionArgs args(problem, options, choice.band);
  if (!problem.packed) {
    void** list = args.list(maps, &lse, &values.factors, /*packed=*/nullptr);
    return kernel.kernel.launch(config, device, stream, list);
  }
  AttentionPackedArgs packed(packed_of(call));
  void** list = args.list(maps, &lse, &values.factors, &packed);
  return kernel.kernel.launch(config, device, stream, list);
}

Status attention_fp8_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(attention_fp8_kernels).load_all(device));
  return attention_fp8_values_kernel().load(device);
}

}  // namespace tiercel
