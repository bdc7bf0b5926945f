// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/functions.h"

#include <cstring>
#include <map>
#include <vector>

#include "kernels/sm90/driver.h"
#include "kernels/sm90/math.h"

namespace tiercel::python {
namespace {

const Family* first_family = nullptr;

std::string TypedArguments(const Function& function) {
  std::string text = function.arguments;
  if (function.describe != nullptr) function.describe(&text);
  // A function of any number of arguments has no positional-only ones.
  return text.find('*') == std::string::npos ? text + ", /" : text;
}

// "x: list[int, ...] = ..., /" -> "x=..., /", as a signature at runtime has no types.
std::string WithoutTypes(const std::string& arguments) {
  std::string text;
  int depth = 0;
  bool in_type = false;
  for (const char c : arguments) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ':') in_type = true;
    if (depth == 0 && (c == ',' || c == '=')) in_type = false;
    if (in_type) continue;
    text += c;
    if (c == '=') in_type = false;
  }
  for (size_t at; (at = text.find("= ")) != std::string::npos;) text.erase(at + 1, 1);
  return text;
}

}  // namespace

PyObject* ToPython(const char* text) { return PyUnicode_FromString(text != nullptr ? text : ""); }
PyObject* ToPython(bool value) { return PyBool_FromLong(value); }
PyObject* ToPython(int value) { return PyLong_FromLong(value); }
PyObject* ToPython(unsigned value) { return PyLong_FromUnsignedLong(value); }
PyObject* ToPython(int64_t value) { return PyLong_FromLongLong(value); }

int MultiprocessorsOf(const TensorView& tensor) {
  int count = 0;
  const bool known = tensor.device_type == DeviceType::kCUDA &&
                     multiprocessor_count(tensor.device_index, &count).ok() && count > 0;
  return known ? count : kDefaultMultiprocessors;
}

void DescribeArgument(std::string* text, const char* name, const char* type, bool may_be_absent) {
  if (!text->empty()) *text += ", ";
  *text += std::string(name) + ": " + type + (may_be_absent ? " = ..." : "");
}

void DeclareField(std::string* text, const char* name, const char* type) {
  *text += std::string("    ") + name + ": " + type + "\n";
}

Family::Family(const Function* functions, size_t count)
    : functions_(functions), count_(count), next_(first_family) {
  first_family = this;
}

Status WrongCount(const char* op, size_t expected, size_t count) {
  return Status::TypeError(std::string(op) + ": " + std::to_string(expected) +
                           " arguments are expected, got " + std::to_string(count));
}

Status WrongValue(const char* op, const char* name, const char* type) {
  return Status::TypeError(std::string(op) + ": `" + name + "` must be a " + type);
}

NativeFunction FindNative(const char* name) {
  for (const Family* family = first_family; family != nullptr; family = family->next_) {
    for (size_t i = 0; i < family->count_; ++i) {
      const Function& function = family->functions_[i];
      if (std::strcmp(function.name, name) == 0) return function.native;
    }
  }
  return nullptr;
}

int AddFamilies(PyObject* module) {
  // Python keeps pointers to both.
  auto* docs = new std::vector<std::string>;
  auto* methods = new std::vector<PyMethodDef>;
  std::vector<const Function*> functions;
  for (const Family* family = first_family; family != nullptr; family = family->next_) {
    for (size_t i = 0; i < family->count_; ++i) functions.push_back(family->functions_ + i);
  }
  docs->reserve(functions.size());
  for (const Function* function : functions) {
    docs->push_back(std::string(function->name) + "(" + WithoutTypes(TypedArguments(*function)) +
                    ")\n--\n\n" + function->text);
    const bool fast = function->call != nullptr;
    methods->push_back({function->name, fast ? AsMethod(function->call) : function->call_one,
                        fast ? METH_FASTCALL : METH_O, docs->back().c_str()});
  }
  methods->push_back({nullptr, nullptr, 0, nullptr});
  return PyModule_AddFunctions(module, methods->data());
}

std::string StubOfFamilies() {
  std::map<std::string, std::string> plans, functions;
  for (const Family* family = first_family; family != nullptr; family = family->next_) {
    for (size_t i = 0; i < family->count_; ++i) {
      const Function& function = family->functions_[i];
      std::string returns = function.returns;
      if (function.declare != nullptr) {
        returns = "_" + returns;
        std::string& fields = plans[returns];
        fields.clear();
        function.declare(&fields);
      }
      functions[function.name] = "(" + TypedArguments(function) + ") -> " + returns;
    }
  }
  std::string text;
  for (const auto& [name, fields] : plans)
    text += "class " + name + "(TypedDict):\n" + fields + "\n";
  for (const auto& [name, rest] : functions) text += "def " + name + rest + ": ...\n";
  return text;
}

}  // namespace tiercel::python
