// SPDX-License-Identifier: Apache-2.0
// The interface of moe_align_block_size's host and device code.
#ifndef KERNELS_ROUTING_MOE_ALIGN_KERNELS_H_
#define KERNELS_ROUTING_MOE_ALIGN_KERNELS_H_

#include <cstdint>

#include "kernels/routing/moe_align.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

struct MoeAlignArgs {
  const void* ids;            // [numel] int32 or int64
  const int32_t* expert_map;  // [experts] or null
  int32_t* sorted_ids;        // [slots]
  int32_t* expert_ids;        // [blocks]
  int32_t* num_padded;        // [1 + counters]
  uint32_t* counts;           // [gridDim.x, experts], for the pair of kernels
  uint32_t numel;
  uint32_t slots;
  uint32_t slots_head;  // slots before the first multiple of 16 bytes
  uint32_t blocks;
  uint32_t block_size;
  int block_shift;  // log2(block_size), or -1
  uint32_t span;    // ids per thread block
  int experts;
  uint32_t counters;  // the number of counters to zero
  bool int64_ids;
  bool map_first;  // omits experts that the map lacks; otherwise marks them
};

inline constexpr uint32_t kMoeAlignMaxThreads = 1024;
inline constexpr uint32_t kMoeAlignMaxSharedBytes = 227 * 1024;
inline constexpr int kMoeAlignStoreItems = 8;

struct MoeAlignKernel {
  int items;  // ids per thread
  bool cluster;
  int max_experts;
  Kernel kernel;
};

// One launch if the ids fit the registers of a block or cluster; otherwise two.
const MoeAlignKernel* moe_align_small_kernels(int* count);
const Kernel& moe_align_count_kernel();
const MoeAlignKernel* moe_align_store_kernels(int* count);

// Bytes of shared memory for `span` ids per thread block.
constexpr uint32_t moe_align_shared_bytes(int experts, int warps, int cluster, uint32_t span) {
  return 4 * (warps * (experts + 1) + (cluster + 2) * experts + 64 + span);
}

// Shared by all ops that align. Checks the arguments for `numel` ids; `first` is the tensor that
// others are compared with.
Status moe_align_check(const char* op, const Argument& first, int64_t numel,
                       const TensorView* expert_map, const MoeAlignOutputs& outputs,
                       const MoeAlignOptions& options);

// The arguments except ids, span and workspace.
MoeAlignArgs moe_align_args(int64_t numel, const TensorView* expert_map,
                            const MoeAlignOutputs& outputs, const MoeAlignOptions& options);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_ALIGN_KERNELS_H_
