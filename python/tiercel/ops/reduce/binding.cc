// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce/reduce.h"
#include "kernels/reduce/reduce_kernels.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

bool ReadOp(PyObject* object, const char* op, const char*, ReduceCall* call) {
  int index = 0;
  if (!ReadIndex(object, op, "operation", static_cast<int>(ReduceOp::kMax), &index)) return false;
  call->op = static_cast<ReduceOp>(index);
  return true;
}

constexpr Field<ReduceCall> kFields[] = {
    Tensor<&ReduceCall::x>("x"),
    Tensor<&ReduceCall::out>("out"),
    Optional<&ReduceCall::workspace>("workspace"),
    Value<&ReduceCall::dim>("dim"),
    Read("op", "int", ReadOp),
};
constexpr Parameters<ReduceCall> kReduce{"reduce", kFields};

constexpr PlanField<ReducePlan> kPlanFields[] = {
    Entry<&ReducePlan::kernel>("kernel"),
    Entry<&ReducePlan::second>("second"),
    Entry<&ReducePlan::vector_bytes>("vector_bytes"),
    Entry<&ReducePlan::parts>("parts"),
    Entry<&ReducePlan::cluster>("cluster"),
    Entry<&ReducePlan::grid>("grid"),
    Entry<&ReducePlan::block>("block"),
    Entry<&ReducePlan::workspace>("workspace"),
};
constexpr PlanDict<ReducePlan> kPlan{"ReducePlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kReduce, reduce>(
        "reduce",
        "Launches the kernel on the current stream, fills `out` and returns 0. If it needs a "
        "workspace and got None, launches nothing and returns its length in floats."),
    PlanOf<kReduce, reduce_plan, kPlan>("reduce_plan"),
    LoadOf<reduce_rows_kernels, reduce_columns_kernels>("reduce_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
