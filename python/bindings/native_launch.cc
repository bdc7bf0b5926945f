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

}  // namespace

Status Unfit() { return Status::Unimplemented("an argument is left to Python"); }

bool StoreValue(const NativeValue& value, FieldKind kind, int last, size_t bytes, void* member) {
  const bool whole = value.kind == NativeValue::kInt;
  const bool number = whole || value.kind == NativeValue::kFloat;
  const double real = whole ? static_cast<double>(value.number) : value.real;
  switch (kind) {
    case FieldKind::kBool:
      return value.kind == NativeValue::kBool && Write(value.number != 0, member);
    case FieldKind::kInt:
      return whole && Write(value.number, member);
    case FieldKind::kFloat64:
      return number && Write(real, member);
    case FieldKind::kFloat32:
      return number && Write(static_cast<float>(real), member);
    case FieldKind::kIndex:
      if (!whole || value.number < 0 || value.number > last) return false;
      std::memcpy(member, &value.number, bytes);  // the lower bytes come first
      return true;
    case FieldKind::kTensor:
    case FieldKind::kOther:
      break;
  }
  return false;
}

}  // namespace tiercel::python
