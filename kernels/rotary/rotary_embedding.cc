// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/rotary_embedding.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "rotary_embedding";

struct Choice {
  const RotaryKernel* kernel = nullptr;
  Dim3 grid;
  Dim3 block;
};

Status check(const RotaryCall& t) {
  const Argument positions{kOp, "positions", *t.positions}, q{kOp, "q", *t.q}, k{kOp, "k", *t.k};
  const Argument cache{kOp, "cos_sin_cache", *t.cache};
  const Argument q_out{kOp, "q_out", *t.q_out}, k_out{kOp, "k_out", *t.k_out};
  TIERCEL_RETURN_IF_ERROR(check_rank(positions, 1));
  TIERCEL_RETURN_IF_ERROR(check_dtype(positions, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {t.q->dtype}));
  const int64_t tokens = t.positions->shape[0], size = t.q->shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(q, {tokens, t.q->shape[1], size}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {tokens, t.k->shape[1], size}, "[T, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(cache, 2));
  if (t.cache->dtype != DType::kFloat32) TIERCEL_RETURN_IF_ERROR(check_dtype(cache, {t.q->dtype}));
  const int64_t rotated = t.cache->shape[1];
  if (rotated % 2 != 0 || rotated > size) {
    return Status::InvalidArgument(
        mismatch(cache, "have an even second dimension of at most D = " + std::to_string(size),
                 std::to_string(rotated)));
  }
  if (t.cache->shape[0] == 0 && tokens != 0 && rotated != 0) {
    return Status::InvalidArgument(
        mismatch(cache, "have at least one row", shape_text(t.cache->shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(q_out, {t.q->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(q_out, {tokens, t.q->shape[1], size}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k_out, {t.q->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(k_out, {tokens, t.k->shape[1], size}, "[T, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument& other : {positions, k, cache, q_out, k_out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(positions));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(cache));
  for (const Argument& heads : {q, k, q_out, k_out}) TIERCEL_RETURN_IF_ERROR(check_inner(heads));
  return Status();
}

bool in_place(const HeadsOfTokens& a, const HeadsOfTokens& b) {
  return a.data == b.data && a.token_stride == b.token_stride && a.head_stride == b.head_stride;
}

uint64_t alignment_bits(const HeadsOfTokens& heads) {
  return reinterpret_cast<uintptr_t>(heads.data) | static_cast<uint64_t>(heads.token_stride) |
         static_cast<uint64_t>(heads.head_stride);
}

// The kernel with the most heads per thread, up to `heads`, or null.
const RotaryKernel* find(DType dtype, bool interleaved, int vector_bytes, int heads,
                         bool exchanged) {
  const RotaryKernel* found = nullptr;
  for (const RotaryKernel& kernel : KernelTable(rotary_kernels)) {
    if (kernel.dtype == dtype && kernel.interleaved == interleaved &&
        kernel.exchanged == exchanged && kernel.vector_bytes == vector_bytes &&
        (found == nullptr || kernel.heads <= heads)) {
      found = &kernel;
    }
  }
  return found;
}

// Few tokens: small blocks with one head per thread, to use every multiprocessor. Many tokens:
// blocks of a whole token. (Measured on an H200.)
Status choose(const RotaryArgs& args, const TensorView& q, bool interleaved, int vector_bytes,
              int places, Choice* choice) {
  const bool few = args.tokens * args.heads * places <= kDefaultMultiprocessors * 4096;
  const int heads = few ? 1 : kRotaryMostHeads;
  const bool exchanged = !few && args.turning <= 2 && args.rest == 2 * args.turning;
  choice->kernel = exchanged ? find(q.dtype, interleaved, vector_bytes, heads, true) : nullptr;
  if (choice->kernel == nullptr) {
    choice->kernel = find(q.dtype, interleaved, vector_bytes, heads, false);
  }
  const int64_t slots = ceil_div(args.heads, choice->kernel->heads);
  const int64_t together = std::max<int64_t>((few ? 128 : 384) / places, 1);
  const int64_t blocks = ceil_div(slots, together);  // per token
  choice->block.x = static_cast<uint32_t>(places);
  choice->block.y = static_cast<uint32_t>(ceil_div(slots, blocks));
  const int64_t tokens = (few ? 128 : 192) / (choice->block.x * choice->block.y);
  // The hardware allows at most 64.
  choice->block.z =
      static_cast<uint32_t>(std::max<int64_t>(std::min({tokens, args.tokens, int64_t{64}}), 1));
  const int64_t grid = ceil_div(args.tokens, choice->block.z);
  if (places > kRotaryMostThreads || grid > 0x7fffffff || blocks > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too large for the kernels, got shape " +
                                 shape_text(q.shape, q.ndim));
  }
  choice->grid.x = static_cast<uint32_t>(grid);
  choice->grid.y = static_cast<uint32_t>(blocks);
  return Status();
}

Status prepare(const RotaryCall& t, RotaryArgs* args, Choice* choice) {
  const bool interleaved = t.interleaved;
  TIERCEL_RETURN_IF_ERROR(check(t));
  constexpr int64_t kMost = 0x7fffffff;  // the kernels count heads, elements and rows in 32 bits
  if (t.q->shape[2] > kMost || t.q->shape[1] > kMost || t.k->shape[1] > kMost - t.q->shape[1] ||
      t.cache->shape[0] > kMost) {
    return Status::Unimplemented(std::string(kOp) + ": too large for the kernels, got shapes " +
                                 shape_text(t.q->shape, 3) + ", " + shape_text(t.k->shape, 3) +
                                 " and " + shape_text(t.cache->shape, 2));
  }
  const int element = static_cast<int>(dtype_bytes(t.q->dtype));
  const int size = static_cast<int>(t.q->shape[2]);
  args->q = heads_of(*t.q);
  args->k = heads_of(*t.k);
  args->q_out = heads_of(*t.q_out);
  args->k_out = heads_of(*t.k_out);
  args->positions = t.positions->data;
  args->cache = static_cast<const char*>(t.cache->data);
  args->tokens = t.positions->shape[0];
  args->last_position = static_cast<uint32_t>(std::max<int64_t>(t.cache->shape[0] - 1, 0));
  args->q_heads = static_cast<int>(t.q->shape[1]);
  args->heads = static_cast<int>(t.q->shape[1] + t.k->shape[1]);
  args->rotated = static_cast<int>(t.cache->shape[1]);
  args->wide_positions = t.positions->dtype == DType::kInt64;
  args->wide_cache = t.cache->dtype == DType::kFloat32;
  if (args->tokens == 0 || args->heads == 0 || size == 0) return Status();

  uint64_t bits = alignment_bits(args->q) | alignment_bits(args->q_out);
  if (t.k->shape[1] > 0) bits |= alignment_bits(args->k) | alignment_bits(args->k_out);
  bits |= reinterpret_cast<uintptr_t>(args->cache);
  const int per_vector = 16 / element;
  // Both halves of the pairs and the copied elements are whole vectors.
  const bool vectors = bits % 16 == 0 && size % per_vector == 0 &&
                       args->rotated % (interleaved ? per_vector : 2 * per_vector) == 0;
  const int vector = vectors ? per_vector : 1;
  const int parts = interleaved && vectors ? 1 : 2;  // vectors per place
  const bool same =
      in_place(args->q, args->q_out) && (t.k->shape[1] == 0 || in_place(args->k, args->k_out));
  args->turning = args->rotated / (parts * vector);
  args->rest = same ? 0 : (size - args->rotated) / vector;
  const int places = args->turning + (args->rest + parts - 1) / parts;
  if (places == 0) return Status();  // nothing turns and nothing moves
  TIERCEL_RETURN_IF_ERROR(choose(*args, *t.q, interleaved, vectors ? 16 : element, places, choice));
  args->prefetch_blocks = resident_blocks(choice->block);
  if (choice->kernel->heads > 1) args->prefetch_blocks /= 2;  // all are too many on an H200
  return Status();
}

}  // namespace

Status rotary_plan(const RotaryCall& call, RotaryPlan* plan) {
  RotaryArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  *plan = {"none", 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.kernel->vector_bytes,
             choice.grid.x * choice.grid.y, choice.block.x * choice.block.y * choice.block.z};
  }
  return Status();
}

Status rotary_embedding(const RotaryCall& call, void* stream) {
  RotaryArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid = choice.grid;
  config.block = choice.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.q->device_index, stream, pointers);
}

}  // namespace tiercel
