// SPDX-License-Identifier: Apache-2.0
// The bounds below are measured on an H200 (132 multiprocessors, 2048 threads each). They are used
// on an H100 too, because the order of a sum must not depend on the device.
#include "kernels/reduce/reduce_choose.h"

#include <algorithm>
#include <string>

#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr int64_t kLongestPart = int64_t{1} << 30;  // elements; positions in a part are 32-bit
constexpr int64_t kInvariantPart = 1024;            // of a column, in the batch-invariant mode

using Kind = ReduceKernel::Kind;

const ReduceKernel* find(KernelTable<ReduceKernel> kernels, DType dtype, bool max, Kind kind,
                         int lanes, int per_thread, int vector_bytes, unsigned block) {
  for (const ReduceKernel& kernel : kernels) {
    if (kernel.dtype == dtype && kernel.max == max && kernel.kind == kind &&
        kernel.lanes == lanes && (per_thread == 0 || kernel.per_thread == per_thread) &&
        kernel.vector_bytes == vector_bytes && (block == 0 || kernel.block == block)) {
      return &kernel;
    }
  }
  return nullptr;
}

const ReduceKernel* find_rows(DType dtype, bool max, Kind kind, int lanes, int rows) {
  return find(KernelTable(reduce_rows_kernels), dtype, max, kind, lanes, rows, 16, 0);
}

const ReduceKernel* find_columns(DType dtype, bool max, int vector_bytes, int lanes,
                                 unsigned block) {
  return find(KernelTable(reduce_columns_kernels), dtype, max, Kind::columns, lanes, 0,
              vector_bytes, block);
}

// Splits into at most `wanted` parts, each a multiple of `step` long.
void split(ReduceArgs* args, int64_t wanted, int64_t step) {
  wanted = std::max(wanted, ceil_div(args->length, kLongestPart));
  args->part = ceil_div(ceil_div(std::max<int64_t>(args->length, 1), wanted), step) * step;
  args->parts = static_cast<int>(std::max<int64_t>(ceil_div(args->length, args->part), 1));
}

bool multiple_of(int64_t bytes, int64_t size) { return bytes % size == 0; }

// True if rows are whole vectors, a constant stride apart.
bool is_aligned(const ReduceArgs& args, int64_t element) {
  return args.outer == 1 && args.length_stride == element &&
         multiple_of(reinterpret_cast<uintptr_t>(args.x), 16) &&
         multiple_of(args.inner_stride, 16) && multiple_of(args.length * element, 16);
}

// Rows that share a block: groups of lanes with one to eight rows each.
void choose_short_rows(DType dtype, bool max, int64_t row_bytes, ReduceLaunch* launch) {
  const ReduceArgs& args = launch->args;
  const int64_t element = dtype_bytes(dtype);
  const int64_t outputs = args.outer * args.inner;
  const bool aligned = is_aligned(args, element);
  const bool packed = args.outer == 1 && args.length_stride == element && args.length > 0 &&
                      args.inner_stride == row_bytes;
  const ReduceKernel* tiny =
      packed && args.length <= kReduceTinyLength
          ? find_rows(dtype, max, Kind::rows_tiny, static_cast<int>(args.length), 1)
          : nullptr;
  if (tiny != nullptr && multiple_of(reinterpret_cast<uintptr_t>(args.x), 16) &&
      multiple_of(reinterpret_cast<uintptr_t>(args.out), 16)) {
    launch->kernel = tiny;
    launch->block = outputs < kDefaultMultiprocessors * 2048 ? 64 : tiny->block;
    launch->grid = static_cast<unsigned>(
        std::min(ceil_div(outputs, launch->block * (16 / element)), kMostBlocks + 1));
    return;
  }
  if (packed && row_bytes <= (aligned ? 32 : 64 * element)) {
    launch->kernel = find_rows(dtype, max, Kind::rows_packed, 1, 1);
    launch->block = kReducePackedThreads;
    launch->grid = static_cast<unsigned>(std::min(
        ceil_div(outputs, reduce_packed_rows(static_cast<int>(row_bytes))), kMostBlocks + 1));
    return;
  }
  const int64_t likely = rows_to_choose_by(outputs);
  int lanes = 32, rows = 1;
  Kind kind = aligned ? Kind::rows_aligned : Kind::rows;
  if (aligned && row_bytes <= 128 && likely * 8 <= kDefaultMultiprocessors * 2048) {
    lanes = 8;  // a thread per vector: latency counts
  } else if (aligned && row_bytes <= 512) {
    kind = Kind::rows_turned;
    lanes = row_bytes <= 64 ? 4 : row_bytes <= 128 ? 8 : row_bytes <= 256 ? 16 : 32;
    rows = 8;
  } else if (aligned && row_bytes <= 1024 && likely >= kDefaultMultiprocessors * 16) {
    rows = 2;
  } else if (!aligned && row_bytes <= 256) {
    lanes = row_bytes <= 16 ? 1 : 8;
  }
  launch->kernel = find_rows(dtype, max, kind, lanes, rows);
  launch->block = lanes < 32 && kind != Kind::rows_turned ? 128 : 256;
  const auto blocks = [&] { return ceil_div(outputs, launch->block / lanes * rows); };
  while (launch->block > 64 && blocks() < kDefaultMultiprocessors * 2) launch->block /= 2;
  launch->grid = static_cast<unsigned>(std::min(blocks(), kMostBlocks + 1));
}

