// SPDX-License-Identifier: Apache-2.0
// The emulator's tensor part as C functions, for tests/support/tensor_probe.py. A function returns
// what is wrong, or null.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tools/emulator/error.h"
#include "tools/emulator/tensor/bulk_copy.h"
#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/formats.h"
#include "tools/emulator/tensor/fragments.h"
#include "tools/emulator/tensor/mbarrier.h"
#include "tools/emulator/tensor/mma_sync.h"
#include "tools/emulator/tensor/tensor_map.h"
#include "tools/emulator/tensor/wgmma.h"
#include "tools/emulator/tensor/wgmma_queue.h"

using namespace tiercel::emulator;

namespace {

const Format* const kFormats[] = {&kFormatF16,  &kFormatBf16, &kFormatE4m3, &kFormatE5m2,
                                  &kFormatE2m1, &kFormatTf32, &kFormatF32};

class Buffers : public Memory {
 public:
  Buffers(uint8_t* shared, uint32_t shared_bytes, uint8_t* global = nullptr, uint64_t bytes = 0)
      : shared_(shared), shared_bytes_(shared_bytes), global_(global), bytes_(bytes) {}

  uint8_t* shared(uint32_t, uint32_t offset, uint32_t bytes, Access) override {
    if (uint64_t{offset} + bytes > shared_bytes_) fault("shared memory: 0x%x is outside", offset);
    return shared_ + offset;
  }
  uint8_t* global(uint64_t address, uint64_t bytes, Access) override {
    const auto begin = reinterpret_cast<uint64_t>(global_);
    if (address < begin || address + bytes > begin + bytes_) fault("global memory: outside");
    return reinterpret_cast<uint8_t*>(address);
  }

 private:
  uint8_t* shared_;
  uint32_t shared_bytes_;
  uint8_t* global_;
  uint64_t bytes_;
};

template <typename Body>
const char* guarded(Body body) {
  static thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const EmulatorError& error) {
    text = error.what();
    return text.c_str();
  }
}

std::vector<uint32_t*> rows_of(uint32_t* registers, int count) {
  std::vector<uint32_t*> rows;
  for (int i = 0; i < count; ++i) rows.push_back(registers + i * kLanes);
  return rows;
}

struct Queue {
  Buffers memory;
  WgmmaQueue queue;
  Queue(uint8_t* shared, uint32_t bytes, uint32_t warp, bool lazy)
      : memory(shared, bytes), queue(memory, 0, warp, lazy) {}
};

}  // namespace

extern "C" {

const char* probe_encode(const double* x, uint32_t* out, int count, int format, int round,
                         int satfinite) {
  for (int i = 0; i < count; ++i)
    out[i] = encode(x[i], *kFormats[format], static_cast<Round>(round), satfinite != 0);
  return nullptr;
}

const char* probe_decode(const uint32_t* bits, float* out, int count, int format) {
  for (int i = 0; i < count; ++i) out[i] = decode(bits[i], *kFormats[format]);
  return nullptr;
}

// The short ways of the inner loops: 0 from_f16, 1 from_bf16 (bits in, bits of a float out), 2
// to_f16, 3 to_bf16, 4 to_tf32, 5 from_ue8m0, 6 to_ue8m0 (towards zero), 7 (up).
const char* probe_short(int which, const uint32_t* in, uint32_t* out, int count) {
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = in[i];
    const float x = float_of(bits);
    out[i] = which == 0   ? bits_of(from_f16(static_cast<uint16_t>(bits)))
             : which == 1 ? bits_of(from_bf16(static_cast<uint16_t>(bits)))
             : which == 2 ? to_f16(x)
             : which == 3 ? to_bf16(x)
             : which == 4 ? to_tf32(x)
             : which == 5 ? bits_of(from_ue8m0(static_cast<uint8_t>(bits)))
                          : to_ue8m0(x, which == 6 ? Round::rz : Round::rp);
  }
  return nullptr;
}

const char* probe_mma_sync(int k, int a_type, int b_type, int c_type, int d_type, uint32_t* a,
                           uint32_t* b, uint32_t* c, uint32_t* d) {
  return guarded([&] {
    const MmaSync shape{k, static_cast<Element>(a_type), static_cast<Element>(b_type),
                        static_cast<Element>(c_type), static_cast<Element>(d_type)};
    check(shape);
    mma_sync(shape, rows_of(a, 4).data(), rows_of(b, 2).data(), rows_of(c, 4).data(),
             rows_of(d, 4).data());
  });
}

// which: 0 ldmatrix, 1 stmatrix, 2 movmatrix (registers[0] to registers[1])
const char* probe_matrix(int which, uint8_t* shared, uint32_t bytes, const uint32_t* addresses,
                         int count, int transposed, uint32_t* registers) {
  return guarded([&] {
    Buffers memory(shared, bytes);
    const std::vector<uint32_t*> rows = rows_of(registers, 4);
    if (which == 0) ldmatrix(memory, 0, addresses, count, transposed != 0, rows.data());
    if (which == 1) stmatrix(memory, 0, addresses, count, transposed != 0, rows.data());
    if (which == 2) movmatrix(rows[0], rows[1]);
  });
}

