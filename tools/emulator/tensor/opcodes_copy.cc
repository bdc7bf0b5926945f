// SPDX-License-Identifier: Apache-2.0
// cp.async.bulk, cp.async.bulk.tensor and cp.reduce.async.bulk(.tensor), their groups and
// prefetches.
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tools/emulator/tensor/bulk_copy.h"
#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/opcodes_vector.h"
#include "tools/emulator/tensor/tensor_state.h"

namespace tiercel::emulator {
namespace {

struct Address {
  Operand base;
  int64_t offset = 0;
  bool narrow = false;
};

// A decoded copy: into, out of, or within shared memory.
struct Copy {
  bool tensor, to_global, from_global, multicast;
  int rank;  // of the tensor
  Operand coordinates[kLargestRank];
  Address to, from, barrier;  // of a tensor, the global side is its map
  Operand size, mask;
  Reduction reduction;
  uint32_t type;  // of the reduction of plain bytes, as CUtensorMapDataType
  int line;
};

uint32_t shared_side(Warp& warp, const Address& address, int lane) {
  return shared_address(warp, address.base, address.narrow, address.offset, lane);
}

uint64_t generic_side(Warp& warp, const Address& address, int lane) {
  return warp.in<uint64_t>(address.base)[lane] + static_cast<uint64_t>(address.offset);
}

TensorMap read_map(Warp& warp, const Address& address, int lane) {
  const uint64_t at = generic_side(warp, address, lane);
  uint8_t bytes[128];
  for (int half = 0; half < 2; ++half)
    std::memcpy(
        bytes + 64 * half,
        resolve(warp, Space::kGeneric, at + 64 * static_cast<uint64_t>(half), 64, lane, false), 64);
  return decode_tensor_map(bytes);
}

// Adds where a copy was asked for to what is wrong with it when it happens.
void complete_later(Warp& warp, const Copy& copy, int lane, std::function<void()> body) {
  const Cta& cta = *warp.cta;
  std::string where = " (copy of PTX line " + std::to_string(copy.line) + ", by warp " +
                      std::to_string(warp.index) + " lane " + std::to_string(lane) + " of block (" +
                      std::to_string(cta.index.x) + ", " + std::to_string(cta.index.y) + ", " +
                      std::to_string(cta.index.z) + ") of kernel " +
                      cta.cluster->launch->kernel->name + ")";
  cta.cluster->add([body = std::move(body), where = std::move(where)] {
    try {
      body();
    } catch (const EmulatorError& error) {
      throw EmulatorError(error.what() + where);
    }
  });
}

// Blocks of the cluster that a load writes to.
std::vector<uint32_t> targets(Warp& warp, const Copy& copy, uint32_t address, int lane) {
  if (!copy.multicast) return {address >> kRankShift};
  const uint32_t mask = warp.in<uint32_t>(copy.mask)[lane] & 0xffff;
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < 16; ++rank)
    if (mask >> rank & 1) ranks.push_back(rank);
  if (ranks.empty() || ranks.back() >= warp.cta->cluster->ctas.size())
    fault("cp.async.bulk: the multicast mask 0x%x does not fit a cluster of %zu blocks", mask,
          warp.cta->cluster->ctas.size());
  return ranks;
}

void signal(Cluster& cluster, uint32_t rank, uint32_t barrier, uint32_t bytes, int lane) {
  mbarrier_at(cluster, rank << kRankShift | (barrier & kOffsetMask), lane).complete_tx(bytes);
}

void load(Warp& warp, const Copy& copy, int lane) {
  Cluster& cluster = *warp.cta->cluster;
  const uint32_t to = shared_side(warp, copy.to, lane);
  const uint32_t barrier = shared_side(warp, copy.barrier, lane);
  std::vector<uint32_t> ranks = targets(warp, copy, to, lane);
  std::function<void(uint32_t)> move;
  uint32_t bytes = 0;
  if (copy.tensor) {
    const TensorMap map = read_map(warp, copy.from, lane);
    if (map.rank != copy.rank)
      fault("cp.async.bulk.tensor.%dd with a tensor map of %d dimensions", copy.rank, map.rank);
    check_tile(map, to & kOffsetMask);
    bytes = map.box_bytes();
    int32_t at[kLargestRank] = {};
    for (int i = 0; i < copy.rank; ++i) at[i] = warp.in<int32_t>(copy.coordinates[i])[lane];
    move = [&cluster, map, to, c0 = at[0], c1 = at[1], c2 = at[2], c3 = at[3],
            c4 = at[4]](uint32_t rank) {
      const int32_t coordinates[] = {c0, c1, c2, c3, c4};
      load_tile(memory_of(cluster), map, coordinates, rank, to & kOffsetMask);
    };
  } else {
    bytes = warp.in<uint32_t>(copy.size)[lane];
    const uint64_t from =
        copy.from_global ? generic_side(warp, copy.from, lane) : shared_side(warp, copy.from, lane);
    check_bulk(to, from, bytes);
    move = [&cluster, to, from, bytes, global = copy.from_global](uint32_t rank) {
      ClusterMemory& memory = memory_of(cluster);
      const auto source = static_cast<uint32_t>(from);
      const uint8_t* data =
          global ? memory.global(from, bytes, Access::read)
                 : memory.shared(source >> kRankShift, source & kOffsetMask, bytes, Access::read);
      std::memcpy(memory.shared(rank, to & kOffsetMask, bytes, Access::write), data, bytes);
    };
  }
  complete_later(
      warp, copy, lane, [&cluster, move, ranks, bytes, barrier, lane, multicast = copy.multicast] {
        for (const uint32_t rank : ranks) {
          move(rank);
          signal(cluster, multicast ? rank : barrier >> kRankShift, barrier, bytes, lane);
        }
      });
}

void store(Warp& warp, const Copy& copy, int lane) {
  Cluster& cluster = *warp.cta->cluster;
  const uint32_t from = shared_side(warp, copy.from, lane);
  if (from >> kRankShift != warp.cta->rank) fault("cp.async.bulk: the source is another block's");
  const uint32_t rank = warp.cta->rank, offset = from & kOffsetMask;
  std::function<void()> done = tensor_state(warp).bulk[lane].add();
  if (copy.tensor) {
    const TensorMap map = read_map(warp, copy.to, lane);
    if (map.rank != copy.rank)
      fault("cp.async.bulk.tensor.%dd with a tensor map of %d dimensions", copy.rank, map.rank);
    check_tile(map, offset);
    std::vector<int32_t> at(kLargestRank);
    for (int i = 0; i < copy.rank; ++i) at[i] = warp.in<int32_t>(copy.coordinates[i])[lane];
    complete_later(warp, copy, lane,
                   [&cluster, map, at, rank, offset, done, reduction = copy.reduction] {
                     store_tile(memory_of(cluster), map, at.data(), rank, offset, reduction);
                     done();
                   });
    return;
  }
  const uint32_t bytes = warp.in<uint32_t>(copy.size)[lane];
  const uint64_t to = generic_side(warp, copy.to, lane);
  check_bulk(to, offset, bytes);
  complete_later(
      warp, copy, lane,
      [&cluster, to, rank, offset, bytes, done, type = copy.type, reduction = copy.reduction] {
        ClusterMemory& memory = memory_of(cluster);
        const uint8_t* data = memory.shared(rank, offset, bytes, Access::read);
        reduce_bytes(type, reduction, memory.global(to, bytes, Access::write), data, bytes);
        done();
      });
}

Step run_copy(Warp& warp, const Instruction& in, Mask mask) {
  const auto& copy = *static_cast<const Copy*>(kept(in));
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    try {
      copy.to_global ? store(warp, copy, lane) : load(warp, copy, lane);
    } catch (const EmulatorError& error) {
      throw EmulatorError(error.what(), lane);
    }
  }
  return Step::kNext;
}

