// SPDX-License-Identifier: Apache-2.0
// ld, st, cp.async, discard, and what is done to addresses.
#include <algorithm>

#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

// flags of the handlers: the space, and whether addresses are 32 bits.
constexpr uint32_t kNarrow = 0x100;

inline uint64_t address_of(const Warp& warp, Operand base, bool narrow, int64_t offset, int lane) {
  return narrow ? static_cast<uint32_t>(warp.in<uint32_t>(base)[lane] + offset)
                : warp.in<uint64_t>(base)[lane] + static_cast<uint64_t>(offset);
}

inline uint64_t address_of(const Warp& warp, const Instruction& in, int lane) {
  return address_of(warp, in.op[5], (in.flags & kNarrow) != 0, in.imm, lane);
}

Space space_of(const Instruction& in) { return static_cast<Space>(in.flags & 0xff); }

// op[5]: address; `more`: the elements' registers.
template <typename Memory, typename Register>
Step load(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t count = in.more_count, size = count * sizeof(Memory);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint8_t* from = resolve(warp, space_of(in), address_of(warp, in, i), size, i, false);
    for (uint32_t k = 0; k < count; ++k) {
      Memory value;
      std::memcpy(&value, from + k * sizeof(Memory), sizeof(Memory));
      warp.out<Register>(in.more[k])[i] = static_cast<Register>(value);
    }
  }
  return Step::kNext;
}

template <typename Memory, typename Register>
Step store(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t count = in.more_count, size = count * sizeof(Memory);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint8_t* to = resolve(warp, space_of(in), address_of(warp, in, i), size, i, true);
    for (uint32_t k = 0; k < count; ++k) {
      const Memory value = static_cast<Memory>(warp.in<Register>(in.more[k])[i]);
      std::memcpy(to + k * sizeof(Memory), &value, sizeof(Memory));
    }
  }
  return Step::kNext;
}

// 128-bit registers: halves one after the other.
template <bool write>
Step access128(Warp& warp, const Instruction& in, Mask mask) {
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint8_t* at = resolve(warp, space_of(in), address_of(warp, in, i), 16, i, write);
    for (int half = 0; half < 2; ++half) {
      uint64_t* lane = const_cast<uint64_t*>(warp.in<uint64_t>(in.more[0])) + half * kLanes + i;
      if (write) {
        std::memcpy(at + half * 8, lane, 8);
      } else {
        std::memcpy(lane, at + half * 8, 8);
      }
    }
  }
  return Step::kNext;
}

template <typename Memory>
Handler load_to(int register_bits) {
  return register_bits == 64 ? load<Memory, uint64_t> : load<Memory, uint32_t>;
}
template <typename Memory>
Handler store_from(int register_bits) {
  return register_bits == 64 ? store<Memory, uint64_t> : store<Memory, uint32_t>;
}

void set_address(Decode& d, int i, Space space, Instruction& out) {
  bool narrow = false;
  out.op[5] = d.address(i, &out.imm, &narrow);
  if (narrow && space == Space::kGlobal) d.fail("a global address of 32 bits");
  out.flags = static_cast<uint32_t>(space) | (narrow ? kNarrow : 0);
}

// Registers may be wider than the elements.
int set_elements(Decode& d, const PtxOperand& operand, const Type& type, int count, bool read,
                 Instruction& out) {
  std::vector<PtxOperand> parts = operand.parts;
  if (operand.kind != PtxOperand::kVector) parts = {operand};
  if (static_cast<int>(parts.size()) != count) d.fail("a vector of another length");
  int bits = 0;
  for (const PtxOperand& part : parts) bits = std::max(bits, d.register_bits(part));
  const Type* wide = &type;
  if (bits > std::max(type.bits, 16)) wide = bits == 32 ? &t::b32 : &t::b64;
  std::vector<Operand> all;
  for (const PtxOperand& part : parts) {
    all.push_back(read ? d.destination(part, *wide) : d.source(part, *wide));
  }
  d.set_more(out, all);
  return wide->bits;
}

