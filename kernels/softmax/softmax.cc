// SPDX-License-Identifier: Apache-2.0
#include "kernels/softmax/softmax.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/row_matrix.h"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {
namespace {

const char* op_name(bool log) { return log ? "log_softmax" : "softmax_online"; }

Status check_matrix(const Argument& argument, const Argument& like) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {like.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape_like(argument, like.view, last_size(like.view), "that of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, like));
  return check_cuda(argument);
}

Status check_scores(const Argument& argument) {
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(argument, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  if (argument.view.ndim == 0) {
    return Status::InvalidArgument(mismatch(argument, "have at least 1 dimension", "0 (shape [])"));
  }
  return check_cuda(argument);
}

// The offset of the first row from a multiple of 16 bytes.
uint64_t row_bits(const SoftmaxRows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % kSoftmaxVectorBytes;
}

// One of a call's matrices and its place in the kernel's arguments; `view` may be null.
struct Operand {
  const char* name;
  const TensorView* view;
  SoftmaxRows* rows;
};

template <int kCount>
Status lay_out(const char* op, const Operand (&operands)[kCount], SoftmaxArgs* args) {
  bool first = true;
  args->vectors = true;
  for (const Operand& operand : operands) {
    if (operand.view == nullptr) continue;
    RowMatrix matrix;
    TIERCEL_RETURN_IF_ERROR(join_rows({op, operand.name, *operand.view}, &matrix));
    if (matrix.columns > INT32_MAX / 2) {
      return Status::Unimplemented(std::string(op) + ": rows of up to " +
                                   std::to_string(INT32_MAX / 2) + " elements are supported, got " +
                                   std::to_string(matrix.columns));
    }
    args->rows = matrix.rows;
    args->columns = static_cast<int>(matrix.columns);
    const int64_t bytes = dtype_bytes(operand.view->dtype);
    char* data = static_cast<char*>(operand.view->data);
    const int64_t stride = matrix.rows == 1 ? 0 : matrix.row_stride * bytes;
    *operand.rows = {data, data + (matrix.rows - 1) * stride + matrix.columns * bytes, stride};
    // Vectors require that the rows of all matrices have equal offsets from a multiple of 16 bytes.
    args->vectors &=
        first || (row_bits(*operand.rows) == row_bits(args->x) &&
                  (operand.rows->row_stride - args->x.row_stride) % kSoftmaxVectorBytes == 0);
    first = false;
  }
  return Status();
}

// True if every row of every matrix begins at a multiple of 16 bytes.
bool all_aligned(const SoftmaxArgs& args) {
  return args.vectors && row_bits(args.x) == 0 && args.x.row_stride % kSoftmaxVectorBytes == 0;
}

Status lay_out_mask(const char* op, const TensorView& mask, const Argument& x, bool backward,
                    SoftmaxArgs* args) {
  const Argument argument{op, "mask", mask};
  if (backward) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kBool}));
  } else if (mask.dtype != DType::kBool && mask.dtype != x.view.dtype &&
             mask.dtype != DType::kFloat32) {
    return Status::TypeError(
        mismatch(argument, "have dtype bool, float32 or that of `x`", dtype_name(mask.dtype)));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape_like(argument, x.view, last_size(x.view), "that of `x`"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  if (args->rows == 0) return Status();
  SoftmaxMaskRows& rows = args->mask;
  const int64_t bytes = dtype_bytes(mask.dtype);
  rows.data = static_cast<const char*>(mask.data);
  rows.kind = mask.dtype == DType::kBool   ? SoftmaxMask::kKeep
              : mask.dtype == x.view.dtype ? SoftmaxMask::kAdd
                                           : SoftmaxMask::kAddFloat32;
  rows.step = last_size(mask) > 1 ? mask.strides[mask.ndim - 1] * bytes : bytes;
  rows.sizes[0] = rows.sizes[1] = 1;
  int64_t sizes[3] = {1, 1, 1};
  int place = 3;  // the dimension being joined, from the innermost
  for (int i = mask.ndim - 2; i >= 0; --i) {
    if (mask.shape[i] == 1) continue;
    const int64_t stride = mask.strides[i] * bytes;
    if (place == 3 || stride != rows.strides[place] * sizes[place]) {
      if (--place < 0) {
        return Status::Unimplemented(
            mismatch(argument, "be broadcast over dimensions that leave at most three",
                     "strides " + shape_text(mask.strides, mask.ndim) + " for shape " +
                         shape_text(mask.shape, mask.ndim)));
      }
      rows.strides[place] = stride;
    }
    sizes[place] *= mask.shape[i];
  }
  if (sizes[1] > UINT32_MAX || sizes[2] > UINT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too many rows for a mask, got " +
                                 std::to_string(args->rows));
  }
  rows.sizes[0] = static_cast<uint32_t>(sizes[1]);
  rows.sizes[1] = static_cast<uint32_t>(sizes[2]);
  // The mask of a vector, in loads of at most 16 bytes.
  const int64_t part = std::min<int64_t>(bytes * kSoftmaxVectorBytes / dtype_bytes(x.view.dtype),
                                         kSoftmaxVectorBytes);
  uint64_t bits = reinterpret_cast<uintptr_t>(rows.data);
  for (const int64_t stride : rows.strides) bits |= static_cast<uint64_t>(stride);
  rows.vectors = all_aligned(*args) && rows.step == bytes && bits % part == 0;
  return Status();
}

