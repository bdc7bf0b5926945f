// SPDX-License-Identifier: Apache-2.0
// PTX text as a parsed form, with names resolved and nothing interpreted yet.
#ifndef TOOLS_EMULATOR_PTX_H_
#define TOOLS_EMULATOR_PTX_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tiercel::emulator {

struct PtxRegister {
  std::string name;
  int bits;  // 1 for a predicate; 16, 32, 64, 128
};

struct PtxOperand {
  enum Kind {
    kRegister,  // value: index into PtxFunction::registers
    kSpecial,   // name: "%tid.x"
    kInteger,   // value
    kFloat,     // value: the bits; `wide` for 0d...
    kSymbol,    // name: a variable, parameter or function; a label until it is resolved
    kLabel,     // value: index of an instruction
    kAddress,   // parts[0]: register, symbol or integer; value: offset; parts[1..]: coordinates
    kVector,    // parts
    kPair,      // parts: p|q
    kSink,      // _
  };
  Kind kind = kSink;
  bool negated = false;  // !p
  bool wide = false;
  int64_t value = 0;
  std::string name;
  std::vector<PtxOperand> parts;
};

struct PtxInstruction {
  std::string opcode;                  // "mbarrier"
  std::vector<std::string> modifiers;  // "try_wait", "shared::cta", "b64"
  int guard = -1;                      // a predicate register
  bool guard_negated = false;
  std::vector<PtxOperand> operands;
  int line = 0;           // in the PTX file
  int scope = 0;          // for labels
  std::string_view text;  // for messages
};

struct PtxVariable {
  std::string space;  // "global", "const", "shared", "local", "param"
  std::string name;
  uint64_t size = 0;
  uint64_t align = 1;
  bool is_extern = false;  // .extern .shared: the dynamic shared memory
  uint64_t offset = 0;     // parameters, and where a function's own variables were placed
  std::string initial;     // the text after '=', if any
  int element_bytes = 1;
};

// Where parameters begin in their bank on this machine, which their alignment counts from.
inline constexpr uint64_t kParamStart = 0x210;

struct PtxFunction {
  std::string name;
  int line = 0;
  uint64_t max_threads = 0;    // of a block; 0: not said
  uint64_t min_blocks = 1;     // .minnctapersm
  uint64_t max_registers = 0;  // .maxnreg; 0: not said
  std::vector<PtxVariable> parameters;
  std::vector<PtxVariable> variables;  // .shared and .local of this function
  std::vector<PtxRegister> registers;
  std::vector<PtxInstruction> body;
  std::map<std::string, std::vector<int64_t>> branch_targets;  // brx.idx's lists, as instructions
};

// A file. Entries are found at once, their bodies parsed when asked for: a family's file is long
// and a test launches few of its kernels.
class PtxModule {
 public:
  // Throws EmulatorError.
  PtxModule(std::string path, std::string text);

  const std::map<std::string, size_t>& entries() const { return entries_; }
  std::unique_ptr<PtxFunction> parse(const std::string& entry) const;
  const std::vector<PtxVariable>& variables() const { return variables_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_, text_;
  std::map<std::string, size_t> entries_;  // name -> place of ".entry"
  std::vector<PtxVariable> variables_;     // of the module
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_PTX_H_
