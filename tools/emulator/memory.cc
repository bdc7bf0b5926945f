// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/memory.h"

#include <algorithm>
#include <cstdio>

#include "tools/emulator/state.h"

namespace tiercel::emulator {
namespace {

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

[[noreturn]] void refuse(const char* kind, bool write, uint32_t size, const char* space,
                         uint64_t address, const std::string& why, int lane) {
  throw EmulatorError(std::string(kind) + (write ? " write" : " read") + " of " +
                          std::to_string(size) + " bytes at " + space + " address " + hex(address) +
                          (why.empty() ? "" : ": " + why),
                      lane);
}

uint8_t* resolve_global(Warp& warp, uint64_t address, uint32_t size, int lane, bool write) {
  MemoryCache& cache = warp.cache;
  if (address < cache.begin || address + size > cache.end) {
    const Allocations& all = *warp.cta->cluster->launch->allocations;
    const Allocation* found = all.find(address);
    if (found == nullptr || address + size > found->end) {
      refuse("out-of-bounds", write, size, "global", address, all.describe(address), lane);
    }
    cache = {found->begin, found->end, found->read_only};
  }
  if (write && cache.read_only) {
    refuse("forbidden", write, size, "global", address, "that memory is read-only", lane);
  }
  return reinterpret_cast<uint8_t*>(address);
}

}  // namespace

void Allocations::add(uint64_t begin, uint64_t size, const std::string& name, bool read_only) {
  const Allocation made{begin, begin + size, name, read_only};
  const auto at =
      std::lower_bound(sorted_.begin(), sorted_.end(), begin,
                       [](const Allocation& one, uint64_t value) { return one.begin < value; });
  if (at != sorted_.end() && at->begin == begin) {
    *at = made;
  } else {
    sorted_.insert(at, made);
  }
}

void Allocations::remove(uint64_t begin) {
  sorted_.erase(std::remove_if(sorted_.begin(), sorted_.end(),
                               [&](const Allocation& one) { return one.begin == begin; }),
                sorted_.end());
}

const Allocation* Allocations::find(uint64_t address) const {
  const auto after =
      std::upper_bound(sorted_.begin(), sorted_.end(), address,
                       [](uint64_t value, const Allocation& one) { return value < one.begin; });
  return after == sorted_.begin() ? nullptr : &*(after - 1);
}

std::string Allocations::describe(uint64_t address) const {
  if (sorted_.empty()) return "no memory is registered";
  const Allocation* best = nullptr;
  uint64_t distance = UINT64_MAX;
  for (const Allocation& one : sorted_) {
    const uint64_t away = address < one.begin ? one.begin - address : address - one.end;
    if (address >= one.begin && address < one.end) {
      return std::to_string(one.end - address) + " bytes before the end of " + one.name;
    }
    if (away < distance) distance = away, best = &one;
  }
  return std::to_string(distance) + " bytes " + (address < best->begin ? "before " : "after ") +
         best->name + " of " + std::to_string(best->end - best->begin) + " bytes";
}

uint8_t* Cluster::shared(uint64_t address, uint64_t size, int lane) {
  const uint64_t rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1);
  if (rank >= ctas.size() || offset < kSharedStart ||
      offset + size > kSharedStart + ctas[rank]->shared.size()) {
    throw EmulatorError("out-of-bounds access of " + std::to_string(size) +
                            " bytes at shared address " + hex(address) + ": the block has " +
                            std::to_string(launch->shared_bytes) + " bytes from " +
                            hex(kSharedStart) + ", the cluster " + std::to_string(ctas.size()) +
                            " blocks",
                        lane);
  }
  if (ctas[rank]->exited) {
    throw EmulatorError("access to the shared memory of block " + std::to_string(rank) +
                            " of the cluster, which has ended",
                        lane);
  }
  return ctas[rank]->shared.data() + (offset - kSharedStart);
}

Space split_generic(uint64_t generic, uint64_t* address) {
  *address = generic & ~kWindowMask;
  switch (generic & kWindowMask) {
    case kSharedWindow:
      return Space::kSharedCluster;
    case kLocalWindow:
      return Space::kLocal;
    case kParamWindow:
      return Space::kParam;
    default:
      *address = generic;
      return Space::kGlobal;
  }
}

uint8_t* resolve(Warp& warp, Space space, uint64_t address, uint32_t size, int lane, bool write) {
  if (address % size != 0) {
    refuse("misaligned", write, size, space == Space::kGlobal ? "global" : "this", address, "",
           lane);
  }
  if (space == Space::kGeneric) space = split_generic(address, &address);
  switch (space) {
    case Space::kGlobal:
    case Space::kConst:
      return resolve_global(warp, address, size, lane, write);
    case Space::kShared: {
      Cta& cta = *warp.cta;
      const uint64_t at = address - (uint64_t{cta.rank} << kRankShift) - kSharedStart;
      if (at + size > cta.shared.size() || at > cta.shared.size()) {
        cta.cluster->shared(address, size, lane);
        refuse("forbidden", write, size, "shared", address, "it is another block's", lane);
      }
      return cta.shared.data() + at;
    }
    case Space::kSharedCluster:
      return warp.cta->cluster->shared(address, size, lane);
    case Space::kLocal: {
      const uint32_t bytes = warp.cta->cluster->launch->kernel->local_bytes;
      if (address + size > bytes) {
        refuse("out-of-bounds", write, size, "local", address,
               "a thread has " + std::to_string(bytes) + " bytes", lane);
      }
      return warp.local.data() + static_cast<size_t>(lane) * bytes + address;
    }
    case Space::kParam: {
      std::vector<uint8_t>& all = warp.cta->cluster->launch->parameters;
      if (write || address + size > all.size()) {
        refuse(write ? "forbidden" : "out-of-bounds", write, size, "parameter", address,
               "the kernel has " + std::to_string(all.size()) + " bytes of parameters", lane);
      }
      return all.data() + address;
    }
    default:
      refuse("unknown", write, size, "this", address, "", lane);
  }
}

}  // namespace tiercel::emulator
