// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/backward/backward.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>

#include "kernels/attention/backward/kernels.h"
#include "kernels/attention/common/problem.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention_backward";
constexpr char kVarlenOp[] = "attention_varlen_backward";
constexpr int64_t kL2Bytes = 32 << 20;       // of 50 MB, for the tiles in flight
constexpr int64_t kMost = int64_t{1} << 30;  // blocks, tiles and sequences have 32-bit numbers

// The sizes of a call. Packed sequences are one entry, with two more sequences: the rows that are
// in none (kernels.h).
struct Sizes {
  AttentionProblem problem;
  bool packed = false;
  int64_t sequences = 0;  // of packed ones

  bool nothing() const { return problem.empty() || problem.seq_k == 0; }
  // The most tiles of `size` rows that the rows of an entry's sequences may have.
  int64_t tiles(int64_t rows, int64_t size) const {
    return packed ? rows / size + std::min(sequences + 2, rows) : ceil_div(rows, size);
  }
};

// `gradient` has q's dtype and the shape of `like`.
Status check_gradient(const char* op, const char* name, const TensorView& gradient,
                      const TensorView& like, const TensorView& q, bool empty, const char* why) {
  const Argument argument{op, name, gradient};
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, like.ndim));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {q.dtype}));
  if (like.ndim == 3) {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(argument, {like.shape[0], like.shape[1], like.shape[2]}, why));
  } else {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(argument, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, why));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  if (empty) return Status();
  if (like.ndim == 3) {
    const TensorMapSpec any{
        3, {64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
    return check_tensor_map(any, gradient, op, name);
  }
  const TensorMapSpec any{
      4, {1, 64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  return check_tensor_map(any, gradient, op, name);
}

Status check_grad_lse(const char* op, const AttentionBackwardCall& call,
                      std::initializer_list<int64_t> shape, const char* why) {
  if (call.grad_lse == nullptr) return Status();
  const Argument argument{op, "grad_lse", *call.grad_lse};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, shape, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", *call.q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

// The kernel with the smallest tiles that the head dimensions fit. There is one: those of 256
// columns take all that attention_problem lets through.
const AttentionBackwardKernel* find_kernel(DType dtype, const Sizes& sizes) {
  const AttentionProblem& problem = sizes.problem;
  const AttentionBackwardKernel* found = nullptr;
  const auto columns = [](const AttentionBackwardVariant& of) { return of.max_d + of.max_d_v; };
  for (const AttentionBackwardKernel& kernel : KernelTable(attention_backward_kernels)) {
    const AttentionBackwardVariant& variant = kernel.variant;
    if (variant.dtype == dtype && (problem.capped ? variant.capped : variant.plain) &&
        (sizes.packed ? variant.packed : variant.dense) && variant.max_d >= problem.d &&
        variant.max_d_v >= problem.d_v &&
        (found == nullptr || columns(variant) < columns(found->variant))) {
      found = &kernel;
    }
  }
  return found;
}

// Checks that both forms share; `queries` and the like are shapes in messages.
Status check_rest(const char* op, const AttentionBackwardCall& call, const Sizes& sizes,
                  const char* queries, const char* results, const char* keys, const char* values) {
  const TensorView &q = *call.q, &k = *call.k;
  const AttentionProblem& problem = sizes.problem;
  const bool empty = problem.empty();
  TIERCEL_RETURN_IF_ERROR(check_gradient(op, "grad", *call.grad, *call.out, q, empty, results));
  TIERCEL_RETURN_IF_ERROR(check_gradient(op, "dq", *call.dq, q, q, empty, queries));
  TIERCEL_RETURN_IF_ERROR(check_gradient(op, "dk", *call.dk, k, q, empty, keys));
  TIERCEL_RETURN_IF_ERROR(check_gradient(op, "dv", *call.dv, *call.v, q, empty, values));
  const int64_t pairs = std::max<int64_t>(problem.batch * problem.heads, 1);
  const int64_t longest = std::max(problem.seq_q, problem.seq_k);
  if (sizes.tiles(longest, 64) > kMost / pairs) {
    return Status::Unimplemented(mismatch(Argument{op, "q", q},
                                          "have fewer than 2^30 blocks of 64 queries or keys",
                                          "shape " + shape_text(q.shape, q.ndim)));
  }
  return Status();
}

Status check(const AttentionBackwardCall& call, Sizes* sizes) {
  AttentionProblem& problem = sizes->problem;
  TIERCEL_RETURN_IF_ERROR(
      check_attention(kOp, *call.q, *call.k, *call.v, *call.out, call.lse, call.options, &problem));
  TIERCEL_RETURN_IF_ERROR(
      check_grad_lse(kOp, call, {problem.batch, problem.heads, problem.seq_q}, "[B, H, Sq]"));
  return check_rest(kOp, call, *sizes, "[B, Sq, H, D]", "[B, Sq, H, Dv]", "[B, Sk, Hk, D]",
                    "[B, Sk, Hk, Dv]");
}

Status check_varlen(const AttentionBackwardCall& call, Sizes* sizes) {
  const TensorView &q = *call.q, &k = *call.k;
  PackedAttention packed;
  packed.q = call.q;
  packed.k = call.k;
  packed.v = call.v;
  packed.out = call.out;
  packed.lse = call.lse;
  packed.starts_q = call.starts_q;
  packed.starts_k = call.starts_k;
  TIERCEL_RETURN_IF_ERROR(check_attention_packed(kVarlenOp, packed, AttentionElements::k16Bits));
  AttentionProblem& problem = sizes->problem;
  sizes->packed = true;
  sizes->sequences = call.starts_q->shape[0] - 1;
  if (sizes->sequences >= kMost) {
    return Status::Unimplemented(mismatch(Argument{kVarlenOp, "cu_seqlens_q", *call.starts_q},
                                          "have fewer than 2^30 elements for the precompiled "
                                          "kernels",
                                          std::to_string(call.starts_q->shape[0])));
  }
  // The kernels see one batch entry with all rows; the lists of tiles and blocks say where its
  // sequences are.
  TIERCEL_RETURN_IF_ERROR(attention_problem(kVarlenOp, q, *call.v, 1, q.shape[0], k.shape[0],
                                            k.shape[1], call.options, false, &problem));
  // The order of a sequence's tiles must not depend on how many rows the others have.
  problem.growing = call.options.right >= 0 && call.options.left < 0;
  if (!problem.empty()) {
    TIERCEL_RETURN_IF_ERROR(check_attention_packed_maps(kVarlenOp, packed));
  }
  TIERCEL_RETURN_IF_ERROR(
      check_grad_lse(kVarlenOp, call, {problem.heads, problem.seq_q}, "[H, Tq]"));
  return check_rest(kVarlenOp, call, *sizes, "[Tq, H, D]", "[Tq, H, Dv]", "[Tk, Hk, D]",
                    "[Tk, Hk, Dv]");
}

struct Choice {
  const AttentionBackwardKernel* kernel = nullptr;
  const AttentionBackwardRowsKernel* rows = nullptr;
  int64_t head_blocks = 0;  // of queries, of a head; of packed sequences the most there may be
  int64_t blocks = 0;       // of all heads
  // The most entries that the lists of packed sequences may have.
  int64_t listed_tiles = 0;
  int64_t listed_blocks = 0;
  int band = 1;
  bool descending = false;
  unsigned grid = 0;

  int64_t rows_of_blocks() const { return blocks * kernel->variant.tile_m; }
  int64_t stats() const { return rows_of_blocks() * 2; }
  int64_t sums() const { return rows_of_blocks() * kernel->variant.tile_d; }
  // The lists, in elements of 4 bytes.
  int64_t tiles() const { return listed_tiles * int64_t{sizeof(AttentionBackwardTile) / 4}; }
  int64_t list() const { return listed_blocks * int64_t{sizeof(AttentionBackwardBlock) / 4}; }
  int64_t tile_count() const { return listed_blocks > 0 ? 4 : 0; }  // one, and a gap
  // Each block has a turn; tiles have a counter.
  int64_t workspace() const {
    return stats() + sums() + tiles() + tile_count() + list() + 1 + blocks;
  }
};

// The size of equal sections of `count` things, at least `least` of them; or of sections of which
// the last one is smaller, if equal ones were more than twice as large. The longest tiles of a last
// section that is small would end after all others.
int64_t equal_share(int64_t count, int64_t least) {
  const int64_t most = std::max<int64_t>(count / std::max<int64_t>(least, 1), 1);
  for (int64_t sections = most; 2 * sections >= most; --sections) {
    if (count % sections == 0) return count / sections;
  }
  return ceil_div(count, most);
}

Choice choose(DType dtype, const Sizes& sizes, bool deterministic, int multiprocessors) {
  const AttentionProblem& problem = sizes.problem;
  Choice choice;
  choice.kernel = find_kernel(dtype, sizes);
  const AttentionBackwardVariant& variant = choice.kernel->variant;
  choice.rows = KernelTable(attention_backward_rows_kernels).find([&](const auto& rows) {
    return rows.dtype == dtype && rows.tile_d == variant.tile_d &&
           rows.tile_d_v == variant.tile_d_v && rows.tile_m == variant.tile_m;
  });
  choice.head_blocks = sizes.tiles(problem.seq_q, variant.tile_m);
  choice.blocks = problem.batch * problem.heads * choice.head_blocks;
  const int64_t pairs = problem.batch * problem.kv_heads;
  const int64_t head_tiles = sizes.tiles(problem.seq_k, variant.tile_n);
  if (sizes.packed) {
    choice.listed_tiles = head_tiles;
    choice.listed_blocks = choice.head_blocks;
  }
  choice.grid = static_cast<unsigned>(std::min<int64_t>(pairs * head_tiles, multiprocessors));
  // Under a causal mask, tiles of early keys have the most queries: they come first, for as many
  // heads as the L2 cache holds q, its gradient and dq's sums of, or as blocks of threads work on
  // at once if that is more. If dq's order is fixed, late keys come first: their sums are ready
  // when early ones need them.
  if (problem.growing) {
    const int64_t rows = problem.seq_q / std::max<int64_t>(sizes.sequences, 1);  // on average
    const int64_t head = std::max<int64_t>(rows, 1) * variant.tile_d * 8;
    const int64_t cached = kL2Bytes / (head * (problem.heads / problem.kv_heads));
    const int64_t columns = std::max<int64_t>(head_tiles, 1);
    const int64_t at_once = (choice.grid + columns / 2) / columns;  // the nearest number
    choice.band = static_cast<int>(equal_share(pairs, std::max(cached, at_once)));
  }
  choice.descending = problem.growing && deterministic;
  return choice;
}

AttentionRows rows_of(const TensorView& view) {
  const int64_t* step = view.strides + view.ndim - 3;  // of rows
  return {static_cast<char*>(view.data), view.ndim == 4 ? view.strides[0] : 0, step[0], step[1]};
}

AttentionBackwardPlan plan_of(const AttentionBackwardCall& call, const Sizes& sizes,
                              int multiprocessors) {
  if (sizes.nothing()) return {"none", 0, 0, 0, false, 0, 0, 0, 0};
  const Choice choice = choose(call.q->dtype, sizes, call.deterministic, multiprocessors);
  const AttentionBackwardKernel& kernel = *choice.kernel;
  return {kernel.kernel.name(), kernel.variant.tile_m, kernel.variant.tile_n,
          choice.band,          choice.descending,     choice.grid,
          kernel.block,         kernel.dynamic_smem,   choice.workspace()};
}

// [B, S, H, D] for a kernel whose maps are those of packed sequences, AttentionPackedRows: element
// (b, 2^30, h, 2^30 + i, c) is row i of entry b. One row or one entry may have any stride; the map
// has two entries at least, because a stride of a single one would be beyond its limit.
struct AttentionEntryRows {
  static constexpr int64_t kRows = AttentionPackedRows::kRows;

  explicit AttentionEntryRows(const TensorView& from)
      : row(from.shape[1] == 1 ? from.shape[3] : from.strides[1]),
        shape{std::max<int64_t>(from.shape[0], 2), kRows + 1, from.shape[2], kRows + from.shape[1],
              from.shape[3]},
        strides{from.shape[0] == 1 ? row : from.strides[0],
                AttentionPackedRows::kWrap / dtype_bytes(from.dtype) - row, from.strides[2], row,
                from.strides[3]},
        view(from) {
    view.ndim = 5;
    view.shape = shape;
    view.strides = strides;
  }
  AttentionEntryRows(const AttentionEntryRows&) = delete;
  AttentionEntryRows& operator=(const AttentionEntryRows&) = delete;

  int64_t row;
  int64_t shape[5];
  int64_t strides[5];
  TensorView view;
};

// The views of q, k, v, grad, dk and dv as their maps have them.
using Views = const TensorView (&)[6];

Status launch(const char* op, const AttentionBackwardCall& call, const Sizes& sizes, Views views,
              void* stream) {
  const AttentionOptions& options = call.options;
  const AttentionProblem& problem = sizes.problem;
  const TensorView& q = *call.q;
  const int device = q.device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Choice choice = choose(q.dtype, sizes, call.deterministic, multiprocessors);
  const AttentionBackwardKernel& kernel = *choice.kernel;
  const Argument workspace{op, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {choice.workspace()}, "what the plan says"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));

  AttentionBackwardRowsArgs rows{};
  rows.out = rows_of(*call.out);
  rows.grad = rows_of(*call.grad);
  rows.dq = rows_of(*call.dq);
  rows.lse = static_cast<const float*>(call.lse->data);
  rows.grad_lse = call.grad_lse == nullptr ? nullptr : static_cast<float*>(call.grad_lse->data);
  rows.stats = static_cast<float*>(call.workspace->data);
  rows.sums = rows.stats + choice.stats();
  float* next = rows.sums + choice.sums();
  auto* tiles = sizes.packed ? reinterpret_cast<AttentionBackwardTile*>(next) : nullptr;
  auto* tile_count = reinterpret_cast<int32_t*>(next += choice.tiles());
  auto* list = reinterpret_cast<AttentionBackwardBlock*>(next += choice.tile_count());
  rows.counter = reinterpret_cast<int32_t*>(next += choice.list());
  rows.turns = call.deterministic ? rows.counter + 1 : nullptr;
  rows.list = sizes.packed ? list : nullptr;
  rows.rows = problem.seq_q;
  rows.heads = static_cast<int>(problem.heads);
  rows.blocks = static_cast<int>(choice.head_blocks);
  rows.d = static_cast<int>(problem.d);
  rows.d_v = static_cast<int>(problem.d_v);
  rows.tile_d = kernel.variant.tile_d;
  rows.scale = static_cast<float>(options.scale);
  LaunchConfig rows_config;
  rows_config.grid.x = static_cast<unsigned>(choice.blocks);
  rows_config.block.x = kAttentionBackwardThreads;
  rows_config.dependent = true;
  void* rows_args[] = {&rows};

  constexpr const char* kNames[] = {"q", "k", "v", "grad", "dk", "dv"};
  CUtensorMap maps[6];
  for (int i = 0; i < 6; ++i) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[i], views[i], op, kNames[i], &maps[i]));
  }
  const auto [scale, slope] = attention_scales(options);
  int32_t scalars[] = {static_cast<int32_t>(problem.batch),
                       static_cast<int32_t>(problem.seq_q),
                       static_cast<int32_t>(problem.seq_k),
                       static_cast<int32_t>(problem.heads),
                       static_cast<int32_t>(problem.kv_heads),
                       scale,
                       slope,
                       attention_float_bits(options.scale),
                       attention_limit(options.left),
                       attention_limit(options.right),
                       choice.band,
                       choice.descending,
                       rows.blocks};
  void* args[6 + 4 + 2 + std::size(scalars)];
  void** argument = args;
  for (CUtensorMap& map : maps) *argument++ = &map;
  for (void* pointer : {static_cast<void*>(&rows.stats), static_cast<void*>(&rows.sums),
                        static_cast<void*>(&rows.turns), static_cast<void*>(&rows.counter)}) {
    *argument++ = pointer;
  }
  if (kernel.variant.packed) {
    *argument++ = &tiles;
    *argument++ = &tile_count;
  }
  for (int32_t& scalar : scalars) *argument++ = &scalar;  // the last one if packed only
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;

  if (sizes.packed) {
    AttentionBackwardSequencesArgs sequences{};
    sequences.starts_q = static_cast<const int32_t*>(call.starts_q->data);
    sequences.starts_k = static_cast<const int32_t*>(call.starts_k->data);
    sequences.step_q = call.starts_q->strides[0];
    sequences.step_k = call.starts_k->strides[0];
    sequences.batch = static_cast<int32_t>(sizes.sequences);
    sequences.rows_q = scalars[1];
    sequences.rows_k = scalars[2];
    sequences.tile_m = kernel.variant.tile_m;
    sequences.tile_n = kernel.variant.tile_n;
    sequences.descending = choice.descending;
    sequences.room = rows.blocks;
    sequences.tiles = tiles;
    sequences.blocks = list;
    sequences.tile_count = tile_count;
    LaunchConfig sequences_config;
    sequences_config.block.x = kAttentionBackwardSequencesThreads;
    sequences_config.dependent = true;
    void* sequences_args[] = {&sequences};
    TIERCEL_RETURN_IF_ERROR(attention_backward_sequences_kernel().launch(sequences_config, device,
                                                                         stream, sequences_args));
  }
  TIERCEL_RETURN_IF_ERROR(choice.rows->prepare.launch(rows_config, device, stream, rows_args));
  TIERCEL_RETURN_IF_ERROR(kernel.kernel.launch(config, device, stream, args));
  rows_config.grid.y = static_cast<unsigned>(rows.tile_d / choice.rows->columns);
  return choice.rows->finish.launch(rows_config, device, stream, rows_args);
}

