// SPDX-License-Identifier: Apache-2.0
// Reads native_ops.txt. The build puts the text into this file, and a test compares it with the
// declarations, so there is nothing to report to a user: an op whose lines do not fit is left out.
#include <cstdlib>
#include <sstream>

#include "python/bindings/functions.h"
#include "python/bindings/native_op.h"

namespace tiercel::python {
namespace {

constexpr char kText[] =
#include "python/bindings/native_ops.inc"
    ;

// "i3", "b1", "f0.5" or "-".
NativeValue ValueOf(const std::string& word) {
  const char* digits = word.c_str() + 1;
  if (word[0] == 'i') return NativeValue::Of(static_cast<int64_t>(std::atoll(digits)));
  if (word[0] == 'b') return NativeValue::Of(word == "b1");
  if (word[0] == 'f') return NativeValue::Of(std::strtod(digits, nullptr));
  return NativeValue();
}

// A dtype's name of dtype_name(), null for another word.
const char* DTypeName(const std::string& word) {
  for (int i = 0; i < static_cast<int>(DType::kUnknown); ++i) {
    const char* name = dtype_name(static_cast<DType>(i));
    if (word == name) return name;
  }
  return nullptr;
}

template <typename Item, ptrdiff_t kMost>
bool Append(const Item& item, Few<Item, kMost>* few) {
  if (few->count == kMost) return false;
  few->items[few->count++] = item;
  return true;
}

// KIND NAME: the kind with `?` if it may be None, `!` if it is written to.
bool ReadArgument(std::istream& line, NativeOp* op) {
  static constexpr const char* kKinds[] = {"tensor", "string", "bool", "int", "float", "dtype"};
  std::string kind;
  NativeArgument argument{};
  line >> kind >> argument.name;
  for (; kind.back() == '?' || kind.back() == '!'; kind.pop_back()) {
    (kind.back() == '?' ? argument.optional : argument.written) = true;
  }
  for (int i = 0; i < 6; ++i) {
    if (kind != kKinds[i]) continue;
    argument.kind = static_cast<NativeArgument::Kind>(i);
    const auto place = static_cast<ptrdiff_t>(op->arguments.size());
    op->arguments.push_back(argument);
    const bool is_tensor = argument.kind == NativeArgument::kTensor;
    return place < kMaxArguments && (!is_tensor || Append(place, &op->layout.tensors));
  }
  return false;
}

// LIKE DTYPE DROPPED OTHER INSTEAD, then PLACE,DIM,DIVISOR,UNLESS of each size.
bool ReadOutput(std::istream& line, NativeOp* op) {
  OutputOf<const char*> output{};
  std::string dtype, dropped, other, instead;
  line >> output.like >> dtype >> dropped >> other >> instead;
  if (dtype[0] == '@') {
    output.dtype_place = std::atoll(dtype.c_str() + 1);
  } else if ((output.dtype = DTypeName(dtype)) == nullptr) {
    return false;
  }
  output.batched = dropped != "-";
  if (output.batched) output.dropped = std::atoll(dropped.c_str());
  if (const size_t colon = other.find(':'); colon != std::string::npos) {
    output.other_place = std::atoll(other.c_str());
    output.other_dtype = DTypeName(other.substr(colon + 1));
  }
  if (const size_t colon = instead.find(':'); colon != std::string::npos) {
    output.unwanted = DTypeName(instead.substr(0, colon));
    output.instead = DTypeName(instead.substr(colon + 1));
  }
  Size size{};
  char comma;
  while (line >> size.place >> comma >> size.dim >> comma >> size.divisor >> comma >> size.unless) {
    if (!Append(size, &output.sizes)) return false;
  }
  op->outputs.push_back(output);
  return op->outputs.size() <= kMaxOutputs;
}

// "argument PLACE", "output INDEX", "constant VALUE" or "lookup PLACE KEY=VALUE ...".
bool ReadSlot(std::istream& line, NativeOp* op) {
  std::string kind, word;
  NativeSlot slot;
  line >> kind;
  if (kind == "constant") {
    line >> word;
    slot.constant = ValueOf(word);
  } else {
    line >> slot.index;
    slot.kind = kind == "argument" ? NativeSlot::kArgument
                : kind == "output" ? NativeSlot::kOutput
                                   : NativeSlot::kLookup;
    while (slot.kind == NativeSlot::kLookup && line >> word) {
      const size_t equals = word.rfind('=');
      slot.table.emplace_back(word.substr(0, equals), ValueOf(word.substr(equals + 1)));
    }
  }
  op->slots.push_back(std::move(slot));
  return op->slots.size() <= kMaxArguments;
}

bool ReadLine(const std::string& word, std::istream& line, NativeOp* op) {
  if (word == "schema") {
    std::getline(line >> std::ws, op->schema);
  } else if (word == "native") {
    std::string name;
    line >> name;
    op->function = FindNative(name.c_str());
    return op->function != nullptr;
  } else if (word == "argument") {
    return ReadArgument(line, op);
  } else if (word == "contiguous" || word == "absent") {
    uint64_t& bits = word == "absent" ? op->layout.absent : op->layout.contiguous;
    int place = 0;
    while (line >> place) bits |= uint64_t{1} << place;
  } else if (word == "rank") {
    Rank rule{};
    line >> rule.place >> rule.rank;
    return Append(rule, &op->layout.ranks);
  } else if (word == "equal") {
    Equal rule{};
    line >> rule.place >> rule.dim >> rule.number;
    return Append(rule, &op->layout.equals);
  } else if (word == "output") {
    return ReadOutput(line, op);
  } else if (word == "slot") {
    return ReadSlot(line, op);
  }
  return true;
}

std::vector<NativeOp> ReadAll() {
  std::vector<NativeOp> ops;
  std::istringstream text(kText);
  std::string written;
  bool fits = true;
  const auto drop_unfit = [&] {
    if (!fits) ops.pop_back();
    fits = true;
  };
  while (std::getline(text, written)) {
    std::istringstream line(written);
    std::string word;
    if (!(line >> word) || word[0] == '#') continue;
    if (word == "op") {
      drop_unfit();
      ops.emplace_back();
      line >> ops.back().name;
    } else if (!ops.empty()) {
      fits = ReadLine(word, line, &ops.back()) && fits;
    }
  }
  drop_unfit();
  return ops;
}

}  // namespace

const std::vector<NativeOp>& NativeOps() {
  static const auto* const ops = new std::vector<NativeOp>(ReadAll());  // torch keeps their schemas
  return *ops;
}

}  // namespace tiercel::python
