// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/mla_decode.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/mla/mla_host.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "mla_decode";
constexpr int64_t kMostKeys = int64_t{1} << 29;   // of a sequence
constexpr int64_t kMostSteps = int64_t{1} << 30;  // of all sequences
constexpr int64_t kMostRows = 65535;              // of a sequence: queries times heads
constexpr int64_t kMostLanes = int64_t{1} << 26;  // with row blocks, so that steps fit 32 bits

Status check_lengths(const Argument& argument, const Argument& q) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, q));
  return check_cuda(argument);
}

// Bytes of a cache's row.
int64_t row_of(const MlaDecodeCall& call) {
  return call.kv_cache->dtype == DType::kUInt8 ? 656 : call.q->shape[3];
}

// Checks that arguments fit together.
Status check(const MlaDecodeCall& call) {
  const Argument q{kOp, "q", *call.q}, cache{kOp, "kv_cache", *call.kv_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const Argument lengths{kOp, "seqused_k", *call.seqused_k}, out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(cache, 3));
  if (cache.view.dtype != q.view.dtype) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(cache, {q.view.dtype, DType::kFloat8E4M3, DType::kUInt8}));
  }
  const int64_t* shape = q.view.shape;
  TIERCEL_RETURN_IF_ERROR(check_shape(
      cache, {cache.view.shape[0], cache.view.shape[1], row_of(call)}, "[pages, page size, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(table, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(table, {shape[0], table.view.shape[1]}, "[B, pages of a sequence]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(lengths, {shape[0]}, "[B]"));
  TIERCEL_RETURN_IF_ERROR(check_lengths(table, q));
  TIERCEL_RETURN_IF_ERROR(check_lengths(lengths, q));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {q.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(out, {shape[0], shape[1], shape[2], call.d_v}, "[B, Sq, H, d_v]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument* argument : {&cache, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_kv_scale(q, cache, call.kv_scale));
  if (call.lse == nullptr) return Status();
  const Argument lse{kOp, "lse", *call.lse};
  TIERCEL_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(lse, {shape[0], shape[2], shape[1]}, "[B, H, Sq]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(lse, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(lse));
  return check_contiguous(lse);
}

// The cache as rows, one page after the other.
struct Rows {
  explicit Rows(const TensorView& from) : view(from) {
    // The stride of a single place or page is arbitrary.
    const bool single = from.shape[1] == 1;
    const int64_t step = single ? from.strides[0] : from.strides[1];
    const bool one = single || from.shape[0] == 1;
    page_rows = one ? from.shape[1] : from.strides[0] / std::max<int64_t>(step, 1);
    whole = one || (step > 0 && from.strides[0] % step == 0);
    shape[0] = (from.shape[0] - 1) * page_rows + from.shape[1];
    shape[1] = from.shape[2];
    strides[0] = shape[0] == 1 ? from.shape[2] : step;
    strides[1] = from.strides[2];
    view.ndim = 2;
    view.shape = shape;
    view.strides = strides;
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  bool whole;  // pages are whole rows apart
  int64_t page_rows;
  int64_t shape[2];
  int64_t strides[2];
  TensorView view;
};

TensorMapSpec map_of(int64_t copy_rows) {
  return {2,
          {static_cast<uint32_t>(copy_rows), 64},
          CU_TENSOR_MAP_SWIZZLE_128B,
          CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
}

// The latents of rows as blocks of 64 columns: [blocks, rows, 64]. A copy is half of a step's.
struct Halves {
  explicit Halves(const Rows& rows) : view(rows.view) {
    view.ndim = 3;
    view.shape = shape;
    view.strides = strides;
    shape[1] = rows.shape[0];
    strides[1] = rows.strides[0];
  }
  Halves(const Halves&) = delete;
  Halves& operator=(const Halves&) = delete;

  int64_t shape[3] = {kMlaLatent / 64, 0, 64};
  int64_t strides[3] = {64, 0, 1};
  TensorView view;
};

constexpr TensorMapSpec kHalves = {3,
                                   {kMlaLatent / 128, kMlaStep, 64},
                                   CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B};

const Kernel* decode_kernel(DType dtype, MlaLayout layout) {
  const auto* found = KernelTable(mla_decode_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype && kernel.layout == layout;
  });
  return found == nullptr ? nullptr : &found->kernel;
}

// The kernel of a call that has one, and its shared memory.
struct Choice {
  const Kernel* kernel;
  uint32_t shared;
};

Choice choose(const MlaDecodeCall& call, const MlaDecodeArgs& args) {
  const DType dtype = call.q->dtype;
  if (!args.ahead) return {decode_kernel(dtype, layout_of(*call.kv_cache)), kMlaShared};
  const auto* found = KernelTable(mla_ahead_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype;
  });
  return {&found->kernel, kAheadShared};
}

// Checks that there is a kernel for arguments that fit together and are not empty.
Status check_supported(const MlaDecodeCall& call, const Rows& rows) {
  const Argument q{kOp, "q", *call.q}, cache{kOp, "kv_cache", *call.kv_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const int64_t* shape = q.view.shape;
  if (shape[3] != kMlaKey) {
    return unsupported(q, "have 576 columns", std::to_string(shape[3]));
  }
  if (call.d_v != kMlaLatent) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `d_v` must be 512 for the precompiled kernels, got " +
                                 std::to_string(call.d_v));
  }
  if (decode_kernel(q.view.dtype, layout_of(*call.kv_cache)) == nullptr) {
    return unsupported(q, "be bfloat16 for a cache of uint8", "float16");
  }
  if (!(call.scale > 0.0) || !std::isfinite(call.scale)) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `scale` must be positive for the precompiled kernels, got " +
                                 std::to_string(call.scale));
  }
  const int64_t pages = cache.view.shape[0], places = cache.view.shape[1];
  if (places < 1 || (places & (places - 1)) != 0) {
    return unsupported(cache, "have a page size that is a power of two", std::to_string(places));
  }
  if (pages < 1) return unsupported(cache, "have at least one page", "none");
  const bool same = layout_of(*call.kv_cache) == MlaLayout::kSame;
  if (same && !rows.whole) {
    return unsupported(cache, "have a page stride that is a multiple of the row stride",
                       "strides " + shape_text(cache.view.strides, 3));
  }
  if (same && rows.shape[0] >= kMost) {
    return unsupported(cache, "have pages that span fewer than 2^31 rows",
                       "strides " + shape_text(cache.view.strides, 3));
  }
  if (table.view.shape[1] < 1 || table.view.shape[1] > kMostKeys / places) {
    return unsupported(table, "have room for 1 to 2^29 keys of a sequence",
                       "shape " + shape_text(table.view.shape, 2));
  }
  if (shape[0] > kMostSteps / ceil_div(table.view.shape[1] * places, kMlaStep)) {
    return unsupported(table, "have room for fewer than 2^36 keys",
                       "shape " + shape_text(table.view.shape, 2));
  }
  if (shape[1] > kMostRows || shape[2] > kMostRows / shape[1]) {
    return unsupported(q, "have at most 65535 rows of a sequence", "shape " + shape_text(shape, 4));
  }
  TIERCEL_RETURN_IF_ERROR(check_steps(table));
  TIERCEL_RETURN_IF_ERROR(check_steps({kOp, "seqused_k", *call.seqused_k}));
  TIERCEL_RETURN_IF_ERROR(check_layout(q, 16));
  TIERCEL_RETURN_IF_ERROR(check_layout({kOp, "out", *call.out}, 8));
  if (!same) return check_layout(cache, 16);
  return check_tensor_map(map_of(1), rows.view, kOp, "kv_cache");
}