// Fetches nothing; what a copy could not read is an error here too.
Step run_prefetch(Warp& warp, const Instruction& in, Mask mask) {
  const auto& copy = *static_cast<const Copy*>(kept(in));
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint64_t from = generic_side(warp, copy.from, lane);
    const uint32_t bytes = warp.in<uint32_t>(copy.size)[lane];
    try {
      check_bulk(0, from, bytes);
      if (bytes != 0) memory_of(*warp.cta->cluster).global(from, bytes, Access::read);
    } catch (const EmulatorError& error) {
      throw EmulatorError(error.what(), lane);
    }
  }
  return Step::kNext;
}

Step run_commit(Warp& warp, const Instruction&, Mask mask) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) tensor_state(warp).bulk[lane].commit();
  return Step::kNext;
}

Step run_wait(Warp& warp, const Instruction& in, Mask mask) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1 && !tensor_state(warp).bulk[lane].done(static_cast<uint32_t>(in.imm)))
      return Step::kBlocked;
  return Step::kNext;
}

Step run_nothing(Warp&, const Instruction&, Mask) { return Step::kNext; }

Address address_of(Decode& d, int i) {
  Address address;
  address.base = d.address(i, &address.offset, &address.narrow);
  return address;
}

void tensor_operand(Decode& d, Copy& copy, int i, Address* address) {
  const PtxOperand& operand = d.operand(i);
  *address = address_of(d, i);
  if (operand.parts.size() != 2) d.fail("coordinates are expected");
  const PtxOperand& at = operand.parts[1];
  const bool vector = at.kind == PtxOperand::kVector;
  if ((vector ? at.parts.size() : 1) != static_cast<size_t>(copy.rank))
    d.fail("another number of coordinates");
  for (int k = 0; k < copy.rank; ++k)
    copy.coordinates[k] = d.source(vector ? at.parts[static_cast<size_t>(k)] : at, t::b32);
}

