// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_backward_config.h"
#include "kernels/norm/norm_kernels.h"
#include "python/bindings/functions.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

constexpr Field<NormForward> kForward[] = {
    Tensor<&NormForward::x>("x"),         Optional<&NormForward::weight>("weight"),
    Optional<&NormForward::bias>("bias"), Optional<&NormForward::residual>("residual"),
    Tensor<&NormForward::out>("out"),     Optional<&NormForward::residual_out>("residual_out"),
    Value<&NormForward::eps>("eps"),
};
constexpr Parameters<NormForward> kRms{"rms_norm", kForward, {NormKind::kRms}};
constexpr Parameters<NormForward> kLayer{"layer_norm", kForward, {NormKind::kLayer}};

constexpr Field<NormBackward> kBackward[] = {
    Tensor<&NormBackward::x>("x"),
    Optional<&NormBackward::weight>("weight"),
    Tensor<&NormBackward::grad>("grad"),
    Optional<&NormBackward::grad_residual>("grad_residual"),
    Tensor<&NormBackward::grad_x>("grad_x"),
    Optional<&NormBackward::grad_weight>("grad_weight"),
    Optional<&NormBackward::grad_bias>("grad_bias"),
    Optional<&NormBackward::workspace>("workspace"),
    Value<&NormBackward::eps>("eps"),
};

bool ReadNormConfig(PyObject* object, const char* op, const char*, NormBackward* call) {
  NormBackwardFields fields;
  if (!ReadConfig(object, op, &fields)) return false;
  call->config = norm_backward_config_of(fields);
  return true;
}

constexpr Field<NormBackward> kConfig[] = {
    MayBeAbsent(Read("config", "tuple[int, ...]", ReadNormConfig))};
constexpr auto kLaunch = Joined(kBackward, kConfig);
constexpr Parameters<NormBackward> kRmsBackward{"rms_norm", kLaunch.fields, {NormKind::kRms}};
constexpr Parameters<NormBackward> kLayerBackward{"layer_norm", kLaunch.fields, {NormKind::kLayer}};
constexpr Parameters<NormBackward> kRmsPlan{"rms_norm", kBackward, {NormKind::kRms}};
constexpr Parameters<NormBackward> kLayerPlan{"layer_norm", kBackward, {NormKind::kLayer}};

constexpr PlanField<NormPlan> kPlanFields[] = {
    Entry<&NormPlan::kernel>("kernel"),
    Entry<&NormPlan::vector_bytes>("vector_bytes"),
    Entry<&NormPlan::threads_per_row>("threads_per_row"),
    Entry<&NormPlan::cluster>("cluster"),
    Entry<&NormPlan::grid>("grid"),
    Entry<&NormPlan::block>("block"),
    Entry<&NormPlan::dynamic_smem>("dynamic_smem"),
    Entry<&NormPlan::stages>("stages"),
    Entry<&NormPlan::ahead>("ahead"),
    Entry<&NormPlan::parts>("parts"),
};
constexpr PlanDict<NormPlan> kPlan{"NormPlan", kPlanFields};

bool ReadCount(PyObject* object, const char* op, const char* name, int least, int* value) {
  int64_t number = 0;
  if (!ReadValue(object, op, name, &number)) return false;
  *value = static_cast<int>(number);
  if (number >= least && number <= 1'000'000) return true;
  PyErr_Format(PyExc_ValueError, "%s: `%s` must be from %d to 1000000, got %lld", op, name, least,
               static_cast<long long>(number));
  return false;
}

// A launch comes without the GIL, which reading the files needs.
Status LoadRanges(const NormBackward&) {
  LoadNormBackwardRanges();
  return Status();
}

// The arguments of a launch, two more where the plan is for another device than x's, and last the
// tuner's configuration, if any.
template <const auto& kParameters>
PyObject* BackwardPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr auto kCount = static_cast<Py_ssize_t>(kParameters.count);
  const bool configured = count > 0 && PyTuple_Check(values[count - 1]);
  if (configured) --count;
  const bool named = count == kCount + 2;
  Parsed<kParameters> parsed;
  if (!parsed.Read(values, named ? kCount : count)) return nullptr;
  if (configured && !ReadNormConfig(values[count], kParameters.op, "config", &parsed.call)) {
    return nullptr;
  }
  LoadNormBackwardRanges();
  NormDevice device;
  if (named) {
    const char* op = kParameters.op;
    if (!ReadCount(values[kCount], op, "multiprocessors", 1, &device.multiprocessors) ||
        !ReadCount(values[kCount + 1], op, "memory_gbps", 0, &device.memory_gbps)) {
      return nullptr;
    }
  } else if (!norm_device(*parsed.call.x, &device).ok() || device.multiprocessors <= 0) {
    device = {MultiprocessorsOf(*parsed.call.x), 0, parsed.call.x->device_index};
  }
  NormPlan plan{};
  const Status status = norm_backward_plan(parsed.call, device, &plan);
  return status.ok() ? kPlan.Make(plan) : Raise(status);
}

template <const auto& kParameters>
void DescribeBackwardPlan(std::string* text) {
  Describe<kParameters>(text);
  DescribeArgument(text, "multiprocessors", "int", true);
  DescribeArgument(text, "memory_gbps", "int", true);
  DescribeArgument(text, "config", "tuple[int, ...]", true);
}

template <const auto& kParameters>
constexpr Function BackwardPlanOf(const char* name) {
  return {name,
          BackwardPlan<kParameters>,
          "The same checks, and the configuration, on x's device or as on one with so many "
          "multiprocessors and gigabytes a second (both or neither). Needs no GPU.",
          kPlan.name,
          DescribeBackwardPlan<kParameters>,
          "",
          Declare<kPlan>};
}

constexpr char kFills[] =
    "Launches the kernel on the current stream; fills `out` and `residual_out`.";
constexpr char kFillsGradients[] =
    "Launches the kernels on the current stream; fills the gradients.";

constexpr Function kFunctions[] = {
    LaunchOf<kRms, norm_forward>("rms_norm", kFills),
    PlanOf<kRms, norm_forward_plan, kPlan>("rms_norm_plan"),
    LaunchOf<kRmsBackward, norm_backward, LoadRanges>("rms_norm_backward", kFillsGradients),
    BackwardPlanOf<kRmsPlan>("rms_norm_backward_plan"),
    LaunchOf<kLayer, norm_forward>("layer_norm", kFills),
    PlanOf<kLayer, norm_forward_plan, kPlan>("layer_norm_plan"),
    LaunchOf<kLayerBackward, norm_backward, LoadRanges>("layer_norm_backward", kFillsGradients),
    BackwardPlanOf<kLayerPlan>("layer_norm_backward_plan"),
    LoadOf<norm_forward_kernels, norm_backward_kernels, norm_reduce_kernels>("norm_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
