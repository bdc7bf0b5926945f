// SPDX-License-Identifier: Apache-2.0
// Barriers of a block (bar, barrier) and of a cluster (barrier.cluster).
#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

// flags of the handlers.
enum Flag : uint32_t { kWaits = 1, kAligned = 2, kPopc = 4, kAnd = 8, kOr = 16 };

// Of warps that have not exited.
uint32_t threads_left(const Cta& cta) {
  uint32_t count = 0;
  for (const Warp& warp : cta.warps) count += warp.alive != 0 ? kLanes : 0;
  return count;
}

// Exited warps are not waited for by a barrier of the whole block.
bool complete(Cta& cta, CtaBarrier& barrier, bool whole) {
  const uint32_t expected = whole ? threads_left(cta) : barrier.expected;
  if (barrier.arrived < expected) return false;
  barrier.result_popc = barrier.red_popc;
  barrier.result_votes = barrier.red_votes;
  barrier.arrived = barrier.expected = barrier.red_popc = barrier.red_votes = 0;
  ++barrier.generation;
  return true;
}

// op: 0 result, 1 predicate, 2 number, 3 threads (where named)
Step bar(Warp& warp, const Instruction& in, Mask mask) {
  Cta& cta = *warp.cta;
  const int first = __builtin_ctz(mask);
  const uint32_t number = warp.in<uint32_t>(in.op[2])[first];
  if (number >= 16) throw EmulatorError("barrier " + std::to_string(number) + " of 16", first);
  CtaBarrier& barrier = cta.barriers[number];
  Group& group = *warp.group;
  const bool whole = !in.op[3].present();
  if (group.token == 0) {
    if ((in.flags & kAligned) != 0 && !warp.together(kAllLanes, mask)) return Step::kBlocked;
    const uint32_t threads = whole ? 0 : warp.in<uint32_t>(in.op[3])[first];
    if (!whole && (threads == 0 || threads % kLanes != 0)) {
      throw EmulatorError(
          "a barrier of " + std::to_string(threads) + " threads: it must be a multiple of 32",
          first);
    }
    if (barrier.arrived != 0 && barrier.expected != threads) {
      throw EmulatorError("barrier " + std::to_string(number) + " is waited for by " +
                              std::to_string(barrier.expected) + " and by " +
                              std::to_string(threads) + " threads",
                          first);
    }
    barrier.expected = threads;
    // A warp counts as a whole, however many lanes of it are left.
    barrier.arrived +=
        in.flags & kAligned ? kLanes : static_cast<uint32_t>(__builtin_popcount(mask));
    if (!whole && barrier.arrived > threads) {
      throw EmulatorError("more threads arrive at barrier " + std::to_string(number) + " than " +
                              std::to_string(threads),
                          first);
    }
    if (in.flags & (kPopc | kAnd | kOr)) {
      const Mask votes = (warp.predicate(in.op[1]) ^ static_cast<Mask>(in.imm)) & mask;
      barrier.red_popc += static_cast<uint32_t>(__builtin_popcount(votes));
      barrier.red_votes |= (votes != 0 ? 1u : 0u) | (votes != mask ? 2u : 0u);
    }
    group.token = barrier.generation + 1;
    complete(cta, barrier, whole);
    if (!(in.flags & kWaits)) {
      group.token = 0;
      return Step::kNext;
    }
  }
  if (barrier.generation < group.token && !complete(cta, barrier, whole)) return Step::kBlocked;
  group.token = 0;
  if (in.flags & kPopc) {
    for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int) { return barrier.result_popc; });
  } else if (in.flags & (kAnd | kOr)) {
    const bool truth =
        in.flags & kAnd ? (barrier.result_votes & 2) == 0 : (barrier.result_votes & 1) != 0;
    set_predicate(warp, in.op[0], truth ? kAllLanes : 0, mask);
  }
  return Step::kNext;
}

void decode_bar(Decode& d, Instruction& out) {
  d.take("cta");
  const bool reduces = d.take("red"), arrives = !reduces && d.take("arrive");
  if (!reduces && !arrives && !d.take("sync")) d.fail("an unknown barrier");
  out.flags =
      (arrives ? 0u : kWaits) | (d.take("aligned") || d.ptx.opcode == "bar" ? kAligned : 0u);
  int next = 0;
  if (reduces) {
    out.flags |= d.take("popc") ? kPopc : d.take("and") ? kAnd : kOr;
    if ((out.flags & kOr) != 0 && !d.take("or")) d.fail("an operation is missing");
    d.type({t::pred, t::u32});
    out.op[0] = out.flags & kPopc ? d.destination(0, t::b32) : d.predicate(0);
    next = 1;
  }
  out.op[2] = d.source(next++, t::b32);
  const int left = d.count() - next - (reduces ? 1 : 0);
  if (left > 0) out.op[3] = d.source(next++, t::b32);
  if (reduces) {
    out.op[1] = d.predicate(next);
    out.imm = d.negated(next) ? kAllLanes : 0;
  }
  if (arrives && !out.op[3].present()) d.fail("the number of threads is missing");
  out.run = bar;
}

// Threads that have not exited.
uint32_t alive(const Cluster& cluster) {
  uint32_t count = 0;
  for (const auto& cta : cluster.ctas) {
    for (const Warp& warp : cta->warps)
      count += static_cast<uint32_t>(__builtin_popcount(warp.alive));
  }
  return count;
}

void complete_cluster(Cluster& cluster) {
  if (cluster.barrier_arrived < alive(cluster)) return;
  cluster.barrier_arrived = 0;
  ++cluster.barrier_generation;
}

Step cluster_arrive(Warp& warp, const Instruction& in, Mask mask) {
  Cluster& cluster = *warp.cta->cluster;
  if ((in.flags & kAligned) != 0 && !warp.together(kAllLanes, mask)) return Step::kBlocked;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (warp.cluster_phase[i] != 0) {
      throw EmulatorError("a second barrier.cluster.arrive without a wait", i);
    }
    warp.cluster_phase[i] = cluster.barrier_generation + 1;
    ++cluster.barrier_arrived;
  }
  complete_cluster(cluster);
  return Step::kNext;
}

Step cluster_wait(Warp& warp, const Instruction& in, Mask mask) {
  Cluster& cluster = *warp.cta->cluster;
  if ((in.flags & kAligned) != 0 && !warp.together(kAllLanes, mask)) return Step::kBlocked;
  complete_cluster(cluster);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (warp.cluster_phase[i] == 0) {
      throw EmulatorError("barrier.cluster.wait without an arrive", i);
    }
    if (cluster.barrier_generation < warp.cluster_phase[i]) return Step::kBlocked;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (mask >> i & 1) warp.cluster_phase[i] = 0;
  }
  return Step::kNext;
}

void decode_cluster_barrier(Decode& d, Instruction& out) {
  d.take("cluster");
  const bool arrives = d.take("arrive");
  if (!arrives && !d.take("wait")) d.fail("an unknown barrier");
  d.take("acquire"), d.take("release"), d.take("relaxed");
  out.flags = d.take("aligned") ? uint32_t{kAligned} : 0;
  out.run = arrives ? cluster_arrive : cluster_wait;
}

const Opcode opcodes[] = {
    {"bar", decode_bar},
    {"barrier", decode_bar},
    {"barrier", decode_cluster_barrier, "cluster"},
};

}  // namespace
}  // namespace tiercel::emulator
