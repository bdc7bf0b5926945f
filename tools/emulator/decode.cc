// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "tools/emulator/instruction.h"
#include "tools/emulator/state.h"

namespace tiercel::emulator {

namespace t {
const Type pred{'p', 1, "pred"}, b8{'b', 8, "b8"}, b16{'b', 16, "b16"}, b32{'b', 32, "b32"},
    b64{'b', 64, "b64"}, b128{'b', 128, "b128"}, u8{'u', 8, "u8"}, u16{'u', 16, "u16"},
    u32{'u', 32, "u32"}, u64{'u', 64, "u64"}, s8{'s', 8, "s8"}, s16{'s', 16, "s16"},
    s32{'s', 32, "s32"}, s64{'s', 64, "s64"}, f16{'h', 16, "f16"}, bf16{'g', 16, "bf16"},
    f16x2{'H', 32, "f16x2"}, bf16x2{'G', 32, "bf16x2"}, f32{'f', 32, "f32"}, f64{'f', 64, "f64"},
    u16x2{'x', 32, "u16x2"}, s16x2{'x', 32, "s16x2"}, e4m3x2{'x', 16, "e4m3x2"},
    e5m2x2{'x', 16, "e5m2x2"}, e2m1x2{'x', 8, "e2m1x2"}, ue8m0x2{'x', 16, "ue8m0x2"},
    tf32{'b', 32, "tf32"};
}

const Type* find_type(const std::string& name) {
  static const Type* const all[] = {
      &t::pred,  &t::b8,     &t::b16,    &t::b32,    &t::b64,     &t::b128, &t::u8,
      &t::u16,   &t::u32,    &t::u64,    &t::s8,     &t::s16,     &t::s32,  &t::s64,
      &t::f16,   &t::bf16,   &t::f16x2,  &t::bf16x2, &t::f32,     &t::f64,  &t::u16x2,
      &t::s16x2, &t::e4m3x2, &t::e5m2x2, &t::e2m1x2, &t::ue8m0x2, &t::tf32};
  for (const Type* type : all) {
    if (name == type->name) return type;
  }
  return nullptr;
}

namespace {

struct Registered {
  Decoder decoder;
  const char* when;
};

std::multimap<std::string, Registered>& opcodes() {
  static auto* const all = new std::multimap<std::string, Registered>;
  return *all;
}

int slot_bytes(int bits) { return bits <= 1 ? 4 : kLanes * (bits <= 32 ? 4 : bits / 8); }

Operand add_register(Kernel& kernel, int bits) {
  kernel.register_bytes = (kernel.register_bytes + 7) / 8 * 8;  // a predicate's slot has four bytes
  Operand made{kernel.register_bytes};
  kernel.register_bytes += slot_bytes(bits);
  return made;
}

}  // namespace

Opcode::Opcode(const char* name, Decoder decoder, const char* when) {
  opcodes().insert({name, {decoder, when}});
}

Decoder find_decoder(const PtxInstruction& ptx) {
  Decoder any = nullptr;
  const auto range = opcodes().equal_range(ptx.opcode);
  for (auto it = range.first; it != range.second; ++it) {
    const Registered& found = it->second;
    if (found.when == nullptr) {
      any = found.decoder;
    } else if (std::count(ptx.modifiers.begin(), ptx.modifiers.end(), found.when) != 0) {
      return found.decoder;
    }
  }
  return any;
}

Decode::Decode(Kernel& kernel, const PtxFunction& function, const PtxInstruction& ptx)
    : ptx(ptx), kernel_(kernel), function_(function), left_(ptx.modifiers) {}

bool Decode::take(const char* modifier) {
  const auto found = std::find(left_.begin(), left_.end(), modifier);
  if (found == left_.end()) return false;
  left_.erase(found);
  return true;
}

std::string Decode::take_one_of(std::initializer_list<const char*> modifiers) {
  for (const char* modifier : modifiers) {
    if (take(modifier)) return modifier;
  }
  return "";
}

bool Decode::has_type() const {
  return std::any_of(left_.begin(), left_.end(),
                     [](const std::string& word) { return find_type(word) != nullptr; });
}

Type Decode::type() {
  for (size_t i = 0; i < left_.size(); ++i) {
    if (const Type* found = find_type(left_[i])) {
      left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(i));
      return *found;
    }
  }
  fail("a type is missing");
}

Type Decode::type(std::initializer_list<Type> allowed) {
  const Type found = type();
  if (std::find(allowed.begin(), allowed.end(), found) == allowed.end()) {
    fail(std::string("type ") + found.name + " is not implemented here");
  }
  return found;
}

Space Decode::space() {
  if (take("global")) return Space::kGlobal;
  if (take("shared") || take("shared::cta")) return Space::kShared;
  if (take("shared::cluster")) return Space::kSharedCluster;
  if (take("local")) return Space::kLocal;
  if (take("const")) return Space::kConst;
  if (take("param") || take("param::entry")) return Space::kParam;
  return Space::kGeneric;
}

int Decode::vector_length() { return take("v2") ? 2 : take("v4") ? 4 : take("v8") ? 8 : 1; }

