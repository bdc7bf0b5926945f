// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/kv_cache_write.h"
#include "kernels/rotary/qk_norm_rope_backward.h"
#include "kernels/rotary/qk_norm_rope_cache.h"
#include "kernels/rotary/rotary_embedding.h"
#include "kernels/rotary/rotary_kernels.h"
#include "python/bindings/functions.h"
#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

constexpr Field<RotaryCall> kRotaryFields[] = {
    Tensor<&RotaryCall::positions>("positions"),
    OfStream(Tensor<&RotaryCall::q>("q")),
    Tensor<&RotaryCall::k>("k"),
    Tensor<&RotaryCall::cache>("cos_sin_cache"),
    Tensor<&RotaryCall::q_out>("q_out"),
    Tensor<&RotaryCall::k_out>("k_out"),
    Value<&RotaryCall::interleaved>("interleaved"),
};
constexpr Parameters<RotaryCall> kRotary{"rotary_embedding", kRotaryFields};

constexpr PlanField<RotaryPlan> kRotaryPlanFields[] = {
    Entry<&RotaryPlan::kernel>("kernel"),
    Entry<&RotaryPlan::vector_bytes>("vector_bytes"),
    Entry<&RotaryPlan::grid>("grid"),
    Entry<&RotaryPlan::block>("block"),
};
constexpr PlanDict<RotaryPlan> kRotaryPlan{"RotaryPlan", kRotaryPlanFields};

constexpr Field<KvCacheCall> kKvCacheFields[] = {
    Tensor<&KvCacheCall::key>("key"),
    Tensor<&KvCacheCall::value>("value"),
    Tensor<&KvCacheCall::key_cache>("key_cache"),
    Tensor<&KvCacheCall::value_cache>("value_cache"),
    Tensor<&KvCacheCall::slots>("slots"),
    Optional<&KvCacheCall::key_scale>("key_scale"),
    Optional<&KvCacheCall::value_scale>("value_scale"),
};
constexpr Parameters<KvCacheCall> kKvCache{"kv_cache_write", kKvCacheFields};

constexpr PlanField<KvCachePlan> kKvCachePlanFields[] = {
    Entry<&KvCachePlan::kernel>("kernel"),
    Entry<&KvCachePlan::vector_bytes>("vector_bytes"),
    Entry<&KvCachePlan::grid>("grid"),
    Entry<&KvCachePlan::block>("block"),
};
constexpr PlanDict<KvCachePlan> kKvCachePlan{"KvCachePlan", kKvCachePlanFields};

using Fused = QkNormRopeCacheCall;

// None or three whole numbers.
bool ReadSections(PyObject* object, const char* op, const char* name, Fused* call) {
  if (object == Py_None) return true;
  const bool sequence = PySequence_Check(object) != 0;
  const Reference sizes(sequence ? PySequence_Tuple(object) : nullptr);
  if (sequence && !sizes) return false;
  if (!sequence || PyTuple_Size(sizes.get()) != 3) {
    PyErr_Format(sequence ? PyExc_ValueError : PyExc_TypeError,
                 "%s: `sections` must be None or three whole numbers", op);
    return false;
  }
  call->heads.has_sections = true;
  for (int i = 0; i < 3; ++i) {
    if (!ReadValue(PyTuple_GetItem(sizes.get(), i), op, name, &call->sections[i])) return false;
  }
  return true;
}

constexpr Field<Fused> kFusedFields[] = {
    OfStream(Tensor<&Fused::heads, &QkHeads::q>("q")),
    Tensor<&Fused::kv, &KvCacheCall::key>("k"),
    Tensor<&Fused::kv, &KvCacheCall::value>("v"),
    Tensor<&Fused::q_out>("q_out"),
    Tensor<&Fused::kv, &KvCacheCall::key_cache>("key_cache"),
    Tensor<&Fused::kv, &KvCacheCall::value_cache>("value_cache"),
    Tensor<&Fused::kv, &KvCacheCall::slots>("slots"),
    Tensor<&Fused::heads, &QkHeads::positions>("positions"),
    Tensor<&Fused::heads, &QkHeads::angles>("cos_sin_cache"),
    Optional<&Fused::heads, &QkHeads::q_weight>("q_weight"),
    Optional<&Fused::heads, &QkHeads::k_weight>("k_weight"),
    Value<&Fused::heads, &QkHeads::eps>("eps"),
    Value<&Fused::heads, &QkHeads::interleaved>("interleaved"),
    Optional<&Fused::q_scale>("q_scale"),
    Optional<&Fused::kv, &KvCacheCall::key_scale>("key_scale"),
    Optional<&Fused::kv, &KvCacheCall::value_scale>("value_scale"),
    MayBeAbsent(Read<Fused>("sections", "Sequence[int] | None", ReadSections)),
    MayBeAbsent(Value<&Fused::sections_interleaved>("sections_interleaved")),
};
constexpr Parameters<Fused> kFused{"qk_norm_rope_cache", kFusedFields};

