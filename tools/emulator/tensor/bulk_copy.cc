// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/bulk_copy.h"

#include <algorithm>
#include <cstring>

#include "tools/emulator/tensor/fault.h"
#include "tools/emulator/tensor/formats.h"

namespace tiercel::emulator {
namespace {

// Numbers of CUtensorMapDataType.
enum { kU8, kU16, kU32, kS32, kU64, kS64, kHalf, kFloat, kDouble, kBfloat };

// Walks the rows (runs along the innermost dimension) of a box. `row` is called with the row's
// first address in global memory, its number in the box, and whether its outer coordinates lie in
// the tensor.
template <typename Row>
void for_each_row(const TensorMap& map, const int32_t* coordinates, Row row) {
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box_size(i);
  for (uint32_t number = 0; number < rows; ++number) {
    uint64_t address = map.base;
    bool inside = true;
    uint32_t rest = number;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = coordinates[i] + int64_t{rest % map.box_size(i)} * map.steps[i];
      rest /= map.box_size(i);
      inside = inside && at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];
      address += static_cast<uint64_t>(at) * map.strides[i];
    }
    row(address, number, inside);
  }
}

struct Run {  // of elements of a row that lie in the tensor
  uint32_t begin, end;
};

Run inner_run(const TensorMap& map, int32_t coordinate) {
  const int64_t size = static_cast<int64_t>(map.sizes[0]);
  const int64_t begin = std::clamp<int64_t>(-int64_t{coordinate}, 0, map.box[0]);
  const int64_t end = std::clamp<int64_t>(size - coordinate, begin, map.box[0]);
  return {static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
}

void fill(const TensorMap& map, uint8_t* bytes, uint32_t count) {
  std::memset(bytes, 0, count);
  if (!map.nan_fill) return;
  const uint32_t size = map.element_bytes();
  for (uint32_t i = 0; i < count; i += size) {
    const uint64_t nan = map.type == kDouble                        ? 0x7fffffffffffffff
                         : map.type == kHalf || map.type == kBfloat ? 0x7fff
                                                                    : 0x7fffffff;
    std::memcpy(bytes + i, &nan, size);
  }
}

// Chunk by chunk between a row as it is and as it lies in shared memory.
template <typename Chunk>
void for_each_chunk(const TensorMap& map, uint32_t shared_offset, uint32_t number, Chunk chunk) {
  const uint32_t bytes = map.box[0] * map.element_bytes();
  const uint32_t start = shared_offset + number * bytes;
  for (uint32_t at = 0; at < bytes; at += 16) chunk(swizzled(map.swizzle, start + at), at);
}

template <typename T, typename Float>
T combine(Reduction reduction, T old, T value, Float to_number) {
  switch (reduction) {
    case Reduction::min:
      return to_number(value) < to_number(old) ? value : old;
    case Reduction::max:
      return to_number(value) > to_number(old) ? value : old;
    case Reduction::bit_and:
      return static_cast<T>(old & value);
    case Reduction::bit_or:
      return static_cast<T>(old | value);
    case Reduction::bit_xor:
      return static_cast<T>(old ^ value);
    default:
      return static_cast<T>(old + value);
  }
}

template <typename T, typename Combine>
void combine_each(uint8_t* to, const uint8_t* from, uint32_t bytes, Combine combined) {
  for (uint32_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
    T old, value;
    std::memcpy(&old, to + at, sizeof old);
    std::memcpy(&value, from + at, sizeof value);
    old = combined(old, value);
    std::memcpy(to + at, &old, sizeof old);
  }
}

}  // namespace

uint32_t swizzled(Swizzle swizzle, uint32_t address) {
  const uint32_t mask = (1u << static_cast<int>(swizzle)) - 1;  // of chunk numbers
  return address ^ ((address >> 7 & mask) << 4);
}

void check_tile(const TensorMap& map, uint32_t shared_offset) {
  if (shared_offset % 128 != 0)
    fault("cp.async.bulk.tensor: the shared address 0x%x is no multiple of 128", shared_offset);
  const uint32_t inner = map.box[0] * map.element_bytes();
  const uint32_t row = 16u << static_cast<int>(map.swizzle);
  if (map.swizzle != Swizzle::none && inner != row)
    fault("cp.async.bulk.tensor: rows of %u bytes in a swizzle of %u bytes are not emulated", inner,
          row);
}

