// SPDX-License-Identifier: Apache-2.0
// mbarrier objects: all their state is the 64 bits in shared memory, as on the machine. The order
// of the fields is our own (PTX leaves it open).
#ifndef TOOLS_EMULATOR_TENSOR_MBARRIER_H_
#define TOOLS_EMULATOR_TENSOR_MBARRIER_H_

#include <cstdint>

namespace tiercel::emulator {

class MBarrier {
 public:
  static constexpr uint32_t kLargestCount = (1u << 20) - 1;  // of arrivals, and of bytes

  // `state` is the object's place. All but init throw if no object is there.
  explicit MBarrier(uint64_t* state) : state_(state) {}

  void init(uint32_t count);
  void inval();

  // Returns the state before, which names the phase to wait for. Throws if more arrive than the
  // phase expects; with no_complete, also if that completes it.
  uint64_t arrive(uint32_t count, bool no_complete = false);
  uint64_t arrive_drop(uint32_t count, bool no_complete = false);
  // Bytes that the phase waits for besides arrivals, and bytes that came. They may come first.
  void expect_tx(uint32_t bytes);
  void complete_tx(uint32_t bytes);

  // Is the phase over of which `token` is a state; is the phase of this parity over.
  bool test(uint64_t token) const;
  bool test_parity(uint32_t parity) const;
  static uint32_t pending_count(uint64_t token);

 private:
  struct Fields {
    uint32_t expected, pending, phase;
    int32_t bytes;
  };
  static Fields unpack(uint64_t bits);
  Fields load(const char* what) const;
  void store(Fields fields);  // and begins the next phase if this one is complete

  uint64_t* state_;
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_MBARRIER_H_
