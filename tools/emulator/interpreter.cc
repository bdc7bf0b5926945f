// SPDX-License-Identifier: Apache-2.0
// The loop: which group of which warp runs next, until a launch is done or cannot go on.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "tools/emulator/state.h"

namespace tiercel::emulator {

// special_registers.cc
void fill_specials(const Launch& launch, Warp& warp);

namespace {

constexpr uint64_t kSlice = 4096;       // instructions of a warp before the next one's turn
constexpr int kMaxIdlePasses = 20'000;  // polls in vain by all warps before it is a deadlock
// With a seed, after so many a copy completes though not all wait for one: slices that it cuts
// short look busy where they only poll.
constexpr int kBusyPasses = 64;
constexpr uint32_t kMaxPollLength = 48;  // instructions of a loop that only polls

std::string hex(Mask mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

std::string place(const Kernel& kernel, uint32_t pc) {
  if (pc >= kernel.ptx->body.size()) return "the end of the kernel";
  const PtxInstruction& ptx = kernel.ptx->body[pc];
  return kernel.module->path() + ":" + std::to_string(ptx.line) + ": " + std::string(ptx.text);
}

std::string text_of(const Dim& dim) {
  return "(" + std::to_string(dim.x) + ", " + std::to_string(dim.y) + ", " + std::to_string(dim.z) +
         ")";
}

std::string thread_text(const Launch& launch, const Warp& warp, int lane) {
  const uint32_t thread = warp.index * kLanes + static_cast<uint32_t>(lane);
  const Dim& block = launch.block;
  return text_of({thread % block.x, thread / block.x % block.y, thread / block.x / block.y});
}

[[noreturn]] void rethrow(const Launch& launch, const Warp& warp, const EmulatorError& error) {
  const int lane = error.lane >= 0 ? error.lane : warp.active ? __builtin_ctz(warp.active) : 0;
  throw EmulatorError("kernel " + launch.kernel->name + ", block " + text_of(warp.cta->index) +
                      ", thread " + thread_text(launch, warp, lane) + ": " + error.what() +
                      "\n  at " + place(*launch.kernel, warp.pc));
}

// Lanes at the same instruction go on together.
void merge(Warp& warp) {
  std::vector<Group>& groups = warp.groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = i + 1; j < groups.size();) {
      const bool empty = groups[j].mask == 0;
      if (empty || (groups[i].pc == groups[j].pc && groups[i].token == 0 && groups[j].token == 0 &&
                    groups[i].mask != 0)) {
        groups[i].mask |= groups[j].mask;
        if (!empty) groups[i].blocked = false;
        groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(j));
      } else {
        ++j;
      }
    }
  }
  if (!groups.empty() && groups[0].mask == 0) groups.erase(groups.begin());
}

struct Slice {
  uint64_t executed = 0;
  bool polled = false;
};

class WarpRun {
 public:
  WarpRun(Launch& launch, Warp& warp) : launch_(launch), warp_(warp) {}

  Slice run(uint64_t budget) {
    for (Group& group : warp_.groups) group.blocked = false;
    while (slice_.executed < budget) {
      uint32_t limit = UINT32_MAX;
      const size_t chosen = choose(&limit);
      if (chosen == SIZE_MAX) return slice_;
      run_group(chosen, limit, budget);
    }
    warp_.high_first = warp_.groups.size() > 1 && !warp_.high_first;
    return slice_;
  }

 private:
  // The lowest one that can run: lanes that fell behind catch up and join.
  size_t choose(uint32_t* limit) {
    if (warp_.groups.size() > 1) merge(warp_);
    size_t chosen = SIZE_MAX;
    for (size_t i = 0; i < warp_.groups.size(); ++i) {
      const Group& group = warp_.groups[i];
      if (group.blocked || group.mask == 0) continue;
      const bool before =
          chosen == SIZE_MAX || (warp_.high_first ? group.pc > warp_.groups[chosen].pc
                                                  : group.pc < warp_.groups[chosen].pc);
      if (before) chosen = i;
    }
    if (chosen == SIZE_MAX) return chosen;
    for (const Group& group : warp_.groups) {
      if (group.pc > warp_.groups[chosen].pc) *limit = std::min(*limit, group.pc);
    }
    return chosen;
  }

