// SPDX-License-Identifier: Apache-2.0
// What runs: a launch, its clusters, their blocks, their warps.
#ifndef TOOLS_EMULATOR_STATE_H_
#define TOOLS_EMULATOR_STATE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/emulator/instruction.h"
#include "tools/emulator/memory.h"

namespace tiercel::emulator {

// A kernel, decoded.
struct Kernel {
  std::string name;  // as in PTX
  const PtxModule* module = nullptr;
  std::unique_ptr<PtxFunction> ptx;
  std::vector<Instruction> code;
  std::deque<std::vector<Operand>> more;  // Instruction::more points into it
  std::vector<uint32_t> register_offsets;
  uint32_t register_bytes = 0;  // of a warp
  std::vector<uint32_t> constants;
  std::map<uint64_t, uint32_t> constants32, constants64;
  Operand carry;                            // of add.cc, where there is one
  std::map<std::string, Operand> specials;  // special registers that the code reads
  std::map<std::string, uint64_t> shared_offsets, local_offsets;
  uint32_t static_shared = 0, dynamic_shared_align = 16;
  uint32_t local_bytes = 0;       // of a thread
  uint32_t launch_registers = 0;  // of a thread, where setmaxnreg changes them; else 0
  uint32_t parameter_bytes = 0;
  std::map<std::string, uint64_t>* globals = nullptr;  // addresses of the module's variables
  std::vector<std::shared_ptr<const void>> kept;       // what Instruction::imm points to
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Options {
  bool lazy = true;              // asynchronous work completes as late as waits allow
  uint64_t seed = 0;             // not 0: warps run in an order and in slices that it decides
  bool short_fp8_adder = false;  // wgmma adds FP8 products with as few bits as the GPU
  uint64_t max_instructions = 2'000'000'000;  // of all warps of a launch
};

struct Cluster;
struct Cta;

struct Launch {
  const Kernel* kernel = nullptr;
  Dim grid, block, cluster;
  bool cooperative = false;   // all blocks run at the same time
  bool dependent = false;     // may begin before the grid before it has ended
  uint32_t shared_bytes = 0;  // static and dynamic
  uint32_t dynamic_shared = 0;
  std::vector<uint8_t> parameters;
  Options options;
  Allocations* allocations = nullptr;
  uint64_t instructions = 0;  // run so far, by warps
  uint64_t random = 0;        // state of the seeded order
  uint64_t next_random();
};

// Lanes of a warp that are at the same instruction.
struct Group {
  uint32_t pc = 0;
  Mask mask = 0;
  bool blocked = false;
  uint64_t token = 0;  // a blocked handler's own: what it has already done. 0 at first.
};

struct CtaBarrier {
  uint32_t arrived = 0;   // threads
  uint32_t expected = 0;  // 0: not in use
  uint64_t generation = 0;
  uint32_t red_popc = 0, red_votes = 0;  // bar.red of this generation
  uint32_t result_popc = 0, result_votes = 0;
};

// A copy that cp.async asked for and nobody has waited for.
struct LaneCopy {
  uint32_t group;  // of that lane, counted by commit_group
  int lane;
  std::function<void()> run;
};

struct Warp {
  // For handlers.
  template <typename T>
  const T* in(Operand operand) const {
    return reinterpret_cast<const T*>(base[operand.bits >> 31] + (operand.bits & 0x7fffffffu));
  }
  template <typename T>
  T* out(Operand operand) {
    return reinterpret_cast<T*>(base[0] + operand.bits);
  }
  Mask predicate(Operand operand) const { return *in<Mask>(operand); }

  // For instructions that some or all lanes of the warp do together: true when every living lane of
  // `members` is here; otherwise return Step::kBlocked.
  bool together(Mask members, Mask here) const { return (members & alive & ~here) == 0; }

  uint8_t* base[2] = {nullptr, nullptr};  // registers, constants
  Cta* cta = nullptr;
  uint32_t index = 0;              // in the block
  uint32_t machine_registers = 0;  // of a thread, as setmaxnreg left them
  Mask alive = 0;
  Mask active = 0;  // of the group that runs now
  uint32_t pc = 0;  // of the instruction that runs now
  Group* group = nullptr;
  std::vector<Group> groups;  // all living lanes, disjoint
  std::vector<uint64_t> registers;
  std::vector<uint8_t> local;           // of 32 threads, one after another
  uint64_t cluster_phase[kLanes] = {};  // barrier.cluster: 1 + the generation arrived at
  uint32_t copy_groups[kLanes] = {};    // cp.async: committed so far
  std::vector<LaneCopy> copies;
  MemoryCache cache;
  uint32_t polled_at[8] = {};  // where it yielded last; lanes may poll apart
  uint32_t polls = 0;
  bool high_first = false;             // its slice ended in a group that keeps the others waiting
  std::shared_ptr<void> tensor_state;  // wgmma and the like: tools/emulator/tensor's own
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in the cluster
  Dim index;          // %ctaid
  bool exited = false;
  bool waited = false;          // griddepcontrol.wait
  std::vector<uint8_t> shared;  // addresses begin at kSharedStart
  std::vector<Warp> warps;
  CtaBarrier barriers[16];
  uint32_t free_registers = 0;  // that warps gave back, counted for one thread of a warp
  std::shared_ptr<void> tensor_state;
};

// Work that completes later than its instruction: copies of the copy engine, say.
struct AsyncWork {
  std::function<void()> complete;
};

struct Cluster {
  Launch* launch = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  uint32_t barrier_arrived = 0, barrier_exited = 0;  // barrier.cluster, in threads
  uint64_t barrier_generation = 0;
  // Lazily completed work: the scheduler completes the oldest, or with a seed any, when no warp can
  // go on or warps only poll. With Options::lazy off, add() completes it at once.
  std::deque<AsyncWork> async;
  void add(std::function<void()> complete);
  std::shared_ptr<void> tensor_state;

  // Memory of shared addresses (32 bits, CTA's rank in the top byte); checks bounds. For `size`
  // bytes; `what` for the message.
  uint8_t* shared(uint64_t address, uint64_t size, int lane = -1);
};

// Runs all of it. Throws EmulatorError with kernel, block, thread and PTX line in its text.
void run_launch(Launch& launch);

std::unique_ptr<Kernel> decode_kernel(const PtxModule& module, const std::string& entry,
                                      std::map<std::string, uint64_t>* globals);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_STATE_H_