// `launch` with views of these tensors.
template <typename Rows>
Status launch_with(const char* op, const AttentionBackwardCall& call, const Sizes& sizes,
                   void* stream) {
  const Rows q(*call.q), k(*call.k), v(*call.v), grad(*call.grad), dk(*call.dk), dv(*call.dv);
  return launch(op, call, sizes, {q.view, k.view, v.view, grad.view, dk.view, dv.view}, stream);
}

}  // namespace

Status attention_backward_plan(const AttentionBackwardCall& call, int multiprocessors,
                               AttentionBackwardPlan* plan) {
  Sizes sizes;
  TIERCEL_RETURN_IF_ERROR(check(call, &sizes));
  *plan = plan_of(call, sizes, multiprocessors);
  return Status();
}

Status attention_backward(const AttentionBackwardCall& call, void* stream) {
  Sizes sizes;
  TIERCEL_RETURN_IF_ERROR(check(call, &sizes));
  if (sizes.nothing()) return Status();
  return find_kernel(call.q->dtype, sizes)->variant.packed
             ? launch_with<AttentionEntryRows>(kOp, call, sizes, stream)
             : launch_with<AttentionByHead>(kOp, call, sizes, stream);
}

Status attention_varlen_backward_plan(const AttentionBackwardCall& call, int multiprocessors,
                                      AttentionBackwardPlan* plan) {
  Sizes sizes;
  TIERCEL_RETURN_IF_ERROR(check_varlen(call, &sizes));
  *plan = plan_of(call, sizes, multiprocessors);
  return Status();
}

Status attention_varlen_backward(const AttentionBackwardCall& call, void* stream) {
  Sizes sizes;
  TIERCEL_RETURN_IF_ERROR(check_varlen(call, &sizes));
  if (sizes.nothing()) return Status();
  return launch_with<AttentionPackedRows>(kVarlenOp, call, sizes, stream);
}

Status attention_backward_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(attention_backward_kernels).load_all(device));
  for (const AttentionBackwardRowsKernel& rows : KernelTable(attention_backward_rows_kernels)) {
    TIERCEL_RETURN_IF_ERROR(rows.prepare.load(device));
    TIERCEL_RETURN_IF_ERROR(rows.finish.load(device));
  }
  return attention_backward_sequences_kernel().load(device);
}

}  // namespace tiercel
