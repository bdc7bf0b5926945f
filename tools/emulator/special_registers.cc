// SPDX-License-Identifier: Apache-2.0
// What %tid.x and the like read: filled in before a warp starts.
#include "tools/emulator/state.h"

namespace tiercel::emulator {
namespace {

constexpr uint32_t kMultiprocessors = 132;

uint32_t component(const Dim& dim, char axis) {
  return axis == 'x' ? dim.x : axis == 'y' ? dim.y : axis == 'z' ? dim.z : 0;
}

// Those that are the same in all lanes. False: unknown.
bool uniform(const Launch& launch, const Warp& warp, const std::string& name, char axis,
             uint64_t* value) {
  const Cta& cta = *warp.cta;
  const Dim &grid = launch.grid, &cluster = launch.cluster, &at = cta.index;
  const auto vector = [&](const char* stem, const Dim& dim) {
    if (name != stem) return false;
    *value = component(dim, axis);
    return true;
  };
  const auto scalar = [&](const char* whole, uint64_t number) {
    if (name != whole) return false;
    *value = number;
    return true;
  };
  return vector("%ntid", launch.block) || vector("%ctaid", at) || vector("%nctaid", grid) ||
         vector("%cluster_ctaid", {at.x % cluster.x, at.y % cluster.y, at.z % cluster.z}) ||
         vector("%cluster_nctaid", cluster) ||
         vector("%clusterid", {at.x / cluster.x, at.y / cluster.y, at.z / cluster.z}) ||
         vector("%nclusterid", {grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z}) ||
         scalar("%cluster_ctarank", cta.rank) || scalar("%cluster_nctarank", cluster.count()) ||
         scalar("%is_explicit_cluster", cluster.count() > 1) || scalar("%warpid", warp.index) ||
         scalar("%nwarpid", cta.warps.size()) || scalar("%nsmid", kMultiprocessors) ||
         scalar("%smid", (at.x + uint64_t{at.y} * grid.x + uint64_t{at.z} * grid.x * grid.y) %
                             kMultiprocessors) ||
         scalar("%gridid", 1) || scalar("%dynamic_smem_size", launch.dynamic_shared) ||
         scalar("%total_smem_size", launch.shared_bytes) ||
         scalar("%aggr_smem_size", launch.shared_bytes + kSharedStart);
}

uint32_t of_lane(const Launch& launch, const Warp& warp, const std::string& name, char axis,
                 uint32_t lane) {
  const Dim& block = launch.block;
  const uint32_t thread = warp.index * kLanes + lane;
  if (name == "%tid") {
    return component({thread % block.x, thread / block.x % block.y, thread / block.x / block.y},
                     axis);
  }
  const uint32_t one = 1u << lane;
  if (name == "%laneid") return lane;
  if (name == "%lanemask_eq") return one;
  if (name == "%lanemask_lt") return one - 1;
  if (name == "%lanemask_le") return (one - 1) | one;
  if (name == "%lanemask_gt") return ~((one - 1) | one);
  if (name == "%lanemask_ge") return ~(one - 1);
  if (name == "%clock" || name == "%clock64" || name == "%globaltimer" ||
      name == "%globaltimer_lo") {
    return 0;  // `mov` reads them anew
  }
  throw EmulatorError("unknown special register " + name);
}

}  // namespace

void fill_specials(const Launch& launch, Warp& warp) {
  const Kernel& kernel = *launch.kernel;
  for (const auto& [whole, slot] : kernel.specials) {
    if (whole[0] == '&') {
      const uint64_t address =
          kernel.shared_offsets.at(whole.substr(4)) + (uint64_t{warp.cta->rank} << kRankShift);
      for (int i = 0; i < kLanes; ++i) {
        if (whole[1] == '6') {
          warp.out<uint64_t>(slot)[i] = address;
        } else {
          warp.out<uint32_t>(slot)[i] = static_cast<uint32_t>(address);
        }
      }
      continue;
    }
    const size_t dot = whole.find('.');
    const std::string name = whole.substr(0, dot);
    const char axis = dot == std::string::npos ? '\0' : whole[dot + 1];
    uint64_t value = 0;
    const bool same = uniform(launch, warp, name, axis, &value);
    for (uint32_t i = 0; i < kLanes; ++i) {
      const uint64_t of = same ? value : of_lane(launch, warp, name, axis, i);
      if (name == "%gridid" || name == "%clock64" || name == "%globaltimer") {
        warp.out<uint64_t>(slot)[i] = of;
      } else {
        warp.out<uint32_t>(slot)[i] = static_cast<uint32_t>(of);
      }
    }
  }
}

}  // namespace tiercel::emulator
