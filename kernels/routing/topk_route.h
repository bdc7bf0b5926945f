// SPDX-License-Identifier: Apache-2.0
// topk_softmax in its other forms: other scores, a bias, groups of experts, shared experts.
#ifndef KERNELS_ROUTING_TOPK_ROUTE_H_
#define KERNELS_ROUTING_TOPK_ROUTE_H_

#include <cstdint>

#include "kernels/routing/topk_align.h"
#include "kernels/routing/topk_softmax.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kTopkRouteMaxExperts = 1024;
inline constexpr int kTopkRouteMaxColumns = 32;  // k and the shared experts
inline constexpr int kTopkRouteMaxGroups = 32;

enum class TopkScoring : int { kSoftmax, kSigmoid, kSqrtSoftplus };

struct TopkRouteOptions {
  TopkSoftmaxOptions softmax;
  TopkScoring scoring = TopkScoring::kSoftmax;
  int64_t groups = 1;       // of neighbouring experts
  int64_t kept_groups = 1;  // whose experts can be selected
  float scaling = 1.0f;     // of the selected experts' weights
  int64_t shared = 0;       // experts behind the others, which all rows get, with weight 1
};

// `bias` [E] float32 or null is added to the scores for the choice of groups and experts. weights
// and indices are [T, k + shared]. With `token_ids` [T] int32 or int64 and `expert_table` [tokens,
// k] int32, a row's experts are those of its token in the table, without bias and groups. A token
// that the table lacks, or a number in it that is no expert, gives index -1 and weight 0.
struct TopkRouteCall {
  const TensorView* scores = nullptr;
  const TensorView* bias = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* indices = nullptr;
  TopkRouteOptions options;
  const TensorView* token_ids = nullptr;     // or null
  const TensorView* expert_table = nullptr;  // with token_ids
};

struct TopkRouteAlignCall {
  const TensorView* scores = nullptr;
  const TensorView* bias = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* indices = nullptr;
  const TensorView* expert_map = nullptr;  // or null
  MoeAlignOutputs outputs;
  TopkRouteOptions options;
  MoeAlignOptions align;                     // num_experts is not read
  const TensorView* token_ids = nullptr;     // or null
  const TensorView* expert_table = nullptr;  // with token_ids
};

// Their parameters are those of topk_softmax.h and topk_align.h.
Status topk_route_plan(const TopkRouteCall& call, TopkSoftmaxPlan* plan);
Status topk_route(const TopkRouteCall& call, void* stream);
Status topk_route_align_plan(const TopkRouteAlignCall& call, TopkAlignPlan* plan);
Status topk_route_align(const TopkRouteAlignCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ROUTE_H_
