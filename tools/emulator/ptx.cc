// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/ptx.h"

#include <cctype>
#include <cstdlib>
#include <cstring>

#include "tools/emulator/error.h"

namespace tiercel::emulator {
namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.' || c == ':';
}

int type_bits(const std::string& type) {
  if (type == "pred") return 1;
  size_t digit = type.find_first_of("0123456789");
  return digit == std::string::npos ? 0 : std::atoi(type.c_str() + digit);
}

// A text, read word by word; comments are spaces.
class Reader {
 public:
  Reader(const std::string& path, std::string_view text, size_t at, int line)
      : path_(path), text_(text), at_(at), line_(line) {}

  int line() const { return line_; }
  size_t at() const { return at_; }
  std::string_view text(size_t from) const { return text_.substr(from, at_ - from); }

  bool end() {
    skip();
    return at_ >= text_.size();
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected '") + c + "'");
  }
  // Letters, digits, _ $ % . and :: together; empty where something else comes.
  std::string word() {
    skip();
    const size_t from = at_;
    while (at_ < text_.size() && is_name(text_[at_])) {
      if (text_[at_] == ':') {
        if (at_ + 1 >= text_.size() || text_[at_ + 1] != ':') break;
        ++at_;
      }
      ++at_;
    }
    return std::string(text_.substr(from, at_ - from));
  }
  void skip_to(char c) {
    while (at_ < text_.size() && text_[at_] != c) line_ += text_[at_++] == '\n';
  }
  void skip_line() { skip_to('\n'); }
  [[noreturn]] void fail(const std::string& why) {
    size_t from = text_.rfind('\n', at_ < text_.size() ? at_ : text_.size() - 1);
    from = from == std::string_view::npos ? 0 : from + 1;
    const size_t to = text_.find('\n', from);
    throw EmulatorError(path_ + ":" + std::to_string(line_) + ": " + why + ": " +
                        std::string(text_.substr(from, to - from)));
  }

 private:
  void skip() {
    while (at_ < text_.size()) {
      if (text_[at_] == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        ++at_;
      } else if (text_.compare(at_, 2, "//") == 0) {
        skip_line();
      } else if (text_.compare(at_, 2, "/*") == 0) {
        const size_t to = text_.find("*/", at_);
        if (to == std::string_view::npos) fail("a comment without an end");
        for (; at_ < to + 2; ++at_) line_ += text_[at_] == '\n';
      } else {
        return;
      }
    }
  }

  const std::string& path_;
  std::string_view text_;
  size_t at_;
  int line_;
};

// After the state space: ".align 8 .b8 name[64] = {...}", up to and without the end.
PtxVariable read_variable(Reader& in, const std::string& space) {
  PtxVariable variable;
  variable.space = space;
  int element = 0, vector = 1;
  bool pointer = false;  // an alignment behind .ptr is not the parameter's, but of where it points
  std::string word = in.word();
  for (; !word.empty() && word[0] == '.'; word = in.word()) {
    if (word == ".align") {
      const uint64_t align = std::strtoull(in.word().c_str(), nullptr, 10);
      if (!pointer) variable.align = align;
    } else if (word == ".v2" || word == ".v4") {
      vector = word[2] - '0';
    } else if (word == ".ptr") {
      pointer = true;
    } else if (word == ".global" || word == ".shared" || word == ".const") {
      if (!pointer) in.fail("unknown attribute of a variable: " + word);
    } else if ((element = type_bits(word.substr(1)) / 8) == 0) {
      in.fail("unknown attribute of a variable: " + word);
    }
  }
  variable.name = word;
  variable.element_bytes = element;
  if (variable.align < static_cast<uint64_t>(element)) variable.align = element;
  uint64_t count = 1;
  while (in.take('[')) {
    const std::string size = in.word();
    count *= size.empty() ? 0 : std::strtoull(size.c_str(), nullptr, 10);
    in.expect(']');
  }
  variable.size = count * element * vector;
  if (in.take('=')) {
    const size_t from = in.at();
    in.skip_to(';');
    variable.initial = std::string(in.text(from));
  }
  return variable;
}

