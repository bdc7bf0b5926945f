// SPDX-License-Identifier: Apache-2.0
// mbarrier.*, and what signals one later: st.async, cp.async.mbarrier.arrive.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/emulator/tensor/tensor_state.h"

namespace tiercel::emulator {
namespace {

enum Flags : uint32_t { kNarrow = 1, kNoComplete = 2, kExpect = 4, kDrop = 8, kParity = 16 };

// op[1] the address, imm its constant part.
template <typename Body>
void each_barrier(Warp& warp, const Instruction& in, Mask mask, Body body) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint32_t address = shared_address(warp, in.op[1], in.flags & kNarrow, in.imm, lane);
    try {
      body(mbarrier_at(*warp.cta->cluster, address, lane), lane);
    } catch (const EmulatorError& error) {
      throw EmulatorError(error.what(), lane);
    }
  }
}

Step init(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t* count = warp.in<uint32_t>(in.op[2]);
  each_barrier(warp, in, mask, [&](MBarrier barrier, int lane) { barrier.init(count[lane]); });
  return Step::kNext;
}

Step inval(Warp& warp, const Instruction& in, Mask mask) {
  each_barrier(warp, in, mask, [](MBarrier barrier, int) { barrier.inval(); });
  return Step::kNext;
}

Step expect_tx(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t* bytes = warp.in<uint32_t>(in.op[2]);
  each_barrier(warp, in, mask, [&](MBarrier barrier, int lane) { barrier.expect_tx(bytes[lane]); });
  return Step::kNext;
}

Step complete_tx(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t* bytes = warp.in<uint32_t>(in.op[2]);
  each_barrier(warp, in, mask,
               [&](MBarrier barrier, int lane) { barrier.complete_tx(bytes[lane]); });
  return Step::kNext;
}

Step arrive(Warp& warp, const Instruction& in, Mask mask) {
  uint64_t* state = warp.out<uint64_t>(in.op[0]);
  const uint32_t* number = warp.in<uint32_t>(in.op[2]);  // of arrivals, or of bytes
  each_barrier(warp, in, mask, [&](MBarrier barrier, int lane) {
    const bool expect = in.flags & kExpect;
    if (expect) barrier.expect_tx(number[lane]);
    const uint32_t count = expect ? 1 : number[lane];
    const bool no_complete = in.flags & kNoComplete;
    state[lane] = in.flags & kDrop ? barrier.arrive_drop(count, no_complete)
                                   : barrier.arrive(count, no_complete);
  });
  return Step::kNext;
}

Step wait(Warp& warp, const Instruction& in, Mask mask) {
  Mask done = 0;
  each_barrier(warp, in, mask, [&](MBarrier barrier, int lane) {
    const bool over = in.flags & kParity ? barrier.test_parity(warp.in<uint32_t>(in.op[2])[lane])
                                         : barrier.test(warp.in<uint64_t>(in.op[2])[lane]);
    if (over) done |= 1u << lane;
  });
  Mask* out = warp.out<Mask>(in.op[0]);
  *out = (*out & ~mask) | done;
  return done == mask ? Step::kNext : Step::kYield;
}

Step pending_count(Warp& warp, const Instruction& in, Mask mask) {
  uint32_t* out = warp.out<uint32_t>(in.op[0]);
  const uint64_t* state = warp.in<uint64_t>(in.op[1]);
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) out[lane] = MBarrier::pending_count(state[lane]);
  return Step::kNext;
}

void barrier_operand(Decode& d, Instruction& out, int i) {
  bool narrow = false;
  out.op[1] = d.address(i, &out.imm, &narrow);
  if (narrow) out.flags |= kNarrow;
}

void decode_mbarrier(Decode& d, Instruction& out) {
  if (d.take("pending_count")) {
    d.type({t::b64});
    out.op[0] = d.destination(0, t::u32);
    out.op[1] = d.source(1, t::b64);
    out.run = pending_count;
    return;
  }
  const std::string what = d.take_one_of({"init", "inval", "arrive", "arrive_drop", "expect_tx",
                                          "complete_tx", "test_wait", "try_wait"});
  if (d.take("expect_tx")) out.flags |= kExpect;
  if (d.take("noComplete")) out.flags |= kNoComplete;
  if (d.take("parity")) out.flags |= kParity;
  d.take_cache_hints();  // semantics and scope: the interpreter's memory is in order
  d.space();
  d.type({t::b64});
  if (what == "init" || what == "expect_tx" || what == "complete_tx") {
    barrier_operand(d, out, 0);
    out.op[2] = d.source(1, t::b32);
    out.run = what == "init" ? init : what == "expect_tx" ? expect_tx : complete_tx;
  } else if (what == "inval") {
    barrier_operand(d, out, 0);
    out.run = inval;
  } else if (what == "arrive" || what == "arrive_drop") {
    if (what == "arrive_drop") out.flags |= kDrop;
    out.op[0] = d.destination(0, t::b64);
    barrier_operand(d, out, 1);
    out.op[2] = d.count() > 2 ? d.source(2, t::b32) : d.constant32(1);
    out.run = arrive;
  } else if (what == "test_wait" || what == "try_wait") {
    out.op[0] = d.predicate(0);
    barrier_operand(d, out, 1);
    out.op[2] = d.source(2, out.flags & kParity ? t::b32 : t::b64);
    out.run = wait;
  } else {
    d.fail("an operation is missing");
  }
}
const Opcode mbarrier_opcode("mbarrier", decode_mbarrier);

