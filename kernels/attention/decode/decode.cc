// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode/decode.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/attention/decode/choose.h"
#include "kernels/attention/decode/kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/early_launch.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "decode_attention";
constexpr double kLog2E = 1.4426950408889634;

// Keys of a sequence, and limits of a window, so that their sums fit 32 bits.
constexpr int64_t kMostKeys = int64_t{1} << 29;

// Steps of 32 bits.
constexpr int64_t kMostBytes = 0x7fffffff;

Status unsupported(const char* name, const std::string& expected, const std::string& got) {
  return Status::Unimplemented(std::string(kOp) + ": `" + name + "` must " + expected +
                               " for the precompiled kernels, got " + got);
}

// Alignment for 16-byte reads and writes.
Status check_layout(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i < last; ++i) {
    if (view.shape[i] > 1) aligned &= view.strides[i] * dtype_bytes(view.dtype) % 16 == 0;
  }
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    return unsupported(argument.name, "be contiguous in its last dimension",
                       "strides " + shape_text(view.strides, view.ndim));
  }
  if (aligned) return Status();
  return unsupported(argument.name, "start at a multiple of 16 bytes, with strides that are too",
                     "strides " + shape_text(view.strides, view.ndim));
}

Status check_lengths(const Argument& lengths, const Argument& q) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(lengths, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(lengths, {q.view.shape[0]}, "[B]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(lengths, q));
  return check_cuda(lengths);
}

Status check_cache(const DecodeTensors& t, const Argument& q) {
  const Argument k{kOp, "k_cache", *t.k_cache}, v{kOp, "v_cache", *t.v_cache};
  const Argument table{kOp, "page_table", *t.page_table};
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 4));
  if (t.k_cache->dtype != DType::kFloat8E4M3) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(k, {t.q->dtype, DType::kFloat8E4M3}));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(v, {t.k_cache->dtype}));
  const int64_t pages = t.k_cache->shape[0], places = t.k_cache->shape[1];
  const int64_t kv_heads = t.k_cache->shape[2], d = t.q->shape[3], heads = t.q->shape[2];
  const char kShape[] = "[pages, page size, Hk, D]";
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {pages, places, kv_heads, d}, kShape));
  TIERCEL_RETURN_IF_ERROR(check_shape(v, {pages, places, kv_heads, d}, kShape));
  if (heads > 0 && (kv_heads < 1 || heads % kv_heads != 0)) {
    return Status::InvalidArgument(
        mismatch(k, "have a number of heads that divides that of `q`, " + std::to_string(heads),
                 std::to_string(kv_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(table, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(table, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(table, {t.q->shape[0], t.page_table->shape[1]}, "[B, pages of a sequence]"));
  for (const Argument* argument : {&k, &v, &table}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  return check_lengths({kOp, "seqused_k", *t.seqused_k}, q);
}

Status check(const DecodeTensors& t, const DecodeOptions& options) {
  const Argument q{kOp, "q", *t.q}, out{kOp, "out", *t.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  TIERCEL_RETURN_IF_ERROR(check_cache(t, q));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {t.q->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(
      out, {t.q->shape[0], t.q->shape[1], t.q->shape[2], t.q->shape[3]}, "[B, Sq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out));
  if (t.prefix != nullptr) TIERCEL_RETURN_IF_ERROR(check_lengths({kOp, "prefix", *t.prefix}, q));
  const bool float8 = t.k_cache->dtype == DType::kFloat8E4M3;
  const int64_t kv_heads = t.k_cache->shape[2];
  if (t.k_scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_decode_scale({kOp, "k_scale", *t.k_scale}, q, kv_heads, float8));
  }
  if (t.v_scale != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_decode_scale({kOp, "v_scale", *t.v_scale}, q, kv_heads, float8));
  }
  if (t.lse != nullptr) {
    const Argument lse{kOp, "lse", *t.lse};
    TIERCEL_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(
        check_shape(lse, {t.q->shape[0], t.q->shape[2], t.q->shape[1]}, "[B, H, Sq]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(lse, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(lse));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(lse));
  }
  if (options.split < -1 || options.split > kDecodeMaxCluster ||
      (options.split > 0 && (options.split & (options.split - 1)) != 0)) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `split` must be -1, 0 or a power of two up to 8, got " +
                                   std::to_string(options.split));
  }
  return Status();
}

// Checks that there is a kernel for valid arguments.
Status check_supported(const DecodeTensors& t, const DecodeOptions& options) {
  const int64_t d = t.q->shape[3], places = t.k_cache->shape[1];
  const bool float8 = t.k_cache->dtype == DType::kFloat8E4M3;
  const int64_t multiple = float8 ? 16 : 8;
  if (d < multiple || d > 256 || d % multiple != 0) {
    return unsupported("q",
                       "have a head dimension that is a multiple of " + std::to_string(multiple) +
                           " up to 256" + (float8 ? " with a float8 cache" : ""),
                       std::to_string(d));
  }
  if (!(options.scale > 0.0) || !std::isfinite(options.scale)) {
    return unsupported("scale", "be positive", std::to_string(options.scale));
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    return unsupported("softcap", "be None or positive", std::to_string(options.softcap));
  }
  if (places < 1 || (places & (places - 1)) != 0) {
    return unsupported("k_cache", "have a page size that is a power of two",
                       std::to_string(places));
  }
  const TensorView& table = *t.page_table;
  if (table.shape[1] < 1 || table.shape[1] > kMostKeys / places) {
    return unsupported("page_table", "have room for 1 to 2^29 keys of a sequence",
                       "shape " + shape_text(table.shape, 2));
  }
  if (t.k_cache->shape[0] < 1) return unsupported("k_cache", "have at least one page", "none");
  for (const Argument& argument :
       {Argument{kOp, "page_table", table}, Argument{kOp, "seqused_k", *t.seqused_k},
        Argument{kOp, "prefix", t.prefix == nullptr ? *t.seqused_k : *t.prefix}}) {
    const TensorView& view = argument.view;
    const int last = view.ndim - 1;
    if (view.shape[last] > 1 && view.strides[last] > kMostBytes / 4) {
      return unsupported(argument.name,
                         "have elements that are less than 2 GiB apart in its last dimension",
                         "strides " + shape_text(view.strides, view.ndim));
    }
  }
  for (const Argument& argument :
       {Argument{kOp, "q", *t.q}, Argument{kOp, "k_cache", *t.k_cache},
        Argument{kOp, "v_cache", *t.v_cache}, Argument{kOp, "out", *t.out}}) {
    TIERCEL_RETURN_IF_ERROR(check_layout(argument));
  }
  for (const Argument& cache :
       {Argument{kOp, "k_cache", *t.k_cache}, Argument{kOp, "v_cache", *t.v_cache}}) {
    for (int i = 0; i < 2; ++i) {
      const int64_t bytes = cache.view.strides[i] * dtype_bytes(cache.view.dtype);
      if (cache.view.shape[i] > 1 && bytes > kMostBytes) {
        return unsupported(cache.name, "have pages that are less than 2 GiB apart",
                           "strides " + shape_text(cache.view.strides, 4));
      }
    }
  }
  return Status();
}

// The most expected parts of a tile that its last block combines as fast as decode_combine would.
constexpr int64_t kMostParts = 40;

// Blocks that share a tile in the batch-invariant mode.
constexpr int kInvariantCluster = 4;

const DecodeKernel* kernel_for(const DecodeTensors& t, int64_t rows, bool spread) {
  const bool float8 = t.k_cache->dtype == DType::kFloat8E4M3;
  const KernelTable kernels(t.q->dtype == DType::kBFloat16
                                ? (float8 ? decode_kernels_bf16_fp8 : decode_kernels_bf16)
                                : (float8 ? decode_kernels_fp16_fp8 : decode_kernels_fp16));
  const DecodeKernel* best = nullptr;
  for (const DecodeKernel& kernel : kernels) {
    if (kernel.spread != spread) continue;
    if (kernel.any_d ? t.q->shape[3] > kernel.d : t.q->shape[3] != kernel.d) continue;
    const bool wider = best != nullptr && best->d == kernel.d && best->any_d == kernel.any_d &&
                       kernel.tiles > best->tiles && rows > 8 * best->tiles;
    if (best == nullptr || wider) best = &kernel;
  }
  return best;
}

void set_strides(const TensorView& view, int64_t (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = view.strides[i] * dtype_bytes(view.dtype);
}

DecodeStrides strides_of(const TensorView& cache) {
  const int64_t element = dtype_bytes(cache.dtype);
  // The stride of a single page or place is arbitrary.
  const int64_t page = cache.shape[0] > 1 ? cache.strides[0] * element : 0;
  const int64_t place = cache.shape[1] > 1 ? cache.strides[1] * element : 0;
  return {cache.strides[2] * element, static_cast<int32_t>(page), static_cast<int32_t>(place)};
}

// The stride of an integer tensor's last dimension, in bytes.
int32_t step_of(const TensorView& view) {
  const int last = view.ndim - 1;
  const int64_t step = view.strides[last] * dtype_bytes(view.dtype);
  return view.shape[last] > 1 ? static_cast<int32_t>(step) : 0;
}

const float* set_scale(const TensorView* scale, bool* per_head) {
  if (scale == nullptr) return nullptr;
  *per_head = false;
  for (int i = 0; i < scale->ndim; ++i) *per_head |= scale->shape[i] > 1;
  return static_cast<const float*>(scale->data);
}

void set_rows(const DecodeRows& rows, DecodeArgs* args) {
  args->lse_strides[0] = int64_t{args->heads} * args->queries;
  args->lse_strides[1] = args->queries;
  if (rows.starts == nullptr) return;
  args->starts = static_cast<const int32_t*>(rows.starts->data);
  args->start_step = step_of(*rows.starts);
  args->total = static_cast<int>(rows.total);
  args->q_strides[0] = args->out_strides[0] = args->lse_strides[0] = 0;
  args->lse_strides[1] = rows.total;
  args->skips_longer = rows.skips_longer;
  if (rows.tree == nullptr) return;
  args->tree = static_cast<const int64_t*>(rows.tree->data);
  args->tree_step = step_of(*rows.tree);
}

void set_args(const DecodeTensors& t, const DecodeOptions& options, const DecodeRows& rows,
              DecodeArgs* args) {
  const int64_t places = t.k_cache->shape[1];
  args->q = static_cast<const char*>(t.q->data);
  args->out = static_cast<char*>(t.out->data);
  args->lse = t.lse == nullptr ? nullptr : static_cast<float*>(t.lse->data);
  args->k = static_cast<const char*>(t.k_cache->data);
  args->v = static_cast<const char*>(t.v_cache->data);
  args->page_table = static_cast<const int32_t*>(t.page_table->data);
  args->lengths = static_cast<const int32_t*>(t.seqused_k->data);
  args->prefixes = t.prefix == nullptr ? nullptr : static_cast<const int32_t*>(t.prefix->data);
  args->k_scale = set_scale(t.k_scale, &args->k_scale_per_head);
  args->v_scale = set_scale(t.v_scale, &args->v_scale_per_head);
  args->sinks = t.sinks == nullptr ? nullptr : static_cast<const float*>(t.sinks->data);
  set_strides(*t.q, args->q_strides);
  set_strides(*t.out, args->out_strides);
  args->k_strides = strides_of(*t.k_cache);
  args->v_strides = strides_of(*t.v_cache);
  args->table_stride = t.page_table->strides[0] * 4;
  args->table_step = step_of(*t.page_table);
  args->length_step = step_of(*t.seqused_k);
  args->prefix_step = t.prefix == nullptr ? 0 : step_of(*t.prefix);
  // The table cannot name pages beyond 2^31.
  args->last_page = static_cast<int>(std::min(t.k_cache->shape[0] - 1, kMostBytes));
  args->batch = static_cast<int>(t.q->shape[0]);
  args->queries = static_cast<int>(t.q->shape[1]);
  args->heads = static_cast<int>(t.q->shape[2]);
  args->kv_heads = static_cast<int>(t.k_cache->shape[2]);
  args->group = args->heads / args->kv_heads;
  args->rows = args->queries * args->group;
  set_rows(rows, args);
  args->d = static_cast<int>(t.q->shape[3]);
  args->capacity = static_cast<int>(t.page_table->shape[1] * places);
  while ((int64_t{1} << args->page_bits) < places) ++args->page_bits;
  const auto limit = [](int64_t keys) {
    return static_cast<int>(keys < 0 ? -1 : std::min(keys, kMostKeys));
  };
  args->left = limit(options.left);
  args->right = limit(options.right);
  const bool capped = options.softcap != 0.0;
  args->scale =
      static_cast<float>(capped ? options.scale / options.softcap : options.scale * kLog2E);
  args->cap_log2 = static_cast<float>(options.softcap * kLog2E);
}

Status prepare(const DecodeCall& call, int multiprocessors, DecodeArgs* args,
               DecodeChoice* choice) {
  const DecodeTensors& t = call.tensors;
  const DecodeOptions& options = call.options;
  TIERCEL_RETURN_IF_ERROR(check(t, options));
  if (t.q->shape[0] * t.q->shape[1] * t.q->shape[2] * t.q->shape[3] == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(check_supported(t, options));
  constexpr int64_t kMostTiles = int64_t{1} << 27;
  if (t.q->shape[0] > kMostTiles / t.q->shape[1] / t.q->shape[2]) {
    return unsupported("q", "have fewer than 2^27 rows", "shape " + shape_text(t.q->shape, 4));
  }
  set_args(t, options, call.rows, args);
  const DecodeKernel& clustered = *kernel_for(t, args->rows, false);
  const DecodeKernel* spread = kernel_for(t, args->rows, true);
  const auto set_tiles = [args](const DecodeKernel& kernel) {
    args->row_blocks = static_cast<int>(ceil_div(args->rows, 8 * kernel.tiles));
    args->sequence_tiles = args->kv_heads * args->row_blocks;
    return int64_t{args->batch} * args->sequence_tiles;
  };

  const int64_t element = dtype_bytes(t.k_cache->dtype), d = clustered.d;
  const int64_t step = decode_step(static_cast<int>(d), static_cast<int>(element));
  int64_t keys = args->capacity;
  if (options.max_keys >= 0) keys = std::min(keys, options.max_keys);
  if (args->left >= 0) keys = std::min(keys, int64_t{args->left} + args->queries);
  DecodeLoad load;
  load.tiles = set_tiles(clustered);
  load.steps = std::max<int64_t>(ceil_div(keys, step), 1);
  load.row_bytes = args->d * element;
  load.step_bytes = 2 * step * load.row_bytes;
  load.float8 = element == 1;
  load.blocks = int64_t{multiprocessors} * clustered.residents;
  load.warps = clustered.warps;
  const auto set_spread = [&](const DecodeKernel& kernel) {
    load.spread_tiles = set_tiles(kernel);
    const int64_t blocks = int64_t{multiprocessors} * kernel.residents;
    args->columns = decode_columns(args->sequence_tiles, blocks);
    load.spread_blocks = blocks / args->columns * args->columns;
    load.spread_warps = kernel.warps;
  };
  set_spread(*spread);
  // Blocks that share a tile take its steps in turn: the order depends on the sequence alone.
  const int split = options.split == 0 && batch_invariant() ? kInvariantCluster : options.split;
  if (split == 0 && spread->tiles > clustered.tiles && !decode_is_long(load)) {
    spread = kernel_for(t, 8 * clustered.tiles, true);
    set_spread(*spread);
  }
  choice->split = decode_choose(load, split);
  choice->kernel = choice->split.cluster == 0 ? spread : &clustered;
  const int64_t tiles = set_tiles(*choice->kernel);
  if (choice->split.cluster > 0) return Status();
  if (choice->rows() > kDecodeMostRows || choice->split.grid > kMostParts * tiles) {
    choice->combined = std::min(tiles, choice->split.grid - args->columns);
    args->by_tile = choice->combined == tiles;
    choice->tiles = 4 * choice->split.grid;
  }
  const int64_t places = 2 * choice->split.grid;
  choice->partial = places * choice->rows() * d;
  choice->sums = places * choice->rows() * 2;
  choice->arrived = places * 2;
  return Status();
}

const DecodeCombineKernel& combine_for(DType dtype) {
  return *KernelTable(decode_combine_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype;
  });
}

Status check_workspace(const Argument& workspace, const Argument& q, int64_t needed) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(workspace, 1));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  if (workspace.view.shape[0] >= needed) return Status();
  return Status::InvalidArgument(mismatch(workspace, "have " + std::to_string(needed) + " elements",
                                          shape_text(workspace.view.shape, 1)));
}

}  // namespace

Status check_decode_scale(const Argument& scale, const Argument& q, int64_t heads, bool float8) {
  if (!float8) {
    return Status::InvalidArgument(
        mismatch(scale, "be None for a cache that is not float8", "a tensor"));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  int64_t count = 1;
  for (int i = 0; i < scale.view.ndim; ++i) count *= scale.view.shape[i];
  if (count != 1 && count != heads) {
    return Status::InvalidArgument(
        mismatch(scale, "have 1 element or Hk = " + std::to_string(heads), std::to_string(count)));
  }
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(scale));
  return check_contiguous(scale);
}

Status decode_attention_plan(const DecodeCall& call, int multiprocessors, DecodePlan* plan) {
  const DecodeTensors& tensors = call.tensors;
  DecodeArgs args{};
  DecodeChoice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &args, &choice));
  *plan = {"none", "none", 0, 0, 0, 0, 0, 0};
  if (choice.kernel == nullptr) return Status();
  const DecodeKernel& kernel = *choice.kernel;
  *plan = {kernel.kernel.name(),
           choice.combined > 0 ? combine_for(tensors.q->dtype).kernel.name() : "none",
           choice.rows(),
           decode_step(kernel.d, static_cast<int>(dtype_bytes(tensors.k_cache->dtype))),
           choice.split.cluster,
           static_cast<unsigned>(choice.split.grid),
           choice.threads(),
           choice.workspace()};
  return Status();
}

Status DecodeLaunch::prepare(const DecodeCall& call) {
  const TensorView& q = *call.tensors.q;
  device_ = q.device_index;
  dtype_ = q.dtype;
  int multiprocessors = 0;
  if (q.device_type == DeviceType::kCUDA) {
    TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device_, &multiprocessors));
  }
  return tiercel::prepare(call, multiprocessors, &args_, &choice_);
}