// The largest offset of a row from a multiple of 128 bytes.
int64_t line_shift(const SoftmaxRows& rows) {
  const int64_t step = std::gcd(rows.row_stride, int64_t{kSoftmaxLineBytes});
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data) % step) + kSoftmaxLineBytes -
         step;
}

struct Choice {
  const SoftmaxKernel* kernel = nullptr;
  unsigned block = 0;
  unsigned blocks = 1;  // per row
  int64_t grid = 0;
};

// Up to this many vectors, latency counts, not bytes in flight: 1024 per multiprocessor.
constexpr int64_t kFewVectors = kDefaultMultiprocessors * 1024;

// The rows that the batch-invariant mode chooses by: longer rows than 2000 columns of 16 bits then
// have the threads that suit many rows.
constexpr int64_t kInvariantRows = 512;

// The vectors per thread if whole blocks share a row (measured on an H200): few for low latency,
// many so that few threads have many bytes in flight.
int vectors_a_thread(bool backward, bool few, int64_t vectors) {
  if (few) return vectors <= 512 ? 1 : 2;
  if (backward) return vectors <= 512 ? 1 : vectors <= 1024 ? 2 : vectors <= 16384 ? 4 : 8;
  return vectors <= 2048 ? 4 : 8;
}

// The vectors that this many blocks of whole warps hold.
int64_t places(const SoftmaxKernel& kernel, unsigned blocks, int64_t vectors) {
  const int64_t of_warps = int64_t{32} * kernel.vectors * blocks;
  return round_up(vectors, of_warps);
}

// Chooses the fewest small blocks that hold a row: their threads wait for each other no longer in a
// cluster than in one large block, while blocks of other rows continue. (128 threads are 1 % faster
// than 256 with 8 aligned vectors of 16-bit scores each.)
bool fit_blocks(const SoftmaxKernel& kernel, bool few, int64_t vectors, int64_t rows,
                Choice* choice) {
  const bool small = kernel.vectors >= 4 || (few && kernel.vectors > 1);
  const bool packed = kernel.dtype != DType::kFloat32 && kernel.aligned && kernel.vectors == 8;
  const int smallest = packed && !few ? 128 : 256;
  const int64_t most = small ? std::min(kernel.threads, smallest) : kernel.threads;
  const int64_t alone = few && kernel.vectors > 1 ? 512 : most;  // threads of a single block
  const unsigned limit = few ? kSoftmaxBlocks : kernel.blocks;
  unsigned blocks = 1;
  while (blocks < limit && vectors > blocks * most * kernel.vectors &&
         vectors > alone * kernel.vectors) {
    blocks *= 2;
  }
  while (blocks < kSoftmaxBlocks &&
         vectors > static_cast<int64_t>(blocks) * kernel.threads * kernel.vectors) {
    blocks *= 2;
  }
  if (!few && !kernel.aligned && kernel.vectors == 8) {
    // Allows any number of blocks if a sixteenth or more of the vectors' places would be empty.
    int64_t least = places(kernel, blocks, vectors) * 15 / 16;
    for (unsigned count = 2; count <= kSoftmaxBlocks; ++count) {
      const int64_t all = places(kernel, count, vectors);
      if (all < least && all <= count * most * kernel.vectors) blocks = count, least = all;
    }
  }
  const int64_t part = ceil_div(vectors, blocks);
  const int64_t warps = ceil_div(part, 32 * kernel.vectors);
  if (32 * warps > kernel.threads || warps * blocks > kSoftmaxWarps) return false;
  *choice = {&kernel, static_cast<unsigned>(32 * std::max<int64_t>(warps, 2)), blocks,
             rows * blocks};
  return true;
}