// cp.async.mbarrier.arrive: arrives once all of a thread's copies so far are there.
Step copies_arrive(Warp& warp, const Instruction& in, Mask mask) {
  Cluster& cluster = *warp.cta->cluster;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint32_t address = shared_address(warp, in.op[1], in.flags & kNarrow, in.imm, lane);
    std::vector<std::function<void()>> copies;
    for (LaneCopy& one : warp.copies) {
      if (one.lane != lane) continue;
      // A wait of the thread's own may complete it before.
      auto todo = std::make_shared<std::function<void()>>(std::move(one.run));
      one.run = [todo] {
        if (*todo) std::exchange(*todo, nullptr)();
      };
      copies.push_back(one.run);
    }
    cluster.add([&cluster, address, lane, copies] {
      for (const auto& copy : copies) copy();
      mbarrier_at(cluster, address, lane).arrive(1);
    });
  }
  return Step::kNext;
}

void decode_copies_arrive(Decode& d, Instruction& out) {
  if (!d.take("async") || !d.take("mbarrier") || !d.take("arrive") || !d.take("noinc")) {
    d.fail("another way to arrive");
  }
  d.space();
  d.type({t::b64});
  barrier_operand(d, out, 0);
  out.run = copies_arrive;
}
const Opcode copies_arrive_opcode("cp", decode_copies_arrive, "mbarrier");

// st.async: op[0] the destination, op[1] the mbarrier; both at shared addresses of the cluster.
Step store_async(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t bytes = in.flags >> 8;  // of an element
  Cluster& cluster = *warp.cta->cluster;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint32_t to = shared_address(warp, in.op[0], in.flags & 1, in.imm >> 32, lane);
    const uint32_t barrier =
        shared_address(warp, in.op[1], in.flags & 2, static_cast<int32_t>(in.imm), lane);
    std::string data;
    for (uint32_t i = 0; i < in.more_count; ++i) {
      const char* value = bytes == 8
                              ? reinterpret_cast<const char*>(warp.in<uint64_t>(in.more[i]) + lane)
                              : reinterpret_cast<const char*>(warp.in<uint32_t>(in.more[i]) + lane);
      data.append(value, bytes);
    }
    if (to % data.size() != 0) throw EmulatorError("st.async: misaligned address", lane);
    const auto size = static_cast<uint32_t>(data.size());
    cluster.add([&cluster, to, barrier, data, size, lane] {
      uint8_t* place =
          memory_of(cluster).shared(to >> kRankShift, to & kOffsetMask, size, Access::write);
      std::memcpy(place, data.data(), size);
      mbarrier_at(cluster, barrier, lane).complete_tx(size);
    });
  }
  return Step::kNext;
}

void decode_store_async(Decode& d, Instruction& out) {
  d.take("async");
  d.take("mbarrier::complete_tx::bytes");
  d.take_cache_hints();
  d.space();
  d.vector_length();
  const Type type = d.type({t::b32, t::u32, t::s32, t::f32, t::b64, t::u64, t::s64, t::f64});
  int64_t to = 0, barrier = 0;
  bool narrow_to = false, narrow_barrier = false;
  out.op[0] = d.address(0, &to, &narrow_to);
  out.op[1] = d.address(2, &barrier, &narrow_barrier);
  out.imm = to << 32 | static_cast<uint32_t>(barrier);
  std::vector<Operand> values;
  if (d.operand(1).kind == PtxOperand::kVector)
    for (const PtxOperand& part : d.operand(1).parts) values.push_back(d.source(part, type));
  else
    values.push_back(d.source(1, type));
  d.set_more(out, values);
  out.flags =
      (narrow_to ? 1u : 0) | (narrow_barrier ? 2u : 0) | static_cast<uint32_t>(type.bits / 8) << 8;
  out.run = store_async;
}
const Opcode store_async_opcode("st", decode_store_async, "async");

}  // namespace
}  // namespace tiercel::emulator