void set_args(const MlaDecodeCall& call, const Rows& rows, MlaDecodeArgs* args) {
  const int64_t places = call.kv_cache->shape[1];
  args->q = static_cast<const char*>(call.q->data);
  args->out = static_cast<char*>(call.out->data);
  args->lse = call.lse == nullptr ? nullptr : static_cast<float*>(call.lse->data);
  args->page_table = static_cast<const int32_t*>(call.page_table->data);
  args->lengths = static_cast<const int32_t*>(call.seqused_k->data);
  set_strides(*call.q, args->q_strides);
  set_strides(*call.out, args->out_strides);
  args->table_stride = call.page_table->strides[0] * 4;
  args->table_step = step_of(*call.page_table);
  args->length_step = step_of(*call.seqused_k);
  args->last_page = static_cast<int>(std::min(call.kv_cache->shape[0] - 1, kMost));
  args->cache = static_cast<const char*>(call.kv_cache->data);
  args->kv_scale =
      call.kv_scale == nullptr ? nullptr : static_cast<const float*>(call.kv_scale->data);
  args->page_stride = call.kv_cache->strides[0] * dtype_bytes(call.kv_cache->dtype);
  args->place_stride = call.kv_cache->strides[1] * dtype_bytes(call.kv_cache->dtype);
  args->batch = static_cast<int>(call.q->shape[0]);
  args->queries = static_cast<int>(call.q->shape[1]);
  args->heads = static_cast<int>(call.q->shape[2]);
  args->rows = args->queries * args->heads;
  args->row_blocks = static_cast<int>(ceil_div(args->rows, kMlaRows));
  args->part_rows = std::min(args->rows, kMlaRows);
  args->capacity = static_cast<int>(call.page_table->shape[1] * places);
  while ((int64_t{1} << args->page_bits) < places) ++args->page_bits;
  args->page_rows = static_cast<int>(rows.page_rows);
  args->copy_rows = static_cast<int>(std::min<int64_t>(places, kMlaStep));
  args->pair = layout_of(*call.kv_cache) == MlaLayout::kSame && args->row_blocks % 2 == 0 &&
               args->copy_rows >= kMlaLeastBox;
  args->ahead = layout_of(*call.kv_cache) == MlaLayout::kSame && places >= kMlaStep;
  args->scale = static_cast<float>(call.scale * kLog2E);
}