// The number of threads per row, with two vectors each at a time: the first that leaves few idle.
int lanes_for(int64_t vectors, bool parts) {
  if (parts) return vectors > 512 ? 512 : 256;
  int best = 0;
  int64_t least = INT64_MAX;
  for (const int lanes : {vectors >= 4096 ? 512 : 256, 128}) {
    const int64_t places = ceil_div(vectors, lanes * 2) * lanes * 2;
    if (places < least - least / 8) best = lanes, least = places;
  }
  return best;
}

// Rows with one or several blocks each.
void choose_long_rows(DType dtype, bool max, int64_t row_bytes, ReduceLaunch* launch) {
  constexpr int64_t kRoomFor = kDefaultMultiprocessors * 4;  // blocks of 512 threads
  ReduceArgs& args = launch->args;
  const int64_t outputs = args.outer * args.inner;
  const int64_t element = dtype_bytes(dtype);
  const bool aligned = is_aligned(args, element);
  const int64_t likely = rows_to_choose_by(outputs);
  int64_t parts = 1;
  if (likely < kRoomFor / 2) parts = std::min(kRoomFor / likely, row_bytes / 8192);
  bool cluster = false;
  if (parts > 1) {
    // The blocks of a cluster start and end together, which costs less than a second launch if they
    // have little to do.
    cluster = parts < kReduceMaxCluster || row_bytes <= 128 * 1024;
    if (cluster) {
      parts = parts >= 8 ? 8 : parts >= 4 ? 4 : 2;
    } else if (likely * 16 >= 128 && (row_bytes <= 1 << 20 || parts < 16)) {
      parts = 16;
    }
  }
  split(&args, std::max<int64_t>(parts, 1), 16 / element);
  args.cluster = cluster ? args.parts : 1;
  const int lanes = aligned ? lanes_for(ceil_div(args.part * element, 16), parts > 1) : 256;
  launch->kernel = find_rows(dtype, max, aligned ? Kind::rows_aligned : Kind::rows, lanes, 1);
  launch->block = lanes;
  launch->grid = static_cast<unsigned>(std::min(outputs * args.parts, kMostBlocks + 1));
}

// Rows that are not aligned for vectors.
void choose_shifted_columns(DType dtype, bool max, ReduceLaunch* launch) {
  ReduceArgs& args = launch->args;
  const int element = static_cast<int>(dtype_bytes(dtype));
  launch->kernel =
      find(KernelTable(reduce_columns_kernels), dtype, max, Kind::columns_shifted, 32, 0, 16, 0);
  launch->block = launch->kernel->block;
  const int64_t strips = args.outer * ceil_div(args.inner, reduce_shifted_width(32, element));
  int64_t parts = 1;
  if (strips < kDefaultMultiprocessors * 2 && !batch_invariant()) {
    // A multiple of the rows that a block's threads read at once.
    constexpr int64_t kTurn = 32;
    const int64_t wanted = ceil_div(kDefaultMultiprocessors * 5 / 2, strips);
    const int64_t rows = ceil_div(ceil_div(args.length, wanted), kTurn) * kTurn;
    parts = ceil_div(args.length, std::max(rows, 2 * kTurn));
  }
  split(&args, std::max<int64_t>(parts, 1), 1);
  launch->grid = static_cast<unsigned>(std::min(strips * args.parts, kMostBlocks + 1));
}