// Chooses the threads that share a row. `vectors`: per row, one more if a row may begin within one.
Choice choose(DType dtype, bool backward, bool masked, bool aligned, int64_t vectors,
              const SoftmaxArgs& args) {
  const bool few = rows_to_choose_by(args.rows, kInvariantRows) * vectors <= kFewVectors;
  // An added mask's loads wait for each other; fewer per thread, if the block stays small.
  const bool adds =
      args.mask.kind == SoftmaxMask::kAdd || args.mask.kind == SoftmaxMask::kAddFloat32;
  const int wanted = adds && !few && vectors <= 256 ? 2 : vectors_a_thread(backward, few, vectors);
  // Rows of whole blocks are numbered from a line.
  const int64_t bytes = args.columns * dtype_bytes(dtype) + line_shift(args.x);
  const int64_t of_blocks =
      aligned || !args.vectors ? vectors : ceil_div(bytes, kSoftmaxVectorBytes);
  Choice best;
  for (const SoftmaxKernel& kernel :
       KernelTable(backward ? softmax_backward_kernels : softmax_forward_kernels)) {
    if (kernel.dtype != dtype || kernel.masked != masked) continue;
    if (kernel.aligned != aligned && kernel.vectors != 0) continue;
    if (kernel.lanes > 0) {
      if (static_cast<int64_t>(kernel.lanes) * kernel.vectors < vectors) continue;
      const unsigned block = kernel.vectors > 2   ? 64
                             : kernel.vectors > 1 ? 128
                                                  : kSoftmaxLaneThreads;
      const int64_t rows = block / kernel.lanes;
      return {&kernel, block, 1, ceil_div(args.rows, rows)};
    }
    // The kernels of a form are sorted by vectors per thread; the one for any row (0) precedes the
    // widest. A kernel with more vectors replaces a narrower one and the one for any row.
    if (kernel.vectors == 0) {
      if (best.kernel == nullptr) {
        const unsigned blocks = few ? kSoftmaxBlocks : 4;
        best = {&kernel, few ? 512u : 256u, blocks, args.rows * blocks};
      }
      continue;
    }
    const bool better = best.kernel == nullptr || best.kernel->vectors < wanted;
    if (better) fit_blocks(kernel, few, of_blocks, args.rows, &best);
  }
  return best;
}

Status finish(const char* op, DType dtype, bool backward, bool masked, SoftmaxArgs* args,
              Choice* choice, SoftmaxPlan* plan) {
  *plan = {"none", 0, 0, args->vectors, 0, 0};
  if (args->rows == 0 || args->columns == 0) return Status();
  const int64_t per_vector = kSoftmaxVectorBytes / dtype_bytes(dtype);
  const bool aligned = all_aligned(*args);
  const int64_t columns = args->columns + (aligned ? 0 : per_vector - 1);
  const int64_t vectors = ceil_div(columns, per_vector);
  const bool keeps = !backward && args->mask.kind == SoftmaxMask::kKeep && args->mask.vectors;
  const bool whole = aligned && (!masked || keeps) && columns % per_vector == 0;
  *choice = choose(dtype, backward, masked, whole, vectors, *args);
  args->blocks = choice->blocks;
  if (choice->grid > INT32_MAX) {
    return Status::Unimplemented(std::string(op) + ": too many rows for one launch, got " +
                                 std::to_string(args->rows));
  }
  const int lanes = choice->kernel->lanes;
  plan->kernel = choice->kernel->kernel.name();
  plan->threads_per_row = lanes > 0 ? lanes : static_cast<int>(choice->block * choice->blocks);
  plan->blocks_per_row = lanes > 0 ? 0 : static_cast<int>(choice->blocks);
  plan->grid = static_cast<unsigned>(choice->grid);
  plan->block = choice->block;
  return Status();
}

Status set_scale(const char* op, float scale, SoftmaxArgs* args) {
  if (scale == 0.0f) {
    return Status::Unimplemented(std::string(op) + ": a scale other than 0 is supported, got 0");
  }
  args->scale = scale;
  args->pad = scale < 0.0f ? INFINITY : -INFINITY;
  return Status();
}