Reduction take_reduction(Decode& d) {
  const std::string name = d.take_one_of({"add", "min", "max", "and", "or", "xor"});
  return name == "add"   ? Reduction::add
         : name == "min" ? Reduction::min
         : name == "max" ? Reduction::max
         : name == "and" ? Reduction::bit_and
         : name == "or"  ? Reduction::bit_or
         : name == "xor" ? Reduction::bit_xor
                         : (d.fail("a reduction is missing"), Reduction::none);
}

// The numbers of CUtensorMapDataType.
uint32_t take_reduced_type(Decode& d) {
  d.take("noftz");
  const std::string name = d.type().name;
  static const char* const names[] = {"u8",  "u16", "u32", "s32", "u64",
                                      "s64", "f16", "f32", "f64", "bf16"};
  for (uint32_t i = 0; i < sizeof names / sizeof *names; ++i)
    if (name == names[i]) return i;
  return name == "b32" ? 2 : name == "b64" ? 4 : (d.fail("type " + name), 0);
}

void decode_copy(Decode& d, Instruction& out, bool reduce) {
  auto copy = std::make_shared<Copy>();
  copy->line = d.ptx.line;
  copy->tensor = d.take("tensor");
  if (copy->tensor) {
    const std::string rank = d.take_one_of({"1d", "2d", "3d", "4d", "5d"});
    if (rank.empty()) d.fail("a number of dimensions is missing");
    copy->rank = rank[0] - '0';
    d.take("tile");
  }
  copy->multicast = d.take("multicast::cluster");
  const bool barrier = d.take("mbarrier::complete_tx::bytes");
  const bool group = d.take("bulk_group");
  d.take("L2::cache_hint");
  // Destination first, then source.
  const std::vector<std::string> rest = d.rest();
  const auto is_space = [](const std::string& word) {
    return word == "global" || word.rfind("shared::", 0) == 0;
  };
  std::vector<std::string> spaces;
  for (const std::string& word : rest)
    if (is_space(word)) spaces.push_back(word);
  if (spaces.size() != 2) d.fail("a destination's and a source's space are expected");
  for (const std::string& space : spaces) d.take(space.c_str());
  copy->to_global = spaces[0] == "global";
  copy->from_global = spaces[1] == "global";
  if (copy->to_global ? (copy->from_global || !group) : (!barrier || reduce))
    d.fail("this direction or way of completion is not implemented");
  if (reduce) {
    copy->reduction = take_reduction(d);
    if (!copy->tensor) copy->type = take_reduced_type(d);
  }

  int next = 2;
  if (copy->tensor && copy->to_global) {
    tensor_operand(d, *copy, 0, &copy->to);
    copy->from = address_of(d, 1);
  } else {
    copy->to = address_of(d, 0);
    if (copy->tensor)
      tensor_operand(d, *copy, 1, &copy->from);
    else
      copy->from = address_of(d, 1);
    if (!copy->tensor) copy->size = d.source(next++, t::b32);
    if (!copy->to_global) copy->barrier = address_of(d, next++);
  }
  if (copy->multicast) copy->mask = d.source(next++, t::b16);
  const bool global = copy->tensor || copy->to_global || copy->from_global;
  if (global && (copy->to_global ? copy->to : copy->from).narrow)
    d.fail("an address of 64 bits is expected on the global side");
  keep(d, out, copy);
  out.run = run_copy;
}

void decode_bulk(Decode& d, Instruction& out) {
  d.take("async");
  d.take("bulk");
  if (d.take("commit_group")) {
    out.run = run_commit;
  } else if (d.take("wait_group")) {
    d.take("read");  // both wait for all of the copy
    out.imm = d.immediate(0);
    out.run = run_wait;
  } else if (d.take("prefetch")) {
    const bool tensor = d.take("tensor");
    for (const std::string& word : d.rest()) d.take(word.c_str());
    out.run = run_nothing;
    if (tensor) return;
    auto copy = std::make_shared<Copy>();
    copy->from = address_of(d, 0);
    copy->size = d.source(1, t::b32);
    keep(d, out, copy);
    out.run = run_prefetch;
  } else {
    decode_copy(d, out, d.take("reduce"));
  }
}
const Opcode bulk_opcode("cp", decode_bulk, "bulk");

}  // namespace
}  // namespace tiercel::emulator