Status DecodeLaunch::run(float* workspace, void* stream) {
  if (choice_.kernel == nullptr) return Status();
  args_.partial = workspace;
  args_.partial_sums = reinterpret_cast<float2*>(workspace + choice_.partial);
  float* rest = workspace + choice_.partial + choice_.sums;
  args_.arrived = reinterpret_cast<uint64_t*>(rest);
  if (choice_.combined > 0) args_.tiles = reinterpret_cast<int4*>(rest + choice_.arrived);
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(choice_.split.grid);
  config.block.x = choice_.threads();
  config.dynamic_smem = choice_.kernel->shared;
  config.cluster.x = static_cast<unsigned>(std::max(choice_.split.cluster, 1));
  config.dependent = true;
  args_.early_launch = launches_early(config.grid.x);
  void* pointers[] = {&args_};
  TIERCEL_RETURN_IF_ERROR(choice_.kernel->kernel.launch(config, device_, stream, pointers));
  if (choice_.combined == 0) return Status();
  config.block.x = kCombineThreads;
  config.cluster.x = 1;
  config.dynamic_smem = 0;
  config.grid.x = static_cast<unsigned>(choice_.combined);
  config.grid.y = static_cast<unsigned>(std::min(choice_.rows(), args_.rows));
  config.grid.z = args_.d > 128 ? 2 : 1;
  int tile_rows = choice_.rows(), pitch = choice_.kernel->d;
  void* combine_pointers[] = {&args_, &tile_rows, &pitch};
  return combine_for(dtype_).kernel.launch(config, device_, stream, combine_pointers);
}

Status decode_attention(const DecodeCall& call, void* stream, int64_t* needed) {
  *needed = 0;
  DecodeLaunch launch;
  TIERCEL_RETURN_IF_ERROR(launch.prepare(call));
  if (launch.workspace() == 0) return launch.run(nullptr, stream);
  if (call.tensors.workspace == nullptr) {
    *needed = launch.workspace();
    return Status();
  }
  const Argument workspace{kOp, "workspace", *call.tensors.workspace};
  TIERCEL_RETURN_IF_ERROR(
      check_workspace(workspace, {kOp, "q", *call.tensors.q}, launch.workspace()));
  return launch.run(static_cast<float*>(workspace.view.data), stream);
}

}  // namespace tiercel