Status prepare(const SoftmaxCall& call, SoftmaxArgs* args, Choice* choice, SoftmaxPlan* plan) {
  const char* op = op_name(call.log);
  const Argument x{op, "x", *call.x};
  const Argument out{op, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_scores(x));
  TIERCEL_RETURN_IF_ERROR(check_matrix(out, x));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  args->log = call.log;
  TIERCEL_RETURN_IF_ERROR(set_scale(op, call.scale, args));
  const Operand operands[] = {{"x", call.x, &args->x}, {"out", call.out, &args->out}};
  TIERCEL_RETURN_IF_ERROR(lay_out(op, operands, args));
  if (call.mask != nullptr) {
    TIERCEL_RETURN_IF_ERROR(lay_out_mask(op, *call.mask, x, false, args));
  }
  return finish(op, call.x->dtype, false, call.mask != nullptr, args, choice, plan);
}

Status prepare(const SoftmaxBackwardCall& call, SoftmaxArgs* args, Choice* choice,
               SoftmaxPlan* plan) {
  const char* op = op_name(call.log);
  const Argument y{op, "y", *call.y};
  const Argument grad{op, "grad", *call.grad};
  const Argument x_grad{op, "x_grad", *call.x_grad};
  TIERCEL_RETURN_IF_ERROR(check_scores(y));
  TIERCEL_RETURN_IF_ERROR(check_matrix(grad, y));
  TIERCEL_RETURN_IF_ERROR(check_matrix(x_grad, y));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(x_grad));
  args->log = call.log;
  args->scale = call.scale;
  const Operand operands[] = {{"y", call.y, &args->x},
                              {"grad", call.grad, &args->grad},
                              {"x_grad", call.x_grad, &args->out}};
  TIERCEL_RETURN_IF_ERROR(lay_out(op, operands, args));
  if (call.mask != nullptr) {
    TIERCEL_RETURN_IF_ERROR(lay_out_mask(op, *call.mask, y, true, args));
  }
  return finish(op, call.y->dtype, true, call.mask != nullptr, args, choice, plan);
}

Status launch(const Choice& choice, int blocks, SoftmaxArgs* args, int device, void* stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(choice.grid / choice.blocks * blocks);
  config.block.x = choice.block * choice.blocks / blocks;
  config.cluster.x = args->blocks = blocks;
  config.dependent = true;
  // Registers for eight vectors per thread halve the number of threads. (Measured on an H200:
  // prefetching all that resident threads will load costs up to a sixth of the time.)
  args->prefetch_blocks =
      resident_blocks(config.block) * 3 / (choice.kernel->vectors == 8 ? 16 : 8);
  void* pointers[] = {args};
  return choice.kernel->kernel.launch(config, device, stream, pointers);
}

template <typename Call>
Status run(const Call& call, int device, void* stream) {
  SoftmaxArgs args{};
  Choice choice;
  SoftmaxPlan plan;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice, &plan));
  if (choice.kernel == nullptr) return Status();
  if (choice.blocks <= kSoftmaxBlocks) return launch(choice, choice.blocks, &args, device, stream);
  // Larger clusters fit on a whole GPU, but maybe not on a share of one. A share that the number of
  // multiprocessors does not reveal (a green context) refuses them.
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  if (multiprocessors >= kDefaultMultiprocessors &&
      launch(choice, choice.blocks, &args, device, stream).ok()) {
    return Status();
  }
  return launch(choice, choice.blocks / 2, &args, device, stream);
}

template <typename Call>
Status plan_of(const Call& call, SoftmaxPlan* plan) {
  SoftmaxArgs args{};
  Choice choice;
  return prepare(call, &args, &choice, plan);
}

}  // namespace

Status softmax_plan(const SoftmaxCall& call, SoftmaxPlan* plan) { return plan_of(call, plan); }

Status softmax_backward_plan(const SoftmaxBackwardCall& call, SoftmaxPlan* plan) {
  return plan_of(call, plan);
}

Status softmax(const SoftmaxCall& call, void* stream) {
  return run(call, call.x->device_index, stream);
}

Status softmax_backward(const SoftmaxBackwardCall& call, void* stream) {
  return run(call, call.y->device_index, stream);
}

Status softmax_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(softmax_forward_kernels).load_all(device));
  return KernelTable(softmax_backward_kernels).load_all(device);
}

}  // namespace tiercel
