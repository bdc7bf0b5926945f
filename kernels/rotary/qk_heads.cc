// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/qk_heads.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"

namespace tiercel {
namespace {

Status check_weight(const Argument& weight, const Argument& q) {
  if (weight.view.dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(weight, {q.view.dtype, DType::kFloat32}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(weight, {q.view.shape[2]}, "[D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(weight, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(weight));
  return check_contiguous(weight);
}

bool is_aligned(const TensorView* view) {
  return view == nullptr || reinterpret_cast<uintptr_t>(view->data) % 16 == 0;
}

}  // namespace

Status check_like(const Argument& argument, const Argument& like, const char* shape_text) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {like.view.dtype}));
  const int64_t* const shape = like.view.shape;
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {shape[0], shape[1], shape[2]}, shape_text));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_inner(argument);
}

Status check_qk_heads(const char* op, const QkHeads& t) {
  const Argument q{op, "q", *t.q}, k{op, "k", *t.k};
  const Argument positions{op, "positions", *t.positions}, angles{op, "cos_sin_cache", *t.angles};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {t.q->dtype}));
  const int64_t tokens = t.q->shape[0], size = t.q->shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {tokens, t.k->shape[1], size}, "[T, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(positions, {DType::kInt32, DType::kInt64}));
  if (t.has_sections) {
    TIERCEL_RETURN_IF_ERROR(check_shape(positions, {3, tokens}, "[3, T]"));
  } else {
    TIERCEL_RETURN_IF_ERROR(check_shape(positions, {tokens}, "[T]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_rank(angles, 2));
  if (t.angles->dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(angles, {DType::kFloat32, t.q->dtype}));
  }
  const int64_t rotated = t.angles->shape[1];
  if (rotated % 2 != 0 || rotated > size) {
    return Status::InvalidArgument(
        mismatch(angles, "have an even second dimension of at most D = " + std::to_string(size),
                 std::to_string(rotated)));
  }
  if (t.angles->shape[0] == 0 && tokens != 0 && rotated != 0) {
    return Status::InvalidArgument(
        mismatch(angles, "have at least one row", shape_text(t.angles->shape, 2)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument& other : {k, positions, angles}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(other, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(other));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(positions));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(angles));
  TIERCEL_RETURN_IF_ERROR(check_inner(q));
  TIERCEL_RETURN_IF_ERROR(check_inner(k));
  if (t.q_weight != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_weight({op, "q_weight", *t.q_weight}, q));
  }
  if (t.k_weight == nullptr) return Status();
  return check_weight({op, "k_weight", *t.k_weight}, q);
}

bool in_vectors(const HeadsOfTokens& heads, int bytes) {
  return (reinterpret_cast<uintptr_t>(heads.data) | static_cast<uint64_t>(heads.token_stride) |
          static_cast<uint64_t>(heads.head_stride)) %
             bytes ==
         0;
}

Status prepare_qk_heads(const char* op, const QkHeads& t, bool aligned, QkHeadsArgs* args) {
  const int64_t size = t.q->shape[2], rotated = t.angles->shape[1];
  if (!aligned || !in_vectors(heads_of(*t.q), 16) || !in_vectors(heads_of(*t.k), 16) ||
      !is_aligned(t.angles) || !is_aligned(t.q_weight) || !is_aligned(t.k_weight) ||
      size % kQkVector != 0) {
    return Status::Unimplemented(
        std::string(op) +
        ": heads, weights, angles and results must begin at multiples of 16 bytes (of 8 where they "
        "are float8) and D must be a multiple of 8");
  }
  if (rotated % (2 * kQkVector) != 0) {
    return Status::Unimplemented(mismatch({op, "cos_sin_cache", *t.angles},
                                          "have a multiple of 16 columns",
                                          std::to_string(rotated)));
  }
  constexpr int64_t kMost = 0x3fffffff;  // the kernels count heads and rows in 32 bits
  if (size > kQkMostLanes * 2 * kQkVector || t.q->shape[1] > kMost || t.k->shape[1] > kMost / 2 ||
      t.angles->shape[0] > kMost) {
    return Status::Unimplemented(std::string(op) + ": too large for the kernels, got shapes " +
                                 shape_text(t.q->shape, 3) + ", " + shape_text(t.k->shape, 3) +
                                 " and " + shape_text(t.angles->shape, 2));
  }
  args->positions = t.positions->data;
  args->wide_positions = t.positions->dtype == DType::kInt64;
  args->angles = static_cast<const char*>(t.angles->data);
  args->wide_angles = t.angles->dtype == DType::kFloat32;
  args->last_position = static_cast<uint32_t>(std::max<int64_t>(t.angles->shape[0] - 1, 0));
  if (t.q_weight != nullptr) {
    args->q_weight = static_cast<const char*>(t.q_weight->data);
    args->wide_q_weight = t.q_weight->dtype == DType::kFloat32;
  }
  if (t.k_weight != nullptr) {
    args->k_weight = static_cast<const char*>(t.k_weight->data);
    args->wide_k_weight = t.k_weight->dtype == DType::kFloat32;
  }
  args->eps = static_cast<float>(t.eps);
  args->inverse_size = 1.0f / static_cast<float>(std::max<int64_t>(size, 1));
  args->q_heads = static_cast<int>(t.q->shape[1]);
  args->kv_heads = static_cast<int>(t.k->shape[1]);
  args->rotated = static_cast<int>(rotated);
  args->turning = static_cast<int>(rotated / (2 * kQkVector));
  args->rest = static_cast<int>((size - rotated) / kQkVector);
  return Status();
}

int qk_lanes(const QkHeadsArgs& args) {
  const int places = args.turning + (args.rest + 1) / 2;
  int lanes = 1;
  while (lanes < places) lanes *= 2;
  return lanes;
}

}  // namespace tiercel