// Who reads what others may write meanwhile may ask again: others run first.
template <Step (*kRun)(Warp&, const Instruction&, Mask)>
Step then_yield(Warp& warp, const Instruction& in, Mask mask) {
  kRun(warp, in, mask);
  return Step::kYield;
}

void decode_ld(Decode& d, Instruction& out) {
  const bool acquires = d.take("acquire"), relaxed = d.take("relaxed");
  const Space space = d.space();
  d.take_cache_hints();
  const int count = d.vector_length();
  const Type type = d.type();
  set_address(d, 1, space, out);
  const int bits = set_elements(d, d.operand(0), type, count, true, out);
  const bool word = type.bits == 32 && bits == 32;
  if (acquires && !word) d.fail("ld.acquire of other than 32 bits");
  if (acquires || (relaxed && word)) {
    out.run = then_yield<load<uint32_t, uint32_t>>;
    return;
  }
  switch (type.bits) {
    case 8:
      out.run = type.is_signed() ? load_to<int8_t>(bits) : load_to<uint8_t>(bits);
      return;
    case 16:
      out.run = type.is_signed() ? load_to<int16_t>(bits) : load_to<uint16_t>(bits);
      return;
    case 32:
      out.run = type.is_signed() ? load_to<int32_t>(bits) : load_to<uint32_t>(bits);
      return;
    case 64:
      out.run = load<uint64_t, uint64_t>;
      return;
    default:
      if (count != 1) d.fail("a vector of 128-bit elements");
      out.run = access128<false>;
  }
}

void decode_st(Decode& d, Instruction& out) {
  const Space space = d.space();
  d.take_cache_hints();
  const int count = d.vector_length();
  const Type type = d.type();
  set_address(d, 0, space, out);
  const int bits = set_elements(d, d.operand(1), type, count, false, out);
  switch (type.bits) {
    case 8:
      out.run = store_from<uint8_t>(bits);
      return;
    case 16:
      out.run = store_from<uint16_t>(bits);
      return;
    case 32:
      out.run = store_from<uint32_t>(bits);
      return;
    case 64:
      out.run = store<uint64_t, uint64_t>;
      return;
    default:
      if (count != 1) d.fail("a vector of 128-bit elements");
      out.run = access128<true>;
  }
}

// cp.async.{ca,cg}.shared.global [to], [from], size{, source size}
Step cp_async(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t size = static_cast<uint32_t>(in.flags >> 16);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint64_t to_address = address_of(warp, in, i);
    const uint64_t from_address = address_of(warp, in.op[1], false, 0, i) +
                                  static_cast<uint64_t>(warp.in<uint64_t>(in.op[2])[i]);
    uint32_t real = size;
    if (in.op[3].present()) real = warp.in<uint32_t>(in.op[3])[i];
    if (in.op[4].present() && (warp.predicate(in.op[4]) >> i & 1)) real = 0;  // ignore-src
    if (real > size) throw EmulatorError("cp.async of more bytes than it writes", i);
    uint8_t* to = resolve(warp, Space::kShared, to_address, size, i, true);
    if (from_address % size != 0) {
      throw EmulatorError("misaligned source of cp.async: " + std::to_string(from_address), i);
    }
    const uint8_t* from = nullptr;
    if (real != 0) {
      from = resolve(warp, Space::kGlobal, from_address, 1, i, false);
      resolve(warp, Space::kGlobal, from_address + real - 1, 1, i, false);
    }
    const auto copy = [to, from, size, real] {
      if (real != 0) std::memcpy(to, from, real);
      std::memset(to + real, 0, size - real);
    };
    if (warp.cta->cluster->launch->options.lazy) {
      warp.copies.push_back({warp.copy_groups[i], i, copy});
    } else {
      copy();
    }
  }
  return Step::kNext;
}