void choose_columns(DType dtype, bool max, int vector_bytes, bool may_split, ReduceLaunch* launch) {
  ReduceArgs& args = launch->args;
  const int64_t element = dtype_bytes(dtype);
  const int64_t bytes = args.outer * args.inner * args.length * element;
  const int64_t vectors = ceil_div(args.inner * element, vector_bytes);
  const auto strips = [&](int lanes) { return ceil_div(vectors, lanes) * args.outer; };
  int lanes = 8;
  unsigned block = 256;
  int64_t parts = 1;
  if (batch_invariant()) {
    // By the column's length alone; the second kernel's vectors would depend on the others.
    lanes = vector_bytes == 16 ? 8 : 32;
    if (vector_bytes == 16) parts = std::min(args.length / kInvariantPart, int64_t{128});
  } else if (vector_bytes != 16) {
    lanes = 32;
    if (strips(32) < kDefaultMultiprocessors * 2) {
      parts = std::min(ceil_div(kDefaultMultiprocessors * 8, strips(32)), args.length / 64);
    }
  } else if (args.length > 64 && args.length <= 128 && strips(16) >= kDefaultMultiprocessors * 2) {
    lanes = 16, block = 512;
  } else if (args.length <= 128 || strips(8) >= 1024) {
    // One block per strip.
  } else if (strips(8) >= 512 || (strips(8) >= 256 && args.length < 4096)) {
    block = 512;
  } else if (bytes <= (4 << 20) && args.length <= 2048) {
    lanes = 1;  // narrow strips use more multiprocessors
    block = args.length <= 512 ? 256 : 512;
  } else if (vectors >= 64) {
    lanes = 32, block = 512;  // four blocks per multiprocessor
    parts = std::min({4 * kDefaultMultiprocessors / strips(32), args.length / 128, int64_t{128}});
  } else if (vectors >= 32) {
    parts = std::min(6 * kDefaultMultiprocessors / strips(8), args.length / 128);
  } else {
    block = 512;
    lanes = vectors >= 8 ? 8 : vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
    parts = std::min((vectors > 8 ? 512 : 256) / strips(lanes), args.length / (512 / lanes * 4));
  }
  if (!may_split) parts = 1;
  split(&args, std::max<int64_t>(parts, 1), 1);
  launch->kernel = find_columns(dtype, max, vector_bytes, lanes, block);
  launch->block = block;
  launch->grid = static_cast<unsigned>(std::min(strips(lanes) * args.parts, kMostBlocks + 1));
}

bool down_columns(const ReduceArgs& args, int64_t element) {
  return args.inner > 1 && args.inner_stride == element && args.length_stride != element;
}

void choose_one(const ReduceArgs& args, DType dtype, bool max, bool may_split,
                ReduceLaunch* launch) {
  launch->args = args;
  launch->args.parts = launch->args.cluster = 1;
  launch->args.part = args.length;
  const int element = static_cast<int>(dtype_bytes(dtype));
  if (down_columns(args, element)) {
    const bool vectors = multiple_of(reinterpret_cast<uintptr_t>(args.x), 16) &&
                         multiple_of(args.length_stride, 16) &&
                         multiple_of(args.outer_stride, 16) &&
                         multiple_of(args.inner * element, 16);
    if (!vectors && may_split && args.inner >= 64 && args.inner < kLongestPart) {
      launch->vector_bytes = 16;
      choose_shifted_columns(dtype, max, launch);
      return;
    }
    launch->vector_bytes = vectors ? 16 : element;
    choose_columns(dtype, max, launch->vector_bytes, may_split, launch);
    return;
  }
  launch->vector_bytes = args.length_stride == element ? 16 : element;
  const int64_t row_bytes = args.length * element;
  if (row_bytes <= 4096 || !may_split) {
    choose_short_rows(dtype, max, row_bytes, launch);
  } else {
    choose_long_rows(dtype, max, row_bytes, launch);
  }
}

// The number of blocks that prefetch their data: 64 KiB per multiprocessor, 64 bytes per thread or,
// with eight rows per thread, twice that. They often wait for a call's tiny second kernel, which
// leaves the memory idle. Down the columns of small tensors the prefetch costs more than it gains.
int prefetch_blocks(const ReduceLaunch& launch, int64_t element) {
  const ReduceArgs& args = launch.args;
  const bool worth = down_columns(args, element)
                         ? args.outer * args.inner * args.length * element >= int64_t{64} << 20
                         : args.parts == 1;
  return worth ? static_cast<int>(kDefaultMultiprocessors * 1024 / launch.block) : 0;
}

}  // namespace

Status reduce_choose(const ReduceArgs& args, DType dtype, bool max, ReduceChoice* choice) {
  ReduceLaunch& first = choice->first;
  choose_one(args, dtype, max, true, &first);
  first.args.prefetch_blocks = prefetch_blocks(first, dtype_bytes(dtype));
  const int64_t outputs = args.outer * args.inner;
  if (first.grid > kMostBlocks) {
    return Status::Unimplemented("reduce: too many results for one launch, got " +
                                 std::to_string(outputs));
  }
  if (first.args.parts == 1 || first.args.cluster > 1) return Status();

  // Combines the parts' results, in the layout that the first kernel writes.
  const int64_t parts = first.args.parts;
  choice->workspace = outputs * parts;
  ReduceArgs again = args;
  again.x = nullptr;
  again.outer = 1;
  again.outer_stride = 0;
  again.inner = outputs;
  again.length = parts;
  const bool columns = down_columns(args, dtype_bytes(dtype));
  again.inner_stride = columns ? 4 : parts * 4;
  again.length_stride = columns ? outputs * 4 : 4;
  choose_one(again, DType::kFloat32, max, false, &choice->second);
  first.args.out_dtype = DType::kFloat32;
  first.args.divisor = 1.0f;
  return Status();
}

}  // namespace tiercel