class FunctionReader {
 public:
  FunctionReader(Reader& in, PtxFunction& out) : in_(in), out_(out) {}

  void read() {
    in_.expect('{');
    open_scope();
    while (depth_ > 0) statement();
    resolve();
  }

 private:
  struct Scope {
    int parent;
    std::map<std::string, int> registers;
    std::map<std::string, int64_t> labels;
  };

  void open_scope() {
    scopes_.push_back({scope_, {}, {}});
    scope_ = static_cast<int>(scopes_.size()) - 1;
    ++depth_;
  }

  int find_register(const std::string& name) const {
    for (int s = scope_; s >= 0; s = scopes_[s].parent) {
      const auto found = scopes_[s].registers.find(name);
      if (found != scopes_[s].registers.end()) return found->second;
    }
    return -1;
  }

  void statement() {
    if (in_.end()) in_.fail("a function without an end");
    if (in_.take(';')) return;
    if (in_.take('{')) return open_scope();
    if (in_.take('}')) {
      scope_ = scopes_[scope_].parent;
      --depth_;
      return;
    }
    const int line = in_.line();
    if (in_.peek() == '@') return instruction(line, "");
    const size_t from = in_.at();
    const std::string word = in_.word();
    if (word.empty()) in_.fail("a statement is expected");
    if (word[0] == '.') return directive(word);
    if (in_.peek() == ':') {
      in_.take(':');
      scopes_[scope_].labels[word] = static_cast<int64_t>(out_.body.size());
      if (in_.peek() != '.') return;
      const std::string next = in_.word();
      return next == ".branchtargets" ? branch_list(word) : directive(next);
    }
    instruction(line, word, from);
  }

  void branch_list(const std::string& name) {
    do {
      lists_[name].push_back(in_.word());
    } while (in_.take(','));
    in_.expect(';');
    list_scopes_[name] = scope_;
  }

  void directive(const std::string& word) {
    if (word == ".reg") {
      const std::string type = in_.word();
      const int bits = type_bits(type.substr(1));
      if (bits == 0) in_.fail("unknown register type " + type);
      do {
        const std::string name = in_.word();
        if (in_.take('<')) {
          const int count = std::atoi(in_.word().c_str());
          in_.expect('>');
          for (int i = 0; i < count; ++i) add_register(name + std::to_string(i), bits);
        } else {
          add_register(name, bits);
        }
      } while (in_.take(','));
      in_.expect(';');
    } else if (word == ".shared" || word == ".local") {
      out_.variables.push_back(read_variable(in_, word.substr(1)));
      in_.expect(';');
    } else if (word == ".loc" || word == ".file") {
      in_.skip_line();
    } else if (word == ".pragma") {
      in_.skip_to(';');
    } else {
      in_.fail("unknown directive " + word);
    }
  }

  void add_register(const std::string& name, int bits) {
    scopes_[scope_].registers[name] = static_cast<int>(out_.registers.size());
    out_.registers.push_back({name, bits < 16 && bits > 1 ? 16 : bits});
  }

  void instruction(int line, std::string word, size_t from = 0) {
    PtxInstruction made;
    made.line = line;
    made.scope = scope_;
    if (word.empty()) {
      from = in_.at();
      in_.expect('@');
      made.guard_negated = in_.take('!');
      const std::string name = in_.word();
      made.guard = find_register(name);
      if (made.guard < 0) in_.fail("unknown predicate " + name);
      word = in_.word();
    }
    for (size_t at = 0; at <= word.size();) {
      const size_t dot = std::min(word.find('.', at), word.size());
      if (at == 0) {
        made.opcode = word.substr(0, dot);
      } else {
        made.modifiers.push_back(word.substr(at, dot - at));
      }
      at = dot + 1;
    }
    if (made.opcode == "call") {
      // call (out), name, (in, ...): the name is all that is kept.
      while (in_.peek() != ';') {
        if (in_.take('(')) {
          in_.skip_to(')');
          in_.expect(')');
        } else if (!in_.take(',')) {
          PtxOperand name;
          name.kind = PtxOperand::kSymbol;
          name.name = in_.word();
          if (name.name.empty()) in_.fail("a call that is not understood");
          made.operands.push_back(name);
        }
      }
    } else if (in_.peek() != ';') {
      do {
        made.operands.push_back(operand());
      } while (in_.take(','));
    }
    made.text = in_.text(from);
    in_.expect(';');
    out_.body.push_back(std::move(made));
  }