void Decode::take_cache_hints() {
  left_.erase(std::remove_if(left_.begin(), left_.end(),
                             [](const std::string& word) {
                               static const char* const kHints[] = {
                                   "ca",      "cg",      "cs",  "lu",   "cv",       "wb",
                                   "wt",      "nc",      "gpu", "cta",  "volatile", "relaxed",
                                   "acquire", "release", "sys", "weak", "cluster",  "acq_rel"};
                               return word.rfind("L1::", 0) == 0 || word.rfind("L2::", 0) == 0 ||
                                      std::find(std::begin(kHints), std::end(kHints), word) !=
                                          std::end(kHints);
                             }),
              left_.end());
}

std::vector<std::string> Decode::rest() const { return left_; }

void Decode::finish() const {
  if (!left_.empty()) fail("modifier ." + left_[0] + " is not implemented here");
}

const PtxOperand& Decode::operand(int i) const {
  if (i >= count()) fail("operand " + std::to_string(i) + " is missing");
  return ptx.operands[static_cast<size_t>(i)];
}

int Decode::register_bits(const PtxOperand& operand) const {
  return operand.kind == PtxOperand::kRegister
             ? function_.registers[static_cast<size_t>(operand.value)].bits
             : 0;
}

Operand Decode::destination(int i, const Type& type) { return destination(operand(i), type); }

Operand Decode::destination(const PtxOperand& operand, const Type& type) {
  if (operand.kind == PtxOperand::kSink) return scratch(type.bits);
  return operand.kind == PtxOperand::kRegister ? source(operand, type)
                                               : (fail("a register is expected"), Operand());
}

Operand Decode::source(int i, const Type& type) { return source(operand(i), type); }

Operand Decode::source(const PtxOperand& operand, const Type& type) {
  const auto constant = [&](uint64_t value) {
    return type.bits > 32 ? constant64(value) : constant32(static_cast<uint32_t>(value));
  };
  switch (operand.kind) {
    case PtxOperand::kRegister: {
      const int bits = register_bits(operand);
      const int wanted = type.bits == 8 ? 16 : type.bits;
      if (bits != wanted) {
        fail("register " + operand.name + " has " + std::to_string(bits) + " bits, not " +
             std::to_string(wanted));
      }
      return Operand{kernel_.register_offsets[static_cast<size_t>(operand.value)]};
    }
    case PtxOperand::kSpecial: {
      if (operand.name == "WARP_SZ") return constant(kLanes);
      Operand& slot = kernel_.specials[operand.name];
      const bool wide =
          operand.name == "%clock64" || operand.name == "%globaltimer" || operand.name == "%gridid";
      if (!slot.present()) slot = add_register(kernel_, wide ? 64 : 32);
      // A 16-bit read of a 32-bit one takes the low half: the same slot.
      if ((type.bits > 32) != wide) fail("special register of another size");
      return slot;
    }
    case PtxOperand::kInteger:
      if (type.kind == 'f' || type.kind == 'h' || type.kind == 'g') {
        fail("an integer where a floating-point number is expected");
      }
      return constant(static_cast<uint64_t>(operand.value));
    case PtxOperand::kFloat: {
      if (type.bits == 64 && operand.wide) return constant64(static_cast<uint64_t>(operand.value));
      if (type.bits != 32) fail("a number of another size");
      if (!operand.wide) return constant32(static_cast<uint32_t>(operand.value));
      double wide;
      std::memcpy(&wide, &operand.value, 8);
      const float narrow = static_cast<float>(wide);
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      return constant32(bits);
    }
    case PtxOperand::kSymbol: {
      for (const PtxVariable& parameter : function_.parameters) {
        if (parameter.name == operand.name) return constant(parameter.offset);
      }
      const auto local = kernel_.local_offsets.find(operand.name);
      if (local != kernel_.local_offsets.end()) return constant(local->second);
      const auto shared = kernel_.shared_offsets.find(operand.name);
      if (shared != kernel_.shared_offsets.end()) {
        // The rank of the block in its cluster is part of the address: a register, set at start.
        Operand& slot =
            kernel_.specials["&" + std::string(type.bits > 32 ? "64" : "32") + " " + operand.name];
        if (!slot.present()) slot = add_register(kernel_, type.bits);
        return slot;
      }
      const auto global = kernel_.globals->find(operand.name);
      if (global == kernel_.globals->end()) fail("unknown name " + operand.name);
      return constant64(global->second);
    }
    default:
      fail("an operand of another kind is expected");
  }
}

Operand Decode::predicate(int i) {
  const PtxOperand& found = operand(i);
  if (found.kind == PtxOperand::kSink) return scratch(1);
  if (found.kind == PtxOperand::kInteger) return constant32(found.value != 0 ? kAllLanes : 0);
  return source(found, t::pred);
}

Operand Decode::address(int i, int64_t* offset, bool* narrow) {
  return address(operand(i), offset, narrow);
}