void load_tile(Memory& memory, const TensorMap& map, const int32_t* coordinates, uint32_t rank,
               uint32_t shared_offset) {
  const uint32_t size = map.element_bytes(), inner = map.box[0] * size;
  const Run run = inner_run(map, coordinates[0]);
  uint8_t row_bytes[256 * 8];
  memory.global(map.base, size, Access::read);  // loads fault where a map begins in unmapped memory
  for_each_row(map, coordinates, [&](uint64_t address, uint32_t number, bool inside) {
    fill(map, row_bytes, inner);
    if (inside && run.begin < run.end) {
      const uint64_t first = address + (int64_t{coordinates[0]} + run.begin) * size;
      const uint32_t bytes = (run.end - run.begin) * size;
      std::memcpy(row_bytes + run.begin * size, memory.global(first, bytes, Access::read), bytes);
    }
    for_each_chunk(map, shared_offset, number, [&](uint32_t to, uint32_t at) {
      std::memcpy(memory.shared(rank, to, 16, Access::write), row_bytes + at, 16);
    });
  });
}

void store_tile(Memory& memory, const TensorMap& map, const int32_t* coordinates, uint32_t rank,
                uint32_t shared_offset, Reduction reduction) {
  const uint32_t size = map.element_bytes();
  const Run run = inner_run(map, coordinates[0]);
  uint8_t row_bytes[256 * 8];
  for_each_row(map, coordinates, [&](uint64_t address, uint32_t number, bool inside) {
    for_each_chunk(map, shared_offset, number, [&](uint32_t from, uint32_t at) {
      std::memcpy(row_bytes + at, memory.shared(rank, from, 16, Access::read), 16);
    });
    if (!inside || run.begin >= run.end) return;
    const uint64_t first = address + (int64_t{coordinates[0]} + run.begin) * size;
    const uint32_t bytes = (run.end - run.begin) * size;
    uint8_t* to = memory.global(first, bytes, Access::write);
    reduce_bytes(map.type, reduction, to, row_bytes + run.begin * size, bytes);
  });
}

void check_bulk(uint64_t to, uint64_t from, uint32_t bytes) {
  if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0)
    fault("cp.async.bulk: destination 0x%llx, source 0x%llx and size %u, expected multiples of 16",
          static_cast<unsigned long long>(to), static_cast<unsigned long long>(from), bytes);
}

void reduce_bytes(uint32_t type, Reduction reduction, uint8_t* to, const uint8_t* from,
                  uint32_t bytes) {
  if (reduction == Reduction::none) {
    std::memcpy(to, from, bytes);
    return;
  }
  const bool bitwise = reduction >= Reduction::bit_and;
  const auto same = [](auto x) { return x; };
  if (type == kU32 || type == kS32 || type == kU64 || type == kS64 || bitwise) {
    const auto each = [&](auto zero) {
      using T = decltype(zero);
      combine_each<T>(to, from, bytes,
                      [&](T old, T value) { return combine(reduction, old, value, same); });
    };
    if (type == kU32) return each(uint32_t{});
    if (type == kS32 && reduction == Reduction::add) return each(uint32_t{});
    if (type == kS32) return each(int32_t{});
    if (type == kU64 || (type == kS64 && reduction == Reduction::add)) return each(uint64_t{});
    if (type == kS64) return each(int64_t{});
  }
  const bool add = reduction == Reduction::add;
  if (type == kFloat && add)
    return combine_each<float>(to, from, bytes, [](float old, float value) { return old + value; });
  if (type == kDouble && add)
    return combine_each<double>(to, from, bytes, [](double a, double b) { return a + b; });
  if ((type == kHalf || type == kBfloat) && !bitwise) {
    const Format& format = type == kHalf ? kFormatF16 : kFormatBf16;
    return combine_each<uint16_t>(to, from, bytes, [&](uint16_t old, uint16_t value) {
      const auto number = [&](uint16_t bits) { return decode(bits, format); };
      if (!add) return combine(reduction, old, value, number);
      return static_cast<uint16_t>(encode(double{number(old)} + number(value), format));
    });
  }
  fault("cp.reduce.async.bulk: this operation is not emulated for the tensor's type %u", type);
}

}  // namespace tiercel::emulator