  PtxOperand operand() {
    PtxOperand made;
    if (in_.take('{')) {
      made.kind = PtxOperand::kVector;
      do {
        made.parts.push_back(operand());
      } while (in_.take(','));
      in_.expect('}');
      return made;
    }
    if (in_.take('[')) {
      made.kind = PtxOperand::kAddress;
      made.parts.push_back(operand());
      while (in_.take('+')) made.value += number(in_.take('-'));
      if (made.parts[0].kind == PtxOperand::kInteger) {
        made.value += made.parts[0].value;
        made.parts[0].value = 0;
      }
      while (in_.take(',')) made.parts.push_back(operand());
      in_.expect(']');
      return made;
    }
    if (in_.take('(')) in_.fail("a parenthesis");
    made.negated = in_.take('!');
    const bool minus = in_.take('-');
    const std::string word = in_.word();
    if (word.empty()) in_.fail("an operand is expected");
    if (std::isdigit(static_cast<unsigned char>(word[0]))) {
      literal(word, minus, made);
    } else if (minus) {
      in_.fail("a negated name");
    } else if (word == "_") {
      made.kind = PtxOperand::kSink;
    } else {
      name(word, made);
    }
    if (in_.peek() == '|') {
      in_.take('|');
      PtxOperand pair;
      pair.kind = PtxOperand::kPair;
      pair.parts = {made, operand()};
      return pair;
    }
    return made;
  }

  int64_t number(bool minus) {
    PtxOperand made;
    literal(in_.word(), minus, made);
    return made.value;
  }

  void literal(const std::string& word, bool minus, PtxOperand& made) {
    const char* end = word.c_str() + word.size();
    char* stop = nullptr;
    if (word.size() > 2 && word[0] == '0' && std::strchr("fFdD", word[1]) != nullptr) {
      made.kind = PtxOperand::kFloat;
      made.wide = word[1] == 'd' || word[1] == 'D';
      made.value = static_cast<int64_t>(std::strtoull(word.c_str() + 2, &stop, 16));
      if (stop != end || minus) in_.fail("a number that is not understood");
      return;
    }
    made.kind = PtxOperand::kInteger;
    const bool binary = word.size() > 2 && word[0] == '0' && (word[1] == 'b' || word[1] == 'B');
    uint64_t value =
        binary ? std::strtoull(word.c_str() + 2, &stop, 2) : std::strtoull(word.c_str(), &stop, 0);
    if (stop != end && std::strcmp(stop, "U") != 0) {
      if (word.find_first_of(".eE") == std::string::npos)
        in_.fail("a number that is not understood");
      double real = std::strtod(word.c_str(), &stop);
      if (minus) real = -real;
      made.kind = PtxOperand::kFloat;
      made.wide = true;
      std::memcpy(&made.value, &real, 8);
      return;
    }
    made.value = static_cast<int64_t>(minus ? 0 - value : value);
  }

  void name(const std::string& word, PtxOperand& made) {
    const int index = find_register(word);
    if (index >= 0) {
      made.kind = PtxOperand::kRegister;
      made.value = index;
    } else {
      made.kind = word[0] == '%' ? PtxOperand::kSpecial : PtxOperand::kSymbol;
    }
    made.name = word;
  }

  int64_t find_label(int scope, const std::string& name) const {
    for (int s = scope; s >= 0; s = scopes_[s].parent) {
      const auto found = scopes_[s].labels.find(name);
      if (found != scopes_[s].labels.end()) return found->second;
    }
    return -1;
  }