  void run_group(size_t chosen, uint32_t limit, uint64_t budget) {
    const Instruction* const code = launch_.kernel->code.data();
    const uint32_t end = static_cast<uint32_t>(launch_.kernel->code.size());
    warp_.group = &warp_.groups[chosen];
    warp_.active = warp_.group->mask;
    uint32_t pc = warp_.group->pc;
    uint64_t executed = slice_.executed;
    for (; executed < budget; ++executed) {
      warp_.pc = pc;
      if (pc >= end) throw EmulatorError("the kernel ends without ret");
      const Instruction& in = code[pc];
      Mask mask = warp_.active;
      if (in.guard.present()) {
        mask &= *warp_.in<Mask>(in.guard) ^ in.guard_flip;
        if (mask == 0) {
          if (++pc == limit) break;
          continue;
        }
      }
      const Step step = in.run(warp_, in, mask);
      if (step == Step::kNext) {
        if (++pc == limit) {
          ++executed;
          break;
        }
        continue;
      }
      if (step == Step::kYield) {
        warp_.group->pc = pc + 1;
        warp_.group->blocked = true;  // until the next slice
        const bool again = std::count(std::begin(warp_.polled_at), std::end(warp_.polled_at), pc);
        slice_.polled = again && executed - slice_.executed <= kMaxPollLength;
        if (!again) warp_.polled_at[warp_.polls++ % std::size(warp_.polled_at)] = pc;
        ++executed;
      } else if (step == Step::kBlocked) {
        warp_.group->pc = pc;
        warp_.group->blocked = true;
        if (mask != warp_.active) {
          warp_.group->mask = mask;
          warp_.groups.push_back({pc + 1, warp_.active & ~mask, false, 0});
        }
      } else {
        ++executed;
      }
      slice_.executed = executed;
      return;
    }
    warp_.group->pc = pc;
    slice_.executed = executed;
  }

  Launch& launch_;
  Warp& warp_;
  Slice slice_;
};

// Clusters that run at the same time: one, or all of a cooperative launch.
class ClustersRun {
 public:
  ClustersRun(Launch& launch, std::vector<Cluster>& clusters)
      : launch_(launch), clusters_(clusters) {}

  void run() {
    for (Cluster& cluster : clusters_) {
      for (std::unique_ptr<Cta>& cta : cluster.ctas) {
        for (Warp& warp : cta->warps) order_.push_back(&warp);
      }
    }
    int idle_passes = 0, busy_passes = 0;
    while (!order_.empty()) {
      const Pass pass = run_all();
      order_.erase(std::remove_if(order_.begin(), order_.end(),
                                  [](const Warp* warp) { return warp->alive == 0; }),
                   order_.end());
      if (!pass.idle) {
        idle_passes = 0;
        if (launch_.options.seed != 0 && ++busy_passes % kBusyPasses == 0) complete_one();
      } else if (complete_one()) {
        idle_passes = 0;
      } else if (!order_.empty() && (!pass.executed || ++idle_passes > kMaxIdlePasses)) {
        deadlock();
      }
    }
    while (complete_one()) {
    }
  }

 private:
  struct Pass {
    bool idle = true;
    bool executed = false;
  };

  // Of what was to complete later: the first, or with a seed any, since copies are not ordered
  // among each other.
  bool complete_one() {
    size_t all = 0;
    for (const Cluster& cluster : clusters_) all += cluster.async.size();
    if (all == 0) return false;
    size_t chosen = launch_.options.seed != 0 ? launch_.next_random() % all : 0;
    auto cluster = clusters_.begin();
    for (; chosen >= cluster->async.size(); ++cluster) chosen -= cluster->async.size();
    const auto place = cluster->async.begin() + static_cast<std::ptrdiff_t>(chosen);
    AsyncWork work = std::move(*place);
    cluster->async.erase(place);
    work.complete();
    return true;
  }

  Pass run_all() {
    Pass pass;
    if (launch_.options.seed != 0) {
      for (size_t i = order_.size(); i > 1; --i) {
        std::swap(order_[i - 1], order_[launch_.next_random() % i]);
      }
    }
    for (Warp* warp : order_) {
      const uint64_t budget = launch_.options.seed != 0 ? 1 + launch_.next_random() % 64 : kSlice;
      Slice slice;
      try {
        slice = WarpRun(launch_, *warp).run(budget);
      } catch (const EmulatorError& error) {
        rethrow(launch_, *warp, error);
      }
      launch_.instructions += slice.executed;
      pass.executed |= slice.executed != 0;
      if (slice.executed != 0 && !slice.polled) pass.idle = false;
      Cta& cta = *warp->cta;
      if (warp->alive == 0) {
        cta.exited = std::all_of(cta.warps.begin(), cta.warps.end(),
                                 [](const Warp& one) { return one.alive == 0; });
        // The next grid's wait ends with this grid, and must not end before the previous one.
        if (cta.exited && launch_.dependent && !cta.waited) {
          throw EmulatorError("kernel " + launch_.kernel->name + ", block " + text_of(cta.index) +
                              ": a dependent grid's block ends without griddepcontrol.wait");
        }
      }
    }
    if (launch_.instructions > launch_.options.max_instructions) {
      throw EmulatorError("kernel " + launch_.kernel->name + " ran " +
                          std::to_string(launch_.instructions) +
                          " warp instructions, more than allowed; its warps are at" + places());
    }
    return pass;
  }

  // Where the warps are, the same place once.
  std::string places() const {
    std::string text;
    int shown = 0;
    for (const Warp* warp : order_) {
      for (const Group& group : warp->groups) {
        if (group.mask == 0) continue;
        if (++shown > 40) return text + "\n  ...";
        text += "\n  block " + text_of(warp->cta->index) + " warp " + std::to_string(warp->index) +
                " lanes " + hex(group.mask) + ": " + place(*launch_.kernel, group.pc);
      }
    }
    return text;
  }