Step commit_group(Warp& warp, const Instruction&, Mask mask) {
  for (int i = 0; i < kLanes; ++i) warp.copy_groups[i] += mask >> i & 1;
  return Step::kNext;
}

// All but the newest imm committed groups of each lane; imm < 0: everything.
Step wait_group(Warp& warp, const Instruction& in, Mask mask) {
  std::vector<LaneCopy> left;
  for (LaneCopy& one : warp.copies) {
    const bool done = (mask >> one.lane & 1) != 0 &&
                      (in.imm < 0 || one.group + in.imm < warp.copy_groups[one.lane]);
    if (done) {
      one.run();
    } else {
      left.push_back(std::move(one));
    }
  }
  warp.copies = std::move(left);
  return Step::kNext;
}

void decode_cp_async(Decode& d, Instruction& out) {
  if (!d.take("async")) d.fail("an unknown cp");
  if (d.take("commit_group")) {
    out.run = commit_group;
  } else if (d.take("wait_group")) {
    out.run = wait_group;
    out.imm = d.immediate(0);
  } else if (d.take("wait_all")) {
    out.run = wait_group;
    out.imm = -1;
  } else {
    d.take_cache_hints();
    if (!(d.take("shared") || d.take("shared::cta")) || !d.take("global")) {
      d.fail("another direction");
    }
    const int64_t size = d.immediate(2);
    if (size != 4 && size != 8 && size != 16) d.fail("a copy of another size");
    set_address(d, 0, Space::kShared, out);
    out.flags |= static_cast<uint32_t>(size) << 16;
    int64_t offset = 0;
    bool narrow = false;
    out.op[1] = d.address(1, &offset, &narrow);
    if (narrow) d.fail("a global address of 32 bits");
    out.op[2] = d.constant64(static_cast<uint64_t>(offset));
    if (d.count() > 3) {
      const bool ignore =
          d.operand(3).kind == PtxOperand::kRegister && d.register_bits(d.operand(3)) == 1;
      if (ignore) {
        out.op[4] = d.predicate(3);
      } else if (d.count() == 4) {
        out.op[3] = d.source(3, t::b32);
      } else {
        d.fail("a cache policy");
      }
    }
    out.run = cp_async;
  }
}

// cvta: between an address of a space and its generic one. imm: the window.
template <bool to_space>
Step cvta(Warp& warp, const Instruction& in, Mask mask) {
  const uint64_t* a = warp.in<uint64_t>(in.op[1]);
  const uint64_t window = static_cast<uint64_t>(in.imm);
  for_lanes(mask, warp.out<uint64_t>(in.op[0]), [&](int i) {
    return to_space ? (window != 0 ? a[i] & ~kWindowMask : a[i]) : a[i] + window;
  });
  return Step::kNext;
}

Step cvta_narrow(Warp& warp, const Instruction& in, Mask mask) {  // 32-bit shared to generic
  const uint32_t* a = warp.in<uint32_t>(in.op[1]);
  for_lanes(mask, warp.out<uint64_t>(in.op[0]),
            [&](int i) { return a[i] + static_cast<uint64_t>(in.imm); });
  return Step::kNext;
}

uint64_t window_of(Decode& d, Space space) {
  switch (space) {
    case Space::kShared:
    case Space::kSharedCluster:
      return kSharedWindow;
    case Space::kLocal:
      return kLocalWindow;
    case Space::kParam:
      return kParamWindow;
    case Space::kGlobal:
    case Space::kConst:
      return 0;
    default:
      d.fail("a space is missing");
  }
}

void decode_cvta(Decode& d, Instruction& out) {
  const bool to_space = d.take("to");
  out.imm = static_cast<int64_t>(window_of(d, d.space()));
  d.type({t::u64});
  const bool narrow = d.register_bits(d.operand(1)) == 32;
  out.op[0] = d.destination(0, t::b64), out.op[1] = d.source(1, narrow ? t::b32 : t::b64);
  if (narrow && to_space) d.fail("a generic address of 32 bits");
  out.run = narrow ? cvta_narrow : to_space ? cvta<true> : cvta<false>;
}

