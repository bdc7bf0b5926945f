// SPDX-License-Identifier: Apache-2.0
#include "kernels/transpose/copy_transpose.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/transpose/copy_transpose_kernels.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "copy_transpose";
// Larger problems count as large.
constexpr int64_t kSmallBytes = int64_t{6} << 20;
// The bytes that a large problem prefetches: 64 KiB per multiprocessor.
constexpr int kPrefetchedBytes = kDefaultMultiprocessors * 64 * 1024;

struct Choice {
  const CopyTransposeKernel* kernel = nullptr;
  unsigned grid = 0;
};

Status check(const TensorView& x, const TensorView& out, int64_t tile_size) {
  const Argument x_arg{kOp, "x", x};
  const Argument out_arg{kOp, "out", out};
  if (x.ndim != 2 && x.ndim != 3) {
    return Status::InvalidArgument(
        mismatch(x_arg, "have 2 or 3 dimensions",
                 std::to_string(x.ndim) + " (shape " + shape_text(x.shape, x.ndim) + ")"));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(
      x_arg,
      {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kFloat8E5M2,
       DType::kInt8, DType::kUInt8, DType::kBool, DType::kInt16, DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out_arg, {x.dtype}));
  if (x.ndim == 2) {
    TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {x.shape[1], x.shape[0]}, "[N, M]"));
  } else {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(out_arg, {x.shape[0], x.shape[2], x.shape[1]}, "[B, N, M]"));
  }
  if (tile_size != 0 && tile_size != 32 && tile_size != 64 && tile_size != 128) {
    return Status::InvalidArgument(std::string(kOp) + ": `tile_size` must be 32, 64 or 128, got " +
                                   std::to_string(tile_size));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(x_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out_arg, x_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out_arg));
  return check_contiguous(out_arg);
}

// The widest vector that the addresses and strides of both sides allow.
int widest_vector(const CopyTransposeArgs& args, int element) {
  if (args.column_stride != element) return element;
  uint64_t bits = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.out) |
                  static_cast<uint64_t>(args.rows * element) |
                  static_cast<uint64_t>(args.columns * element) |
                  static_cast<uint64_t>(args.row_stride) | static_cast<uint64_t>(args.batch_stride);
  int width = 16;
  while (width > element && bits % width != 0) width /= 2;
  return width;
}

// The size of each of `count` parts, a multiple of `step`.
int part_of(int64_t size, int64_t count, int step) {
  return static_cast<int>(round_up(ceil_div(size, count), step));
}

// The first kernel of this element size and tile that the alignment allows.
const CopyTransposeKernel* find(int element, int rows, int columns, int vector,
                                bool whole = false) {
  for (const CopyTransposeKernel& kernel : KernelTable(copy_transpose_kernels)) {
    if (kernel.element_bytes == element && kernel.tile_rows == rows &&
        kernel.tile_columns == columns && kernel.vector_bytes <= vector && kernel.whole == whole) {
      return &kernel;
    }
  }
  return nullptr;
}

// True if tiles can have whole columns: matrices begin on 16 bytes, and a tile fits.
bool has_whole_columns(const CopyTransposeArgs& args, int element) {
  return args.rows <= 256 && args.column_stride == element &&
         (reinterpret_cast<uint64_t>(args.out) |
          static_cast<uint64_t>(args.rows * args.columns * element)) %
                 16 ==
             0;
}

// Large tiles read and write longer runs; small ones fill the multiprocessors sooner. Measured on
// an H200.
const CopyTransposeKernel* choose(const CopyTransposeArgs& args, int64_t batch, int element,
                                  int vector) {
  const int64_t bytes = args.rows * args.columns * batch * element;
  const bool large = bytes > kSmallBytes;
  // A tile that is mostly outside costs more than its longer runs gain.
  const int64_t shorter = std::min(args.rows, args.columns);
  if (vector == 16 && large && shorter >= 96) {
    if (element == 1) return find(1, args.rows >= 192 ? 256 : 128, 128, vector);
    return element == 2 ? find(2, 128, 128, vector) : find(4, 64, 64, vector);
  }
  int tile = element == 4 ? 32 : 64;
  if (vector != 16 && large && shorter >= 96) {
    if (element == 2 && has_whole_columns(args, element)) {
      return args.rows <= 128 ? find(2, 128, 128, vector, true) : find(2, 256, 64, vector, true);
    }
    if (element == 2) return find(2, 64, 128, vector);
    tile = element == 1 ? 128 : 64;
  }
  if (shorter <= 32 || bytes < kDefaultMultiprocessors * tile * tile * element / 2) tile = 32;
  return find(element, tile, tile, vector);
}