  [[noreturn]] void deadlock() const {
    throw EmulatorError("kernel " + launch_.kernel->name + " is deadlocked" + short_of_registers() +
                        "; its warps wait at" + places());
  }

  bool waits_for_registers(const Group& group) const {
    const std::vector<PtxInstruction>& body = launch_.kernel->ptx->body;
    return group.pc < body.size() && body[group.pc].opcode == "setmaxnreg";
  }

  std::string short_of_registers() const {
    const Kernel& kernel = *launch_.kernel;
    for (const Warp* warp : order_) {
      for (const Group& group : warp->groups) {
        if (group.mask == 0 || !waits_for_registers(group)) continue;
        const int64_t wanted = kernel.code[group.pc].imm - warp->machine_registers;
        return ": setmaxnreg waits for " + std::to_string(wanted) + " more registers a thread, " +
               std::to_string(warp->cta->free_registers) + " are free, and a block starts with " +
               std::to_string(kernel.launch_registers) + " for each of its " +
               std::to_string(warp->cta->warps.size()) + " warps";
      }
    }
    return "";
  }

  Launch& launch_;
  std::vector<Cluster>& clusters_;
  std::vector<Warp*> order_;
};

void start_warp(const Launch& launch, Cta& cta, uint32_t index, Warp& warp) {
  const Kernel& kernel = *launch.kernel;
  const uint64_t threads = launch.block.count() - uint64_t{index} * kLanes;
  warp.cta = &cta;
  warp.index = index;
  warp.machine_registers = kernel.launch_registers;
  warp.alive = threads >= kLanes ? kAllLanes : (1u << threads) - 1;
  warp.groups.assign(1, Group{0, warp.alive, false, 0});
  warp.registers.resize(kernel.register_bytes / 8 + 1);
  warp.local.resize(size_t{kernel.local_bytes} * kLanes);
  warp.base[0] = reinterpret_cast<uint8_t*>(warp.registers.data());
  warp.base[1] = reinterpret_cast<uint8_t*>(const_cast<uint32_t*>(kernel.constants.data()));
  std::fill(std::begin(warp.cluster_phase), std::end(warp.cluster_phase), 0);
  std::fill(std::begin(warp.copy_groups), std::end(warp.copy_groups), 0);
  warp.copies.clear();
  warp.tensor_state.reset();
  std::fill(std::begin(warp.polled_at), std::end(warp.polled_at), 0);
  warp.high_first = false;
  fill_specials(launch, warp);
}

// Blocks x fastest; those of a cluster are neighbours.
void start_cluster(Launch& launch, uint64_t number, Cluster& cluster) {
  const Dim clusters{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                     launch.grid.z / launch.cluster.z};
  const Dim first{static_cast<uint32_t>(number % clusters.x) * launch.cluster.x,
                  static_cast<uint32_t>(number / clusters.x % clusters.y) * launch.cluster.y,
                  static_cast<uint32_t>(number / clusters.x / clusters.y) * launch.cluster.z};
  cluster.launch = &launch;
  cluster.barrier_arrived = 0;
  cluster.barrier_generation = 0;
  cluster.tensor_state.reset();
  cluster.async.clear();
  cluster.ctas.resize(launch.cluster.count());
  for (uint32_t rank = 0; rank < cluster.ctas.size(); ++rank) {
    if (!cluster.ctas[rank]) cluster.ctas[rank] = std::make_unique<Cta>();
    Cta& cta = *cluster.ctas[rank];
    cta.cluster = &cluster;
    cta.rank = rank;
    cta.exited = false;
    cta.waited = false;
    cta.free_registers = 0;
    cta.index = {first.x + rank % launch.cluster.x,
                 first.y + rank / launch.cluster.x % launch.cluster.y,
                 first.z + rank / launch.cluster.x / launch.cluster.y};
    cta.shared.assign(launch.shared_bytes, 0xff);  // NaN in every format: who reads it, sees it
    std::fill(std::begin(cta.barriers), std::end(cta.barriers), CtaBarrier());
    cta.tensor_state.reset();
    cta.warps.resize((launch.block.count() + kLanes - 1) / kLanes);
    for (uint32_t i = 0; i < cta.warps.size(); ++i) start_warp(launch, cta, i, cta.warps[i]);
  }
}

}  // namespace

uint64_t Launch::next_random() {  // splitmix64
  uint64_t z = random += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void Cluster::add(std::function<void()> complete) {
  if (!launch->options.lazy) {
    complete();
  } else {
    async.push_back({std::move(complete)});
  }
}

void run_launch(Launch& launch) {
  launch.random = launch.options.seed;
  const uint64_t clusters = launch.grid.count() / launch.cluster.count();
  std::vector<Cluster> together(launch.cooperative ? clusters : 1);
  for (uint64_t i = 0; i < clusters; i += together.size()) {
    for (size_t j = 0; j < together.size(); ++j) start_cluster(launch, i + j, together[j]);
    ClustersRun(launch, together).run();
  }
}

}  // namespace tiercel::emulator
