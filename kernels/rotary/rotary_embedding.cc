// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/rotary_embedding.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "rotary_embedding";
constexpr int kMostThreads = 512;

struct Choice {
  const RotaryKernel* kernel = nullptr;
  unsigned grid = 0;
  unsigned block = 0;
};

Status check_inner(const Argument& argument) {
  const TensorView& view = argument.view;
  if (view.shape[2] <= 1 || view.strides[2] == 1) return Status();
  return Status::Unimplemented(
      mismatch(argument, "be contiguous in its last dimension",
               "strides " + shape_text(view.strides, view.ndim)));
}

Status check(const RotaryTensors& t) {
  const Argument positions{kOp, "positions", t.positions}, q{kOp, "q", t.q}, k{kOp, "k", t.k};
  const Argument cache{kOp, "cos_sin_cache", t.cache};
  const Argument q_out{kOp, "q_out", t.q_out}, k_out{kOp, "k_out", t.k_out};
  TIERCEL_RETURN_IF_ERROR(check_rank(positions, 1));
  TIERCEL_RETURN_IF_ERROR(check_dtype(positions, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {t.q.dtype}));
  const int64_t tokens = t.positions.shape[0], size = t.q.shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(q, {tokens, t.q.shape[1], size}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {tokens, t.k.shape[1], size}, "[T, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(cache, 2));
  if (t.cache.dtype != DType::kFloat32) TIERCEL_RETURN_IF_ERROR(check_dtype(cache, {t.q.dtype}));
  const int64_t rotated = t.cache.shape[1];
  if (rotated % 2 != 0 || rotated > size) {
    return Status::InvalidArgument(
        mismatch(cache, "have an even second dimension of at most D = " + std::to_string(size),
                 std::to_string(rotated)));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(q_out, {t.q.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(q_out, {tokens, t.q.shape[1], size}, "[T, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k_out, {t.q.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(k_out, {tokens, t.k.shape[1], size}, "[T, Hk, D]"));
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

HeadsOfTokens heads_of(const TensorView& view) {
  const int64_t element = dtype_bytes(view.dtype);
  return {static_cast<char*>(view.data), view.strides[0] * element, view.strides[1] * element};
}

bool in_place(const HeadsOfTokens& a, const HeadsOfTokens& b) {
  return a.data == b.data && a.token_stride == b.token_stride && a.head_stride == b.head_stride;
}

uint64_t alignment_bits(const HeadsOfTokens& heads) {
  return reinterpret_cast<uintptr_t>(heads.data) | static_cast<uint64_t>(heads.token_stride) |
         static_cast<uint64_t>(heads.head_stride);
}

Status prepare(const RotaryTensors& t, bool interleaved, RotaryArgs* args, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(t));
  const int64_t tokens = t.positions.shape[0];
  const int element = static_cast<int>(dtype_bytes(t.q.dtype));
  args->q = heads_of(t.q);
  args->k = heads_of(t.k);
  args->q_out = heads_of(t.q_out);
  args->k_out = heads_of(t.k_out);
  args->positions = t.positions.data;
  args->cache = static_cast<const char*>(t.cache.data);
  args->q_heads = static_cast<int>(t.q.shape[1]);
  args->heads = static_cast<int>(t.q.shape[1] + t.k.shape[1]);
  args->head_size = static_cast<int>(t.q.shape[2]);
  args->rotated = static_cast<int>(t.cache.shape[1]);
  args->wide_positions = t.positions.dtype == DType::kInt64;
  args->wide_cache = t.cache.dtype == DType::kFloat32;
  if (tokens == 0 || args->heads == 0 || args->head_size == 0) return Status();

  uint64_t bits = alignment_bits(args->q) | alignment_bits(args->q_out);
  if (t.k.shape[1] > 0) bits |= alignment_bits(args->k) | alignment_bits(args->k_out);
  const int per_vector = 16 / element;
  // Both halves of the pairs, and what is copied, are whole vectors.
  const bool vectors = bits % 16 == 0 && args->head_size % per_vector == 0 &&
                       args->rotated % (interleaved ? per_vector : 2 * per_vector) == 0;
  int count = 0;
  const RotaryKernel* kernels = rotary_kernels(&count);
  for (int i = 0; i < count && choice->kernel == nullptr; ++i) {
    const RotaryKernel& kernel = kernels[i];
    if (kernel.dtype == t.q.dtype && kernel.interleaved == interleaved &&
        kernel.vector_bytes == (vectors ? 16 : element)) {
      choice->kernel = &kernel;
    }
  }
  const int vector = vectors ? per_vector : 1;
  const int pairs = interleaved && vectors ? vector / 2 : vector;
  const bool same = in_place(args->q, args->q_out) &&
                    (t.k.shape[1] == 0 || in_place(args->k, args->k_out));
  args->rest = same ? 0 : (args->head_size - args->rotated) / vector;
  const int places = args->rotated / 2 / pairs + args->rest;
  if (places > kMostThreads || tokens > 0x7fffffff) {
    return Status::Unimplemented(std::string(kOp) + ": too large for the kernels, got shape " +
                                 shape_text(t.q.shape, t.q.ndim));
  }
  if (places == 0) {  // nothing turns and nothing moves
    choice->kernel = nullptr;
    return Status();
  }
  // Few tokens: a thread a task. Many: half as many threads, with two tasks each in flight.
  const int wanted = tokens <= 132 ? args->heads : (args->heads + 1) / 2;
  const int together = std::min(wanted, kMostThreads / places);
  choice->block = static_cast<unsigned>((together * places + 31) / 32 * 32);
  choice->grid = static_cast<unsigned>(tokens);
  return Status();
}

}  // namespace

Status rotary_plan(const RotaryTensors& tensors, bool interleaved, RotaryPlan* plan) {
  RotaryArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(tensors, interleaved, &args, &choice));
  *plan = {"none", 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.kernel->vector_bytes, choice.grid, choice.block};
  }
  return Status();
}

Status rotary_embedding(const RotaryTensors& tensors, bool interleaved, void* stream) {
  RotaryArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(tensors, interleaved, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = choice.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, tensors.q.device_index, stream, pointers);
}

}  // namespace tiercel