constexpr PlanField<QkNormRopeCachePlan> kFusedPlanFields[] = {
    Entry<&QkNormRopeCachePlan::kernel>("kernel"),
    Entry<&QkNormRopeCachePlan::lanes>("lanes"),
    Entry<&QkNormRopeCachePlan::grid>("grid"),
    Entry<&QkNormRopeCachePlan::block>("block"),
};
constexpr PlanDict<QkNormRopeCachePlan> kFusedPlan{"QkNormRopeCachePlan", kFusedPlanFields};

using Plain = QkNormRopeCall;
constexpr Field<Plain> kPlainFields[] = {
    OfStream(Tensor<&Plain::heads, &QkHeads::q>("q")),
    Tensor<&Plain::heads, &QkHeads::k>("k"),
    Tensor<&Plain::heads, &QkHeads::positions>("positions"),
    Tensor<&Plain::heads, &QkHeads::angles>("cos_sin_cache"),
    Optional<&Plain::heads, &QkHeads::q_weight>("q_weight"),
    Optional<&Plain::heads, &QkHeads::k_weight>("k_weight"),
    Value<&Plain::heads, &QkHeads::eps>("eps"),
    Value<&Plain::heads, &QkHeads::interleaved>("interleaved"),
    Tensor<&Plain::q_out>("q_out"),
    Tensor<&Plain::k_out>("k_out"),
};
constexpr Parameters<Plain> kPlain{"qk_norm_rope", kPlainFields};

using Backward = QkNormRopeBackwardCall;
constexpr Field<Backward> kBackwardFields[] = {
    OfStream(Tensor<&Backward::heads, &QkHeads::q>("q")),
    Tensor<&Backward::heads, &QkHeads::k>("k"),
    Tensor<&Backward::grad_q_out>("grad_q_out"),
    Tensor<&Backward::grad_k_out>("grad_k_out"),
    Tensor<&Backward::heads, &QkHeads::positions>("positions"),
    Tensor<&Backward::heads, &QkHeads::angles>("cos_sin_cache"),
    Optional<&Backward::heads, &QkHeads::q_weight>("q_weight"),
    Optional<&Backward::heads, &QkHeads::k_weight>("k_weight"),
    Value<&Backward::heads, &QkHeads::eps>("eps"),
    Value<&Backward::heads, &QkHeads::interleaved>("interleaved"),
    Tensor<&Backward::grad_q>("grad_q"),
    Tensor<&Backward::grad_k>("grad_k"),
    Optional<&Backward::grad_q_weight>("grad_q_weight"),
    Optional<&Backward::grad_k_weight>("grad_k_weight"),
    Optional<&Backward::workspace>("workspace"),
};
constexpr Parameters<Backward> kBackward{"qk_norm_rope_backward", kBackwardFields};

constexpr PlanField<QkNormRopeBackwardPlan> kBackwardPlanFields[] = {
    Entry<&QkNormRopeBackwardPlan::kernel>("kernel"),
    Entry<&QkNormRopeBackwardPlan::lanes>("lanes"),
    Entry<&QkNormRopeBackwardPlan::grid>("grid"),
    Entry<&QkNormRopeBackwardPlan::block>("block"),
    Entry<&QkNormRopeBackwardPlan::parts>("parts"),
};
constexpr PlanDict<QkNormRopeBackwardPlan> kBackwardPlan{"QkNormRopeBackwardPlan",
                                                         kBackwardPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kRotary, rotary_embedding>(
        "rotary_embedding",
        "Launches the kernel on the current stream; fills `q_out` and `k_out`."),
    PlanOf<kRotary, rotary_plan, kRotaryPlan>("rotary_embedding_plan"),
    LoadOf<rotary_kernels>("rotary_embedding_load"),
    LaunchOf<kKvCache, kv_cache_write>(
        "kv_cache_write", "Launches the kernel on the current stream; writes to both caches."),
    PlanOf<kKvCache, kv_cache_plan, kKvCachePlan>("kv_cache_write_plan"),
    LoadOf<kv_cache_kernels>("kv_cache_write_load"),
    LaunchOf<kFused, qk_norm_rope_cache>(
        "qk_norm_rope_cache",
        "Launches the kernel on the current stream; fills `q_out`, writes to both caches."),
    PlanOf<kFused, qk_norm_rope_cache_plan, kFusedPlan>("qk_norm_rope_cache_plan"),
    LoadOf<qk_norm_rope_cache_kernels>("qk_norm_rope_cache_load"),
    LaunchOf<kPlain, qk_norm_rope>(
        "qk_norm_rope", "Launches the kernel on the current stream; fills `q_out` and `k_out`."),
    PlanOf<kPlain, qk_norm_rope_plan, kFusedPlan>("qk_norm_rope_plan"),
    LaunchOf<kBackward, qk_norm_rope_backward>(
        "qk_norm_rope_backward",
        "Launches one kernel or two on the current stream; fills the gradients and `workspace`, "
        "[parts of the plan, D] float32, which a weight's gradient needs."),
    PlanOf<kBackward, qk_norm_rope_backward_plan, kBackwardPlan>("qk_norm_rope_backward_plan"),
    LoadOf<qk_norm_rope_backward_kernels, qk_weight_grad_kernels>("qk_norm_rope_backward_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
