// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/mbarrier.h"

#include <cstring>

#include "tools/emulator/tensor/fault.h"

namespace tiercel::emulator {
namespace {

// From the low end: pending and expected arrivals (20 bits each), bytes (21, signed), phase (1) and
// a mark (2) that neither zeros nor ones have.
constexpr int kExpectedShift = 20, kBytesShift = 40, kPhaseShift = 61, kMarkShift = 62;
constexpr uint64_t kMark = 2;
constexpr uint64_t kCountMask = MBarrier::kLargestCount;
constexpr uint64_t kBytesMask = (1u << 21) - 1;

}  // namespace

MBarrier::Fields MBarrier::unpack(uint64_t bits) {
  Fields fields;
  fields.pending = static_cast<uint32_t>(bits & kCountMask);
  fields.expected = static_cast<uint32_t>((bits >> kExpectedShift) & kCountMask);
  const auto bytes = static_cast<int32_t>((bits >> kBytesShift) & kBytesMask);
  fields.bytes = bytes > static_cast<int32_t>(kLargestCount) ? bytes - (1 << 21) : bytes;
  fields.phase = static_cast<uint32_t>(bits >> kPhaseShift) & 1;
  return fields;
}

MBarrier::Fields MBarrier::load(const char* what) const {
  uint64_t bits;
  std::memcpy(&bits, state_, sizeof bits);
  const Fields fields = unpack(bits);
  if (bits >> kMarkShift != kMark || fields.pending > kLargestCount)
    fault(
        "%s: there is no mbarrier object here (never initialised, invalidated or overwritten; "
        "its bits are 0x%016llx)",
        what, static_cast<unsigned long long>(bits));
  return fields;
}

void MBarrier::store(Fields fields) {
  if (fields.pending == 0 && fields.bytes == 0) {
    fields.phase ^= 1;
    fields.pending = fields.expected;
  }
  const uint64_t bits = kMark << kMarkShift | uint64_t{fields.phase} << kPhaseShift |
                        (static_cast<uint64_t>(fields.bytes) & kBytesMask) << kBytesShift |
                        uint64_t{fields.expected} << kExpectedShift | fields.pending;
  std::memcpy(state_, &bits, sizeof bits);
}

void MBarrier::init(uint32_t count) {
  if (count < 1 || count > kLargestCount)
    fault("mbarrier.init: the count is %u, expected 1 to %u", count, kLargestCount);
  store({count, count, 0, 0});
}

void MBarrier::inval() {
  load("mbarrier.inval");
  std::memset(state_, 0, sizeof *state_);
}

uint64_t MBarrier::arrive(uint32_t count, bool no_complete) {
  Fields fields = load("mbarrier.arrive");
  uint64_t before;
  std::memcpy(&before, state_, sizeof before);
  if (count < 1 || count > fields.pending)
    fault("mbarrier.arrive: %u arrive where the phase expects %u, of which %u are still to come",
          count, fields.expected, fields.pending);
  fields.pending -= count;
  if (no_complete && fields.pending == 0 && fields.bytes == 0)
    fault("mbarrier.arrive.noComplete completes the phase");
  store(fields);
  return before;
}

uint64_t MBarrier::arrive_drop(uint32_t count, bool no_complete) {
  Fields fields = load("mbarrier.arrive_drop");
  if (count > fields.expected)
    fault("mbarrier.arrive_drop: %u leave where %u take part", count, fields.expected);
  uint64_t before;
  std::memcpy(&before, state_, sizeof before);
  fields.expected -= count;
  if (count > fields.pending || count < 1)
    fault("mbarrier.arrive_drop: %u arrive where %u are still to come", count, fields.pending);
  fields.pending -= count;
  if (no_complete && fields.pending == 0 && fields.bytes == 0)
    fault("mbarrier.arrive_drop.noComplete completes the phase");
  store(fields);
  return before;
}

void MBarrier::expect_tx(uint32_t bytes) {
  Fields fields = load("mbarrier.expect_tx");
  const int64_t sum = int64_t{fields.bytes} + bytes;
  if (sum > kLargestCount)
    fault("mbarrier.expect_tx: %u bytes more than %d pending ones are more than %u", bytes,
          fields.bytes, kLargestCount);
  fields.bytes = static_cast<int32_t>(sum);
  // It completes nothing by itself, also not where as many bytes came before.
  store(fields);
}

void MBarrier::complete_tx(uint32_t bytes) {
  Fields fields = load("mbarrier.complete_tx");
  const int64_t rest = int64_t{fields.bytes} - bytes;
  if (rest < -int64_t{kLargestCount})
    fault("mbarrier.complete_tx: %u bytes came, %d are expected", bytes, fields.bytes);
  if (rest < 0 && fields.pending == 0)
    fault("mbarrier.complete_tx: %u bytes came where all have arrived and %d are expected", bytes,
          fields.bytes);
  fields.bytes = static_cast<int32_t>(rest);
  store(fields);
}

bool MBarrier::test(uint64_t token) const {
  const Fields fields = load("mbarrier.test_wait");
  if (token >> kMarkShift != kMark)
    fault("mbarrier.test_wait: 0x%016llx is no state that an mbarrier instruction returned",
          static_cast<unsigned long long>(token));
  return fields.phase != unpack(token).phase;
}

bool MBarrier::test_parity(uint32_t parity) const {
  const Fields fields = load("mbarrier.test_wait.parity");
  if (parity > 1) fault("mbarrier.test_wait.parity: the parity is %u, expected 0 or 1", parity);
  return fields.phase != parity;
}

uint32_t MBarrier::pending_count(uint64_t token) { return unpack(token).pending; }

}  // namespace tiercel::emulator