const char* probe_mbarrier(const char* what, uint64_t* state, uint64_t argument, uint64_t* out) {
  return guarded([&] {
    const std::string name = what;
    const auto count = static_cast<uint32_t>(argument);
    MBarrier barrier(state);
    if (name == "init") barrier.init(count);
    if (name == "inval") barrier.inval();
    if (name == "arrive") *out = barrier.arrive(count);
    if (name == "arrive.noComplete") *out = barrier.arrive(count, true);
    if (name == "arrive_drop") *out = barrier.arrive_drop(count);
    if (name == "expect_tx") barrier.expect_tx(count);
    if (name == "complete_tx") barrier.complete_tx(count);
    if (name == "test_wait") *out = barrier.test(argument);
    if (name == "test_wait.parity") *out = barrier.test_parity(count);
    if (name == "pending_count") *out = MBarrier::pending_count(argument);
  });
}

const char* probe_encode_map(uint32_t type, uint32_t rank, uint64_t base, const uint64_t* sizes,
                             const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                             uint32_t interleave, uint32_t swizzle, uint32_t fill, uint8_t* map) {
  static thread_local std::string text;
  text = encode_tensor_map(
      {type, rank, base, sizes, strides, box, steps, interleave, swizzle, 0, fill}, map);
  return text.empty() ? nullptr : text.c_str();
}

// reduction: -1 loads, 0 stores, more is Reduction.
const char* probe_tile(int reduction, const uint8_t* map, const int32_t* coordinates,
                       uint8_t* shared, uint32_t shared_bytes, uint32_t offset, uint8_t* global,
                       uint64_t bytes) {
  return guarded([&] {
    Buffers memory(shared, shared_bytes, global, bytes);
    const TensorMap decoded = decode_tensor_map(map);
    check_tile(decoded, offset);
    if (reduction < 0)
      load_tile(memory, decoded, coordinates, 0, offset);
    else
      store_tile(memory, decoded, coordinates, 0, offset, static_cast<Reduction>(reduction));
  });
}

// All four warps; d is 64 x n.
const char* probe_wgmma(const int* s, uint8_t* shared, uint32_t bytes, uint64_t a, uint64_t b,
                        uint32_t* a_registers, int accumulate, float* d) {
  return guarded([&] {
    const Wgmma shape{s[0],
                      s[1],
                      static_cast<Element>(s[2]),
                      static_cast<Element>(s[3]),
                      static_cast<Element>(s[4]),
                      s[5] != 0,
                      s[6] != 0,
                      s[7] != 0,
                      s[8] != 0,
                      s[9] != 0,
                      s[10] != 0};
    check(shape);
    Buffers memory(shared, bytes);
    for (uint32_t warp = 0; warp < 4; ++warp) {
      const std::vector<uint32_t*> rows = rows_of(a_registers + warp * 4 * kLanes, 4);
      const WgmmaOperands operands{a, b, rows.data(), accumulate != 0};
      wgmma(memory, 0, warp, shape, operands, d + warp * 16 * shape.n);
    }
  });
}

void* probe_queue(uint8_t* shared, uint32_t bytes, uint32_t warp, int lazy) {
  return new Queue(shared, bytes, warp, lazy != 0);
}
void probe_queue_delete(void* queue) { delete static_cast<Queue*>(queue); }

// d has n / 2 registers of f32, a (if any) four.
const char* probe_queue_issue(void* queue, int n, int type, uint64_t a, uint64_t b,
                              uint32_t* a_registers, int accumulate, uint32_t* d) {
  return guarded([&] {
    const auto element = static_cast<Element>(type);
    const int k = 256 / element_bits(element);
    const Wgmma shape{n, k, element, element, Element::f32, a_registers != nullptr};
    std::vector<const uint32_t*> rows;
    if (a_registers)
      for (uint32_t* row : rows_of(a_registers, 4)) rows.push_back(row);
    static_cast<Queue*>(queue)->queue.issue(shape, {a, b, nullptr, accumulate != 0},
                                            rows_of(d, n / 2), rows, 1);
  });
}
const char* probe_queue_commit(void* queue) {
  static_cast<Queue*>(queue)->queue.commit();
  return nullptr;
}
const char* probe_queue_wait(void* queue, uint32_t groups) {
  return guarded([&] { static_cast<Queue*>(queue)->queue.wait(groups); });
}
const char* probe_unpack_d(uint32_t* registers, int n, float* out) {
  unpack_c(Element::f32, n, rows_of(registers, n / 2).data(), out);
  return nullptr;
}

}  // extern "C"
