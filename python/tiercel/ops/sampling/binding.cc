// SPDX-License-Identifier: Apache-2.0
#include "kernels/sampling/sample.h"
#include "python/bindings/functions.h"
#include "python/bindings/workspace.h"

namespace tiercel::python {
namespace {

constexpr Field<SampleCall> kFields[] = {
    Tensor<&SampleCall::logits>("logits"),
    Optional<&SampleCall::temperatures>("temperatures"),
    Optional<&SampleCall::top_ks>("top_ks"),
    Optional<&SampleCall::top_ps>("top_ps"),
    Optional<&SampleCall::min_ps>("min_ps"),
    Optional<&SampleCall::seeds>("seeds"),
    Optional<&SampleCall::offsets>("offsets"),
    Optional<&SampleCall::repetition_penalties>("repetition_penalties"),
    Optional<&SampleCall::presence_penalties>("presence_penalties"),
    Optional<&SampleCall::frequency_penalties>("frequency_penalties"),
    Optional<&SampleCall::counts>("counts"),
    Optional<&SampleCall::prompt>("prompt"),
    Optional<&SampleCall::allowed>("allowed"),
    Tensor<&SampleCall::tokens>("tokens"),
    Optional<&SampleCall::logprobs>("logprobs"),
    Optional<&SampleCall::top_tokens>("top_tokens"),
    Optional<&SampleCall::top_logprobs>("top_logprobs"),
    Value<&SampleCall::numbers, &SampleNumbers::temperature>("temperature"),
    Value<&SampleCall::numbers, &SampleNumbers::top_k>("top_k"),
    Value<&SampleCall::numbers, &SampleNumbers::top_p>("top_p"),
    Value<&SampleCall::numbers, &SampleNumbers::min_p>("min_p"),
    Value<&SampleCall::numbers, &SampleNumbers::seed>("seed"),
    Value<&SampleCall::numbers, &SampleNumbers::offset>("offset"),
    Value<&SampleCall::numbers, &SampleNumbers::repetition>("repetition_penalty"),
    Value<&SampleCall::numbers, &SampleNumbers::presence>("presence_penalty"),
    Value<&SampleCall::numbers, &SampleNumbers::frequency>("frequency_penalty"),
};
constexpr Parameters<SampleCall> kSample{"sample", kFields};

constexpr PlanField<SamplePlan> kPlanFields[] = {
    Entry<&SamplePlan::kernel>("kernel"),
    Entry<&SamplePlan::blocks_per_row>("blocks_per_row"),
    Entry<&SamplePlan::grid>("grid"),
    Entry<&SamplePlan::block>("block"),
    Entry<&SamplePlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<SamplePlan> kPlan{"SamplePlan", kPlanFields};

template <auto kMember>
constexpr auto Sampled(const char* name) {
  return Optional<&VerifyDraftCall::sample, kMember>(name);
}
template <auto kMember>
constexpr auto Number(const char* name) {
  return Value<&VerifyDraftCall::sample, &SampleCall::numbers, kMember>(name);
}
constexpr Field<VerifyDraftCall> kVerifyFields[] = {
    Tensor<&VerifyDraftCall::draft>("draft_tokens"),
    OfStream(Tensor<&VerifyDraftCall::sample, &SampleCall::logits>("logits")),
    Optional<&VerifyDraftCall::probs>("draft_probs"),
    Sampled<&SampleCall::temperatures>("temperatures"),
    Sampled<&SampleCall::top_ks>("top_ks"),
    Sampled<&SampleCall::top_ps>("top_ps"),
    Sampled<&SampleCall::min_ps>("min_ps"),
    Sampled<&SampleCall::seeds>("seeds"),
    Sampled<&SampleCall::offsets>("offsets"),
    Tensor<&VerifyDraftCall::tokens>("tokens"),
    Tensor<&VerifyDraftCall::accepted>("accepted"),
    Optional<&VerifyDraftCall::workspace>("workspace"),
    Number<&SampleNumbers::temperature>("temperature"),
    Number<&SampleNumbers::top_k>("top_k"),
    Number<&SampleNumbers::top_p>("top_p"),
    Number<&SampleNumbers::min_p>("min_p"),
    Number<&SampleNumbers::seed>("seed"),
    Number<&SampleNumbers::offset>("offset"),
    Optional<&VerifyDraftCall::parents>("parents"),
    Optional<&VerifyDraftCall::path>("path"),
};
constexpr Parameters<VerifyDraftCall> kVerify{"verify_draft", kVerifyFields};

struct WorkspaceCall {
  int64_t rows = 0;
};
constexpr Field<WorkspaceCall> kWorkspaceFields[] = {Value<&WorkspaceCall::rows>("rows")};
constexpr Parameters<WorkspaceCall> kWorkspace{"verify_draft", kWorkspaceFields};

PyObject* WorkspaceElements(const WorkspaceCall& call) {
  return PyLong_FromLongLong(verify_draft_workspace(call.rows));
}

PyObject* VerifyDraft(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kVerify> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  VerifyDraftCall call = parsed.call;
  void* stream = nullptr;
  if (!parsed.of_stream().CurrentStream(&stream)) return nullptr;
  Workspace allocated;
  const TensorView &draft = *call.draft, &tokens = *call.tokens;
  const int64_t elements =
      tokens.ndim == 2 ? verify_draft_workspace(tokens.shape[0] * tokens.shape[1]) : 0;
  const int64_t stride = 1;
  TensorView space{nullptr,   DType::kInt64, draft.device_type, draft.device_index, 1,
                   &elements, &stride};
  if (call.workspace == nullptr) {
    if (elements > 0 && !allocated.Get(values[0], draft.device_index, stream, 2 * elements)) {
      return nullptr;
    }
    space.data = allocated.data();
    call.workspace = &space;
  }
  const Status launched = WithoutGil([&] { return verify_draft(call, stream); });
  if (!launched.ok()) return Raise(launched);
  Py_RETURN_NONE;
}

constexpr Function kFunctions[] = {
    LaunchOf<kSample, sample>(
        "sample",
        "Launches the kernels on the current stream; fills `tokens`, and what else is given."),
    PlanOf<kSample, sample_plan, kPlan>("sample_plan"),
    LoadOf<sample_load>("sample_load"),
    {"verify_draft", VerifyDraft,
     "Launches the kernels on the current stream; fills `tokens`, `accepted` and `path`. Allocates "
     "the "
     "workspace, unless it is given.",
     "None", Describe<kVerify>},
    PlanOf<kVerify, verify_draft_plan, kPlan>("verify_draft_plan"),
    FunctionOf<kWorkspace, WorkspaceElements>(
        "verify_draft_workspace", "int", "The int64 elements of workspace for that many rows."),
    LoadOf<verify_draft_load>("verify_draft_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