  void resolve() {
    for (PtxInstruction& made : out_.body) {
      for (PtxOperand& operand : made.operands) {
        if (operand.kind != PtxOperand::kSymbol) continue;
        const int64_t target = find_label(made.scope, operand.name);
        if (target < 0) continue;
        operand.kind = PtxOperand::kLabel;
        operand.value = target;
      }
    }
    for (const auto& [name, labels] : lists_) {
      for (const std::string& label : labels) {
        out_.branch_targets[name].push_back(find_label(list_scopes_[name], label));
        if (out_.branch_targets[name].back() < 0) in_.fail("no label " + label);
      }
    }
  }

  Reader& in_;
  PtxFunction& out_;
  std::vector<Scope> scopes_;
  std::map<std::string, std::vector<std::string>> lists_;
  std::map<std::string, int> list_scopes_;
  int scope_ = -1;
  int depth_ = 0;
};

}  // namespace

PtxModule::PtxModule(std::string path, std::string text)
    : path_(std::move(path)), text_(std::move(text)) {
  Reader in(path_, text_, 0, 1);
  bool is_extern = false;
  while (!in.end()) {
    const size_t at = in.at();
    const std::string word = in.word();
    if (word == ".entry" || word == ".func") {
      if (word == ".func" && in.peek() == '(') in.skip_to(')'), in.expect(')');
      const std::string name = in.word();
      if (word == ".entry") entries_[name] = at;
      // Its body, or nothing where it is only declared.
      while (!in.end() && in.peek() != '{' && in.peek() != ';')
        in.skip_to(in.peek()), in.take(in.peek());
      if (in.take(';')) continue;
      int depth = 0;
      do {
        if (in.take('{')) {
          ++depth;
        } else if (in.take('}')) {
          --depth;
        } else if (in.word().empty()) {
          in.take(in.peek());
        }
      } while (depth > 0 && !in.end());
      is_extern = false;
    } else if (word == ".extern") {
      is_extern = true;
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      variables_.push_back(read_variable(in, word.substr(1)));
      variables_.back().is_extern = is_extern;
      is_extern = false;
      in.expect(';');
    } else if (word == ".visible" || word == ".weak" || word == ".common") {
      is_extern = false;
    } else if (word == ".version" || word == ".target" || word == ".address_size" ||
               word == ".file" || word == ".loc") {
      in.skip_line();
    } else if (word == ".section") {
      in.skip_to('}');
      in.take('}');
    } else if (word.empty()) {
      in.fail("unknown text");
    } else {
      in.fail("unknown directive " + word);
    }
  }
}

std::unique_ptr<PtxFunction> PtxModule::parse(const std::string& entry) const {
  const size_t at = entries_.at(entry);
  int line = 1;
  for (size_t i = 0; i < at; ++i) line += text_[i] == '\n';
  Reader in(path_, text_, at, line);
  auto made = std::make_unique<PtxFunction>();
  in.word();
  made->name = in.word();
  made->line = in.line();
  if (in.take('(')) {
    uint64_t offset = kParamStart;
    while (!in.take(')')) {
      if (in.word() != ".param") in.fail("a parameter is expected");
      PtxVariable parameter = read_variable(in, "param");
      offset = (offset + parameter.align - 1) / parameter.align * parameter.align;
      parameter.offset = offset;
      offset += parameter.size;
      made->parameters.push_back(parameter);
      in.take(',');
    }
  }
  while (in.peek() != '{') {  // .maxntid 256, 1, 1 and the like
    const std::string word = in.word();
    if (word.empty() && !in.take(',')) in.fail("unknown text");
    if (word == ".minnctapersm") made->min_blocks = std::stoull(in.word());
    if (word == ".maxnreg") made->max_registers = std::stoull(in.word());
    if (word != ".maxntid" && word != ".reqntid") continue;
    made->max_threads = 1;
    do {
      made->max_threads *= std::strtoull(in.word().c_str(), nullptr, 10);
    } while (in.take(','));
  }
  FunctionReader(in, *made).read();
  return made;
}

}  // namespace tiercel::emulator