Operand Decode::address(const PtxOperand& operand, int64_t* offset, bool* narrow) {
  if (operand.kind != PtxOperand::kAddress) fail("an address is expected");
  *offset = operand.value;
  const PtxOperand& base = operand.parts[0];
  *narrow = register_bits(base) == 32;
  return source(base, *narrow ? t::b32 : t::b64);
}

int64_t Decode::immediate(int i) const {
  if (operand(i).kind != PtxOperand::kInteger) fail("a number is expected");
  return operand(i).value;
}

void Decode::set_more(Instruction& out, const std::vector<Operand>& operands) {
  kernel_.more.push_back(operands);
  out.more = kernel_.more.back().data();
  out.more_count = static_cast<uint32_t>(operands.size());
}

Operand Decode::constant32(uint32_t value) {
  const auto [found, fresh] =
      kernel_.constants32.insert({value, static_cast<uint32_t>(kernel_.constants.size() * 4)});
  if (fresh) kernel_.constants.insert(kernel_.constants.end(), kLanes, value);
  return Operand{found->second | 0x80000000u};
}

Operand Decode::constant64(uint64_t value) {
  const auto [found, fresh] =
      kernel_.constants64.insert({value, static_cast<uint32_t>(kernel_.constants.size() * 4)});
  if (fresh) {
    for (int lane = 0; lane < kLanes; ++lane) {
      kernel_.constants.push_back(static_cast<uint32_t>(value));
      kernel_.constants.push_back(static_cast<uint32_t>(value >> 32));
    }
  }
  return Operand{found->second | 0x80000000u};
}

Operand Decode::scratch(int bits) { return add_register(kernel_, bits); }

void Decode::fail(const std::string& why) const {
  throw EmulatorError("the emulator does not know this instruction: " + why + "\n  " +
                      kernel_.module->path() + ":" + std::to_string(ptx.line) + ": " +
                      std::string(ptx.text) + "\n  in kernel " + kernel_.name);
}

namespace {

uint64_t align_up(uint64_t value, uint64_t align) { return (value + align - 1) / align * align; }

void place_variables(Kernel& kernel) {
  uint64_t shared = kSharedStart, local = 0;
  std::vector<std::string> dynamic;
  const auto place = [&](const PtxVariable& variable) {
    if (variable.space == "shared" && variable.is_extern) {
      dynamic.push_back(variable.name);
      kernel.dynamic_shared_align =
          std::max(kernel.dynamic_shared_align, static_cast<uint32_t>(variable.align));
    } else if (variable.space == "shared") {
      shared = align_up(shared, variable.align);
      kernel.shared_offsets[variable.name] = shared;
      shared += variable.size;
    } else if (variable.space == "local") {
      local = align_up(local, variable.align);
      kernel.local_offsets[variable.name] = local;
      local += variable.size;
    }
  };
  // Only those of the module that this kernel's text names: others are other kernels'.
  for (const PtxVariable& variable : kernel.module->variables()) {
    if (variable.space != "shared") continue;
    const auto names = [&](const PtxOperand& operand) {
      return operand.name == variable.name ||
             (!operand.parts.empty() && operand.parts[0].name == variable.name);
    };
    for (const PtxInstruction& made : kernel.ptx->body) {
      if (std::any_of(made.operands.begin(), made.operands.end(), names)) {
        place(variable);
        break;
      }
    }
  }
  for (const PtxVariable& variable : kernel.ptx->variables) place(variable);
  if (!dynamic.empty()) shared = align_up(shared, kernel.dynamic_shared_align);
  for (const std::string& name : dynamic) kernel.shared_offsets[name] = shared;
  kernel.static_shared = static_cast<uint32_t>(shared - kSharedStart);
  kernel.local_bytes = static_cast<uint32_t>(align_up(local, 16));
}

}  // namespace

std::unique_ptr<Kernel> decode_kernel(const PtxModule& module, const std::string& entry,
                                      std::map<std::string, uint64_t>* globals) {
  auto kernel = std::make_unique<Kernel>();
  kernel->name = entry;
  kernel->module = &module;
  kernel->globals = globals;
  kernel->ptx = module.parse(entry);
  if (!kernel->ptx->parameters.empty()) {
    const PtxVariable& last = kernel->ptx->parameters.back();
    kernel->parameter_bytes = static_cast<uint32_t>(last.offset + last.size);
  }
  place_variables(*kernel);
  for (const PtxRegister& made : kernel->ptx->registers) {
    kernel->register_offsets.push_back(add_register(*kernel, made.bits).bits);
  }
  for (const PtxInstruction& ptx : kernel->ptx->body) {
    Decode decode(*kernel, *kernel->ptx, ptx);
    Instruction made;
    made.line = ptx.line;
    if (ptx.guard >= 0) {
      made.guard = Operand{kernel->register_offsets[static_cast<size_t>(ptx.guard)]};
      made.guard_flip = ptx.guard_negated ? kAllLanes : 0;
    }
    const Decoder decoder = find_decoder(ptx);
    if (decoder == nullptr) decode.fail("unknown opcode " + ptx.opcode);
    decoder(decode, made);
    decode.finish();
    kernel->code.push_back(made);
  }
  return kernel;
}

}  // namespace tiercel::emulator