Status prepare(const TensorView& x, const TensorView& out, int64_t tile_size,
               CopyTransposeArgs* args, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(x, out, tile_size));
  const int element = static_cast<int>(dtype_bytes(x.dtype));
  const int first = x.ndim - 2;
  args->x = static_cast<const char*>(x.data);
  args->out = static_cast<char*>(out.data);
  const int64_t batch = x.ndim == 3 ? x.shape[0] : 1;
  args->rows = x.shape[first];
  args->columns = x.shape[first + 1];
  // Strides of dimensions of size 1 do not matter.
  args->batch_stride = batch > 1 ? x.strides[0] * element : 0;
  args->row_stride = args->rows > 1 ? x.strides[first] * element : 0;
  args->column_stride = args->columns > 1 ? x.strides[first + 1] * element : element;
  if (batch == 0 || args->rows == 0 || args->columns == 0) return Status();
  args->end = args->x + (batch - 1) * args->batch_stride + (args->rows - 1) * args->row_stride +
              (args->columns - 1) * args->column_stride + element;

  const int tile = static_cast<int>(tile_size);
  const int vector = widest_vector(*args, element);
  choice->kernel =
      tile != 0 ? find(element, tile, tile, vector) : choose(*args, batch, element, vector);
  args->tile_height = choice->kernel->tile_rows;
  args->tile_width = choice->kernel->tile_columns;
  const CopyTransposeKernel& kernel = *choice->kernel;
  const bool chooses = tile == 0 && kernel.vector_bytes == element;
  if (kernel.whole) {
    args->tile_height = static_cast<int>(args->rows);
    args->group = static_cast<int>(16 / std::gcd(args->rows * element, int64_t{16}));
  }
  // The multiples, in bytes and columns, at which rows of tiles begin.
  uint64_t begins = reinterpret_cast<uint64_t>(args->x) |
                    static_cast<uint64_t>(args->row_stride | args->batch_stride);
  if (kernel.whole) begins |= static_cast<uint64_t>(args->group * element);
  const int least = static_cast<int>(std::gcd(begins, uint64_t{16}));
  const int step = kernel.whole ? args->group : std::max(least / element, 1);
  if (chooses && args->tile_width >= 64) {
    // The lanes of a row cover the tile's width, wherever it begins in a chunk.
    args->tile_width = (args->tile_width - (16 - least) / element) / step * step;
  }
  const int64_t down = ceil_div(args->rows, args->tile_height);
  const int64_t across = ceil_div(args->columns, args->tile_width);
  if (down > 0x7fffffff / across / batch) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(x.shape, x.ndim));
  }
  if (chooses) {
    // Keeps the number of tiles and makes them nearly equal in size: small tiles at the edges take
    // as long as whole ones.
    if (!kernel.whole) {
      args->tile_height =
          part_of(args->rows, down, copy_transpose_run(element, kernel.tile_rows) / element);
    }
    args->tile_width = part_of(args->columns, across, step);
  }
  if (args->rows * args->columns * batch * element > kSmallBytes) {
    args->prefetch_blocks = kPrefetchedBytes / (args->tile_height * args->tile_width * element);
    if (kernel.whole) args->prefetch_blocks /= 2;  // 1 % faster on an H200
  }
  args->tile_rows = static_cast<int>(down);
  args->tile_columns = static_cast<int>(across);
  choice->grid = static_cast<unsigned>(down * across * batch);
  return Status();
}

}  // namespace

Status copy_transpose_plan(const CopyTransposeCall& call, CopyTransposePlan* plan) {
  CopyTransposeArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(*call.x, *call.out, call.tile_size, &args, &choice));
  *plan = {"none", 0, 0, 0, 0, 0};
  if (choice.kernel != nullptr) {
    const CopyTransposeKernel& kernel = *choice.kernel;
    *plan = {kernel.kernel.name(), args.tile_height, args.tile_width,
             kernel.vector_bytes,  choice.grid,      kernel.block};
  }
  return Status();
}

Status copy_transpose(const CopyTransposeCall& call, void* stream) {
  CopyTransposeArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(*call.x, *call.out, call.tile_size, &args, &choice));
  if (choice.kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = choice.kernel->block;
  config.dynamic_smem = choice.kernel->dynamic_smem;
  if (choice.kernel->whole) {  // L1 gets the memory that shared memory leaves
    const CopyTransposeKernel& kernel = *choice.kernel;
    config.dynamic_smem -= static_cast<uint32_t>((kernel.tile_rows - args.tile_height) *
                                                 (kernel.tile_columns * kernel.element_bytes + 16));
  }
  config.dependent = true;
  void* pointers[] = {&args};
  return choice.kernel->kernel.launch(config, call.x->device_index, stream, pointers);
}

}  // namespace tiercel
