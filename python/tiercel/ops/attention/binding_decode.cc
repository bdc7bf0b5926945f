// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode/decode.h"
#include "kernels/attention/decode/kernels.h"
#include "kernels/attention/merge/merge.h"
#include "python/bindings/allocate.h"
#include "python/bindings/attention_options.h"
#include "python/bindings/functions.h"
#include "python/bindings/reference.h"
#include "python/bindings/workspace.h"

namespace tiercel::python {
namespace {

constexpr char kName[] = "decode_attention";

bool ReadSplit(PyObject* object, const char* op, const char* name, DecodeCall* call) {
  int64_t split = 0;
  if (!ReadValue(object, op, name, &split)) return false;
  call->options.split = split < -1 || split > 1024 ? 1024 : static_cast<int>(split);
  return true;
}

const TensorView* QueriesOf(const DecodeCall& call) { return call.tensors.q; }

constexpr Field<DecodeCall> kInputs[] = {
    Tensor<&DecodeCall::tensors, &DecodeTensors::q>("q"),
    Tensor<&DecodeCall::tensors, &DecodeTensors::k_cache>("k_cache"),
    Tensor<&DecodeCall::tensors, &DecodeTensors::v_cache>("v_cache"),
    Tensor<&DecodeCall::tensors, &DecodeTensors::page_table>("page_table"),
    Tensor<&DecodeCall::tensors, &DecodeTensors::seqused_k>("seqused_k"),
};
constexpr Field<DecodeCall> kOut[] = {Tensor<&DecodeCall::tensors, &DecodeTensors::out>("out")};
constexpr Field<DecodeCall> kLse[] = {Tensor<&DecodeCall::tensors, &DecodeTensors::lse>("lse")};
constexpr Field<DecodeCall> kOptional[] = {
    Optional<&DecodeCall::tensors, &DecodeTensors::prefix>("prefix"),
    Optional<&DecodeCall::tensors, &DecodeTensors::k_scale>("k_scale"),
    Optional<&DecodeCall::tensors, &DecodeTensors::v_scale>("v_scale"),
};
constexpr Field<DecodeCall> kOfLaunch[] = {
    Optional<&DecodeCall::tensors, &DecodeTensors::lse>("lse"),
    Optional<&DecodeCall::tensors, &DecodeTensors::workspace>("workspace"),
    Value<&DecodeCall::options, &DecodeOptions::left>("left"),
    Value<&DecodeCall::options, &DecodeOptions::right>("right"),
    Value<&DecodeCall::options, &DecodeOptions::scale>("scale"),
    Value<&DecodeCall::options, &DecodeOptions::softcap>("softcap"),
    Value<&DecodeCall::options, &DecodeOptions::max_keys>("max_keys"),
    Read("split", "int", ReadSplit),
};
// The options of the public function.
constexpr Field<DecodeCall> kOfOperator[] = {
    Read("causal", "bool", ReadCausal<DecodeCall>),
    Read("window", "Sequence[int] | None", ReadWindow<DecodeCall>),
    Read("scale", "float | None", ReadScale<QueriesOf, DecodeCall>),
    ValueOrNone<&DecodeCall::options, &DecodeOptions::softcap>("softcap"),
    ValueOrNone<&DecodeCall::options, &DecodeOptions::max_keys>("max_seqused_k"),
};

constexpr auto kLaunchFields = Joined(kInputs, kOut, kOptional, kOfLaunch);
constexpr auto kNewFields = Joined(kInputs, kOptional, kOfOperator);
constexpr auto kOutFields = Joined(kInputs, kOut, kOptional, kOfOperator);
constexpr auto kOutLseFields = Joined(kInputs, kOut, kLse, kOptional, kOfOperator);
constexpr Parameters<DecodeCall> kLaunch{kName, kLaunchFields.fields};
constexpr Parameters<DecodeCall> kNew{kName, kNewFields.fields};
constexpr Parameters<DecodeCall> kGivenOut{kName, kOutFields.fields};
constexpr Parameters<DecodeCall> kGivenOutLse{kName, kOutLseFields.fields};

// A public operator as a whole: allocates what is not given, then launches.
template <const auto& kParameters, bool kLse>
PyObject* Operator(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr bool kGiven = kParameters.count != kNew.count;
  Parsed<kParameters> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  DecodeTensors& tensors = parsed.call.tensors;
  const TensorView& q = *tensors.q;
  if (q.ndim != 4) {
    PyErr_Format(PyExc_ValueError, "%s: `q` must have 4 dimensions, got %d", kName, q.ndim);
    return nullptr;
  }
  Reference out, lse;
  PythonTensor out_tensor, lse_tensor;
  if (!kGiven) {
    out.Take(NewTensor(values[0], {q.shape[0], q.shape[1], q.shape[2], q.shape[3]}));
    if (!out || !out_tensor.Read(out.get(), kName, "out")) return nullptr;
    tensors.out = &out_tensor.view();
  }
  if (!kGiven && kLse) {
    lse.Take(NewFloat32(values[0], {q.shape[0], q.shape[2], q.shape[1]}));
    if (!lse || !lse_tensor.Read(lse.get(), kName, "lse")) return nullptr;
    tensors.lse = &lse_tensor.view();
  }
  DecodeLaunch launch;
  const Status status = launch.prepare(parsed.call);
  if (!status.ok()) return Raise(status);
  void* stream = nullptr;
  Workspace workspace;
  if (!parsed.of_stream().CurrentStream(&stream) ||
      (launch.workspace() > 0 &&
       !workspace.Get(values[0], q.device_index, stream, launch.workspace()))) {
    return nullptr;
  }
  const Status launched = WithoutGil([&] { return launch.run(workspace.data(), stream); });
  if (!launched.ok()) return Raise(launched);
  if (kGiven) Py_RETURN_NONE;
  return kLse ? PyTuple_Pack(2, out.get(), lse.get()) : out.Release();
}

template <const auto& kParameters, bool kLse>
constexpr Function OperatorOf(const char* name, const char* returns, const char* text) {
  return {name, Operator<kParameters, kLse>, text, returns, Describe<kParameters>};
}

constexpr PlanField<DecodePlan> kPlanFields[] = {
    Entry<&DecodePlan::kernel>("kernel"),   Entry<&DecodePlan::combine>("combine"),
    Entry<&DecodePlan::rows>("rows"),       Entry<&DecodePlan::step>("step"),
    Entry<&DecodePlan::cluster>("cluster"), Entry<&DecodePlan::grid>("grid"),
    Entry<&DecodePlan::block>("block"),     Entry<&DecodePlan::workspace>("workspace"),
};
constexpr PlanDict<DecodePlan> kPlan{"DecodePlan", kPlanFields};

constexpr Field<MergeCall> kMergeFields[] = {
    Tensor<&MergeCall::out_a>("out_a"), Tensor<&MergeCall::lse_a>("lse_a"),
    Tensor<&MergeCall::out_b>("out_b"), Tensor<&MergeCall::lse_b>("lse_b"),
    Tensor<&MergeCall::out>("out"),     Tensor<&MergeCall::lse>("lse"),
};
constexpr Parameters<MergeCall> kMerge{"merge_attention_states", kMergeFields};

constexpr PlanField<MergePlan> kMergePlanFields[] = {
    Entry<&MergePlan::kernel>("kernel"),
    Entry<&MergePlan::grid>("grid"),
    Entry<&MergePlan::block>("block"),
};
constexpr PlanDict<MergePlan> kMergePlan{"MergePlan", kMergePlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kLaunch, decode_attention>(
        "decode_attention",
        "Launches the kernels on the current stream, fills `out` and, unless it is None, `lse`, "
        "and returns 0. If it needs a workspace and got None, launches nothing and returns its "
        "length in floats."),
    PlanOf<kLaunch, decode_attention_plan, kPlan>("decode_attention_plan"),
    OperatorOf<kNew, false>(
        "decode_attention_new", "Any",
        "The operator: allocates its result and what it needs, launches the kernels."),
    OperatorOf<kNew, true>("decode_attention_new_lse", "tuple[Any, Any]",
                           "The operator; returns (out, lse)."),
    OperatorOf<kGivenOut, false>("decode_attention_out", "None", "The operator; fills `out`."),
    OperatorOf<kGivenOutLse, true>("decode_attention_out_lse", "None",
                                   "The operator; fills `out` and `lse`."),
    LoadOf<decode_kernels_bf16, decode_kernels_bf16_fp8, decode_kernels_fp16,
           decode_kernels_fp16_fp8, decode_combine_kernels>("decode_attention_load"),
    LaunchOf<kMerge, merge_attention_states>(
        "merge_attention_states",
        "Launches the kernel on the current stream; fills `out` and `lse`."),
    PlanOf<kMerge, merge_attention_states_plan, kMergePlan>("merge_attention_states_plan"),
    LoadOf<merge_kernels>("merge_attention_states_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
