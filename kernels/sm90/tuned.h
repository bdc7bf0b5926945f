// SPDX-License-Identifier: Apache-2.0
// Configurations that `tiercel tune apply` wrote for a device, and how an operator looks one up.
#ifndef KERNELS_SM90_TUNED_H_
#define KERNELS_SM90_TUNED_H_

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct TunedProblem {
  int device;
  DType dtype;
  std::array<int64_t, 4> sizes;  // in the op's order; zeros beyond those that it has
  bool operator<(const TunedProblem& other) const {
    return std::tie(device, dtype, sizes) < std::tie(other.device, other.dtype, other.sizes);
  }
};

// One op's configurations. Readers take no lock: a snapshot is never changed and never freed.
template <typename Config>
class TunedTable {
 public:
  using ByTokens = std::vector<std::pair<int64_t, Config>>;  // ascending
  using Problems = std::map<TunedProblem, ByTokens>;

  // Adds a device's problems, or replaces them; an empty map says that the device has been read.
  void set(int device, const Problems& problems) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Snapshot* old = current_.load();
    auto* next = old != nullptr ? new Snapshot(*old) : new Snapshot();
    next->devices[device] = true;
    for (const auto& [problem, configs] : problems) next->problems[problem] = configs;
    current_.store(next);
  }

  // The configuration of the nearest tuned token count, by ratio; null if the problem has none, or
  // none within a factor of two of `tokens`: a choice for 16 tokens says nothing about 4096.
  const Config* find(const TunedProblem& problem, int64_t tokens) {
    const Snapshot* table = current_.load(std::memory_order_acquire);
    if (table == nullptr) return nullptr;
    const auto found = table->problems.find(problem);
    if (found == table->problems.end()) {
      if (table->devices.count(problem.device) != 0) miss(problem);
      return nullptr;
    }
    const ByTokens& configs = found->second;
    if (configs.empty() || tokens > 2 * configs.back().first ||
        2 * tokens < configs.front().first) {
      return nullptr;
    }
    const Config* best = nullptr;
    double least = 0;
    for (const auto& [tuned, config] : configs) {
      const double apart =
          std::fabs(std::log(static_cast<double>(tuned) / static_cast<double>(tokens)));
      if (best == nullptr || apart < least) best = &config, least = apart;
    }
    return best;
  }

  // True once per process, after a problem without a file was looked up.
  bool take_miss(TunedProblem* problem) {
    if (state_.load(std::memory_order_relaxed) != kMissed) return false;
    int expected = kMissed;
    if (!state_.compare_exchange_strong(expected, kTold)) return false;
    *problem = missed_;
    return true;
  }

 private:
  struct Snapshot {
    Problems problems;
    std::map<int, bool> devices;
  };
  enum { kNone, kWriting, kMissed, kTold };

  void miss(const TunedProblem& problem) {
    if (state_.load(std::memory_order_relaxed) != kNone) return;
    int expected = kNone;
    if (!state_.compare_exchange_strong(expected, kWriting)) return;
    missed_ = problem;
    state_.store(kMissed);
  }

  std::mutex mutex_;
  std::atomic<const Snapshot*> current_{nullptr};
  std::atomic<int> state_{kNone};
  TunedProblem missed_{};
};

}  // namespace tiercel

#endif  // KERNELS_SM90_TUNED_H_
