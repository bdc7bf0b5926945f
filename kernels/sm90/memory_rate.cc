// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/memory_rate.h"

#include <atomic>
#include <cstdint>

#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

constexpr int kDevices = 64;                // whose rates are cached
std::atomic<int> g_rates_plus_1[kDevices];  // 0: not asked yet

int ask(int device) {
  if (!driver_status().ok()) return 0;
  const DriverApi& api = driver_api();
  CUdevice handle = 0;
  int kilohertz = 0, bits = 0;
  if (api.device_get(&handle, device) != CUDA_SUCCESS ||
      api.device_get_attribute(&kilohertz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, handle) !=
          CUDA_SUCCESS ||
      api.device_get_attribute(&bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, handle) !=
          CUDA_SUCCESS) {
    return 0;
  }
  return static_cast<int>(int64_t{2} * kilohertz * bits / 8 / 1'000'000);  // two bits a clock
}

}  // namespace

int memory_gbps(int device) {
  if (device < 0 || device >= kDevices) return 0;
  const int kept = g_rates_plus_1[device].load(std::memory_order_relaxed);
  if (kept > 0) return kept - 1;
  const int rate = ask(device);
  g_rates_plus_1[device].store(rate + 1, std::memory_order_relaxed);
  return rate;
}

}  // namespace tiercel
