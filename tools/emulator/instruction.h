// SPDX-License-Identifier: Apache-2.0
// The decoded form that the interpreter runs, and how an opcode comes to be decoded.
//
// To add an opcode: write `Step handler(Warp&, const Instruction&, Mask)` that does it for all
// lanes of the mask, and a decoder that chooses the handler by the modifiers and fills the
// operands, and register the decoder by the opcode's first word (see opcodes_integer.cc for short
// ones):
//
//   void decode_brev(Decode& d, Instruction& out) {
//     const Type type = d.type({t::b32, t::b64});          // takes the type modifier
//     out.op[0] = d.destination(0, type);
//     out.op[1] = d.source(1, type);
//     out.run = type.bits == 32 ? brev<uint32_t> : brev<uint64_t>;
//   }                                                // modifiers that nobody took are an error
//   const Opcode brev_opcode("brev", decode_brev);
#ifndef TOOLS_EMULATOR_INSTRUCTION_H_
#define TOOLS_EMULATOR_INSTRUCTION_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "tools/emulator/error.h"
#include "tools/emulator/ptx.h"

namespace tiercel::emulator {

using Mask = uint32_t;  // bit i: lane i
inline constexpr int kLanes = 32;
inline constexpr Mask kAllLanes = 0xffffffffu;

struct Warp;
struct Instruction;

enum class Step : uint8_t {
  kNext,     // done
  kYield,    // done, and another warp should run: a poll that failed
  kBlocked,  // not done: the lanes stay here and the same handler runs again later
  kControl,  // done, and the handler has set the warp's groups itself (branches, exits)
};
using Handler = Step (*)(Warp&, const Instruction&, Mask);

// Where 32 lanes' values lie: in the warp's registers or among the kernel's constants.
// A predicate is one Mask; up to 32 bits, uint32_t[32] (16-bit values in the low half, the high
// half undefined); 64 bits, uint64_t[32]; 128 bits, two of those, low halves first.
struct Operand {
  uint32_t bits = 0xffffffffu;  // bit 31: constant; else a byte offset
  bool present() const { return bits != 0xffffffffu; }
};

struct Instruction {
  Handler run = nullptr;
  Operand op[6];            // by convention op[0] is the destination
  Operand guard;            // a predicate
  Mask guard_flip = 0;      // all ones for @!p
  int32_t line = 0;         // in the PTX file
  int64_t imm = 0;          // free for the handler: an offset, a target
  uint32_t flags = 0;       // free for the handler
  uint32_t more_count = 0;  // more operands than fit above: vectors, matrices' fragments
  const Operand* more = nullptr;
};

struct Type {
  char kind =
      0;  // 'b', 'u', 's', 'f', 'p' (predicate), 'h' (f16), 'g' (bf16), 'H'/'G' (x2), or 'x'
  int bits = 0;
  const char* name = "";  // "bf16x2"
  bool operator==(const Type& o) const { return std::string(name) == o.name; }
  bool is_float() const { return kind == 'f' || kind == 'h' || kind == 'g'; }
  bool is_signed() const { return kind == 's'; }
};
// The types of PTX, as t::u32.
namespace t {
extern const Type pred, b8, b16, b32, b64, b128, u8, u16, u32, u64, s8, s16, s32, s64, f16, bf16,
    f16x2, bf16x2, f32, f64, u16x2, s16x2, e4m3x2, e5m2x2, e2m1x2, ue8m0x2, tf32;
}
const Type* find_type(const std::string& name);

// Where an address lies, by its type modifier.
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kConst, kParam };

struct Kernel;

// One instruction on its way to its decoded form.
class Decode {
 public:
  Decode(Kernel& kernel, const PtxFunction& function, const PtxInstruction& ptx);

  const PtxInstruction& ptx;

  // Modifiers are taken in any order; finish() refuses what is left.
  bool take(const char* modifier);
  // The first of these that is there, or "".
  std::string take_one_of(std::initializer_list<const char*> modifiers);
  // Takes the next (leftmost) modifier that is a type.
  Type type();
  bool has_type() const;
  // As above, and refuses others than these.
  Type type(std::initializer_list<Type> allowed);
  Space space();            // generic where there is none
  int vector_length();      // v2, v4, v8; 1
  void take_cache_hints();  // L1::..., L2::..., .ca, .cs, .nc, .volatile, .relaxed, scopes
  std::vector<std::string> rest() const;
  void finish() const;

  int count() const { return static_cast<int>(ptx.operands.size()); }
  const PtxOperand& operand(int i) const;

  // A register of the type's size, or (destination only) `_` as a register that nobody reads.
  Operand destination(int i, const Type& type);
  Operand destination(const PtxOperand& operand, const Type& type);
  // A register, special register, symbol's address or immediate.
  Operand source(int i, const Type& type);
  Operand source(const PtxOperand& operand, const Type& type);
  Operand predicate(int i);  // as source or destination; negation: see negated(i)
  bool negated(int i) const { return operand(i).negated; }
  // The address in operand i: a 64-bit operand (32-bit registers are of shared or local memory and
  // `narrow` says so) and the constant added to it.
  Operand address(int i, int64_t* offset, bool* narrow);
  Operand address(const PtxOperand& operand, int64_t* offset, bool* narrow);
  int64_t immediate(int i) const;
  int register_bits(const PtxOperand& operand) const;  // 0 where it is no register
  // Lasting storage for Instruction::more.
  void set_more(Instruction& out, const std::vector<Operand>& operands);
  Operand constant32(uint32_t value);
  Operand constant64(uint64_t value);
  Operand scratch(int bits);  // a register of its own

  Kernel& kernel() { return kernel_; }
  [[noreturn]] void fail(const std::string& why) const;

 private:
  Kernel& kernel_;
  const PtxFunction& function_;
  std::vector<std::string> left_;
};

using Decoder = void (*)(Decode&, Instruction&);

// Registers a decoder by the opcode's first word ("cp" for cp.async...: look at the modifiers, and
// let Opcode's `when` tell several decoders of one word apart).
class Opcode {
 public:
  // `when`: the modifier that must be there ("bulk", "try_wait"); nullptr: all other cases.
  Opcode(const char* name, Decoder decoder, const char* when = nullptr);
};
Decoder find_decoder(const PtxInstruction& ptx);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_INSTRUCTION_H_