Status prepare(const MlaDecodeCall& call, int multiprocessors, const Rows& rows,
               MlaDecodeArgs* args, MlaDecodePlan* plan) {
  *plan = {"none", "none", 0, 0, 0, 0, 0, 0, 0, 0};
  if (call.q->shape[0] * call.q->shape[1] * call.q->shape[2] == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(check_supported(call, rows));
  set_args(call, rows, args);
  const int64_t steps = ceil_div(args->capacity, kMlaStep);
  bool split = steps > 1;
  if (batch_invariant()) {
    const int64_t lanes = args->batch * ceil_div(steps, int64_t{kMlaInvariantPart});
    if (lanes * args->row_blocks > kMostLanes) {
      return unsupported({kOp, "page_table", *call.page_table},
                         "have room for fewer keys in the batch-invariant mode",
                         "shape " + shape_text(call.page_table->shape, 2));
    }
    args->lanes = static_cast<int>(lanes);
    args->part_steps = kMlaInvariantPart;
    split = steps > args->part_steps;
  } else {
    args->lanes = lanes_of(*args, multiprocessors, args->batch * steps);
  }
  const Choice chosen = choose(call, *args);
  plan_shares(split, *chosen.kernel, call.q->dtype, chosen.shared, args, plan);
  return Status();
}

}  // namespace

Status mla_decode_plan(const MlaDecodeCall& call, int multiprocessors, MlaDecodePlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  MlaDecodeArgs args{};
  return prepare(call, multiprocessors, Rows(*call.kv_cache), &args, plan);
}

Status MlaDecodeLaunch::prepare(const MlaDecodeCall& call) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  dtype_ = call.q->dtype;
  device_ = call.q->device_index;
  int multiprocessors = 0;
  if (call.q->device_type == DeviceType::kCUDA) {
    TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device_, &multiprocessors));
  }
  const Rows rows(*call.kv_cache);
  TIERCEL_RETURN_IF_ERROR(tiercel::prepare(call, multiprocessors, rows, &args_, &plan_));
  if (plan_.grid == 0) return Status();
  kernel_ = choose(call, args_).kernel;
  if (layout_of(*call.kv_cache) != MlaLayout::kSame) return Status();
  TIERCEL_RETURN_IF_ERROR(
      encode_tensor_map(map_of(args_.copy_rows), rows.view, kOp, "kv_cache", &map_));
  if (!args_.ahead) return Status();
  return encode_tensor_map(kHalves, Halves(rows).view, kOp, "kv_cache", &halves_);
}

Status MlaDecodeLaunch::run(float* workspace, void* stream) {
  if (plan_.grid == 0) return Status();
  void* pointers[] = {&args_, &map_, &halves_};
  return launch_and_combine(*kernel_, dtype_, plan_, &args_, pointers, device_, workspace, stream);
}

Status mla_decode(const MlaDecodeCall& call, void* stream, int64_t* needed) {
  return run_with_workspace<MlaDecodeLaunch>(kOp, call, stream, needed);
}

}  // namespace tiercel