Step isspacep(Warp& warp, const Instruction& in, Mask mask) {
  const uint64_t* a = warp.in<uint64_t>(in.op[1]);
  const Mask value =
      collect([&](int i) { return (a[i] & kWindowMask) == static_cast<uint64_t>(in.imm); });
  set_predicate(warp, in.op[0], value, mask);
  return Step::kNext;
}

void decode_isspacep(Decode& d, Instruction& out) {
  const Space space = d.space();
  if (space == Space::kShared) d.fail("shared::cta in a cluster");
  out.imm = static_cast<int64_t>(window_of(d, space));
  out.op[0] = d.predicate(0), out.op[1] = d.source(1, t::b64);
  out.run = isspacep;
}

// mapa: the same place in another block of the cluster.
template <typename T>
Step mapa(Warp& warp, const Instruction& in, Mask mask) {
  const T* a = warp.in<T>(in.op[1]);
  const uint32_t* rank = warp.in<uint32_t>(in.op[2]);
  const size_t blocks = warp.cta->cluster->ctas.size();
  const T clear = static_cast<T>(~(uint64_t{0xff} << kRankShift));
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (rank[i] >= blocks) {
      throw EmulatorError(
          "mapa to block " + std::to_string(rank[i]) + " of a cluster of " + std::to_string(blocks),
          i);
    }
    warp.out<T>(in.op[0])[i] = (a[i] & clear) | static_cast<T>(rank[i]) << kRankShift;
  }
  return Step::kNext;
}

void decode_mapa(Decode& d, Instruction& out) {
  d.space();
  const Type type = d.type({t::u32, t::u64});
  operands(d, out, type, type, 1);
  out.op[2] = d.source(2, t::b32);
  out.run = type.bits == 64 ? mapa<uint64_t> : mapa<uint32_t>;
}

template <typename T>
Step getctarank(Warp& warp, const Instruction& in, Mask mask) {
  const T* a = warp.in<T>(in.op[1]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]),
            [&](int i) { return static_cast<uint32_t>(a[i] >> kRankShift & 0xff); });
  return Step::kNext;
}

void decode_getctarank(Decode& d, Instruction& out) {
  d.space();
  const Type type = d.type({t::u32, t::u64});
  operands(d, out, t::b32, type, 1);
  out.run = type.bits == 64 ? getctarank<uint64_t> : getctarank<uint32_t>;
}

// discard.global.L2 [a], 128: what was there is undefined from here on.
Step run_discard(Warp& warp, const Instruction& in, Mask mask) {
  constexpr uint32_t kLine = 128;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint64_t address = address_of(warp, in, i);
    if (address % kLine != 0) {
      throw EmulatorError("discard of what is not a line: " + std::to_string(address), i);
    }
    for (uint32_t at = 0; at < kLine; at += 16) {
      std::memset(resolve(warp, Space::kGlobal, address + at, 16, i, true), 0xff, 16);
    }
  }
  return Step::kNext;
}

void decode_discard(Decode& d, Instruction& out) {
  if (d.space() != Space::kGlobal || !d.take("L2")) d.fail("a discard of other than global.L2");
  set_address(d, 0, Space::kGlobal, out);
  if (d.immediate(1) != 128) d.fail("a discard of other than 128 bytes");
  out.run = run_discard;
}

const Opcode opcodes[] = {
    {"ld", decode_ld},           {"ldu", decode_ld},
    {"st", decode_st},           {"cp", decode_cp_async},
    {"cvta", decode_cvta},       {"isspacep", decode_isspacep},
    {"mapa", decode_mapa},       {"getctarank", decode_getctarank},
    {"discard", decode_discard},
};

}  // namespace
}  // namespace tiercel::emulator
