// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/native_launch.h"

#include <cstring>

namespace tiercel::python {
namespace {

template <typename Value>
bool Write(Value value, void* member) {
  std::memcpy(member, &value, sizeof(value));
  return true;
}

// A value that is no tensor.
bool StoreValue(const NativeValue& value, const FieldRule& rule, void* member) {
  const bool whole = value.kind == NativeValue::kInt;
  const bool number = whole || value.kind == NativeValue::kFloat;
  const double real = whole ? static_cast<double>(value.number) : value.real;
  switch (rule.kind) {
    case FieldKind::kBool:
      return value.kind == NativeValue::kBool && Write(value.number != 0, member);
    case FieldKind::kInt:
      return whole && Write(value.number, member);
    case FieldKind::kFloat64:
      return number && Write(real, member);
    case FieldKind::kFloat32:
      return number && Write(static_cast<float>(real), member);
    case FieldKind::kIndex:
      if (!whole || value.number < 0 || value.number > rule.last) return false;
      std::memcpy(member, &value.number, rule.bytes);  // the lower bytes come first
      return true;
    case FieldKind::kTensor:
    case FieldKind::kOther:
      break;
  }
  return false;
}

}  // namespace

Status Unfit() { return Status::Unimplemented("an argument is left to Python"); }

bool FillCall(const FieldRules& rules, const NativeValue* values, size_t count, void* call) {
  for (size_t i = 0; i < count; ++i) {
    const FieldRule& rule = rules[i];
    const NativeValue& value = values[i];
    if (value.kind == NativeValue::kNone && (rule.may_be_none || rule.keeps_default)) continue;
    if (rule.member == nullptr) return false;
    void* member = rule.member(call);
    if (rule.kind == FieldKind::kTensor && value.kind == NativeValue::kTensor) {
      std::memcpy(member, &value.tensor, sizeof(value.tensor));
    } else if (!StoreValue(value, rule, member)) {
      return false;
    }
  }
  return true;
}

}  // namespace tiercel::python
