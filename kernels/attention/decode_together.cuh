// SPDX-License-Identifier: Apache-2.0
// decode_together: decode_attention where a block takes 8 key heads of a sequence's keys at once.
//
// The floor is decode_attention.cuh's, and so are the products. Memory is fastest when what lies
// side by side is asked for at the same time, and by few: here a key's row of all 8 heads, 1 or
// 2 KiB, is one request of the copy engine (cp.async.bulk), at any page size.
//
// The plan. One block a multiprocessor, with an equal share of the steps of all sequences (16 to
// 64 keys each), one sequence after the other. One warp asks for the bytes of each step as soon as
// a stage of the ring in shared memory is free (three stages, 192 KiB), the next sequence's while
// the others still work at the last. Eight warps have a head each: no two of them exchange
// anything, their queries and sums stay in registers. What several blocks have of a sequence, the
// last to arrive puts together (decode_parts.cuh).
#ifndef KERNELS_ATTENTION_DECODE_TOGETHER_CUH_
#define KERNELS_ATTENTION_DECODE_TOGETHER_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/attention/decode_parts.cuh"
#include "kernels/attention/decode_warp.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"

namespace tiercel {

// What the warps have to know of a stage.
struct StageWork {
  int b;  // sequence, or negative: there are no more
  int heads;  // which 8 of them
  int key;
  int length, prefix;
  int slot;  // of the workspace, or kWhole
  int first_block, parts;
  bool begins, ends;  // the block's part of the sequence
};

template <typename Shape>
struct TogetherShared {
  alignas(128) unsigned char stages[Shape::kStages][Shape::kStage];
  uint64_t full[Shape::kStages];
  uint64_t empty[Shape::kStages];
  StageWork work[Shape::kStages];
  ShareCursor cursor;
  int64_t scratch[kTogetherThreads / 32];
};

// Goes through a block's steps, ahead of the copies: it reads the page table.
template <typename Shape>
struct StepReader {
  static constexpr int kEntries = Shape::kStep > 32 ? Shape::kStep / 32 : 1;
  struct Step {
    StageWork work;
    int32_t page[kEntries];  // of this lane's keys
    int32_t place[kEntries];
  };

  const DecodeArgs& args;
  ShareCursor cursor;
  int at;  // step of the tile, negative: a tile is to be entered

  __device__ __forceinline__ StepReader(const DecodeArgs& given, const ShareCursor& start)
      : args(given), cursor(start), at(-1) {}

  __device__ __forceinline__ void next(Step* step) {
    StageWork& work = step->work;
    if (at < 0) {
      work.b = -1;
      if (cursor.at >= cursor.end) return;
      enter_tile<Shape::kStep>(args, &cursor);
      at = cursor.first;
    }
    const Sequence<Shape::kStep> sequence(args, cursor.tile.b);
    work.b = cursor.tile.b;
    work.heads = cursor.tile.head;
    work.key = sequence.first_key(at);
    work.length = sequence.length;
    work.prefix = sequence.prefix;
    work.slot = static_cast<int>(cursor.slot);
    work.first_block = cursor.first_block;
    work.parts = cursor.parts;
    work.begins = at == cursor.first;
    work.ends = at + 1 == cursor.last;
    const int32_t* table = args.page_table + work.b * args.table_stride;
    // Keys past the sequence's last are that one again; of an empty one none are copied.
    const int last = max(sequence.length - 1, 0), lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int key = min(work.key + (32 * i + lane) % Shape::kStep, last);
      step->page[i] = table[key >> args.page_bits];
      step->place[i] = key & ((1 << args.page_bits) - 1);
    }
    if (++at < cursor.last) return;
    leave_tile(args, &cursor);
    at = -1;
  }
};

template <typename Shape>
__device__ __forceinline__ void copy_rows(const DecodeArgs& args,
                                          const typename StepReader<Shape>::Step& step,
                                          unsigned char* stage, uint64_t* full) {
  constexpr int kBytes = Shape::kHeads * Shape::kRowBytes;  // of a key
  constexpr int kEntries = StepReader<Shape>::kEntries;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Shape::kStep / 16; ++i) {
    const int row = (32 * i + lane) % Shape::kStep;
    const bool values = 32 * i + lane >= Shape::kStep;
    const DecodeStrides& strides = values ? args.v_strides : args.k_strides;
    const char* from = (values ? args.v : args.k) +
                       static_cast<int64_t>(step.work.heads) * Shape::kHeads * strides.head +
                       static_cast<int64_t>(step.page[i % kEntries]) * strides.page +
                       static_cast<int64_t>(step.place[i % kEntries]) * strides.place;
    bulk_load(stage + (values ? Shape::kHalf : 0) + row * Shape::kPitch, from, kBytes, full);
  }
}

template <typename Shape>
__device__ __forceinline__ void produce(const DecodeArgs& args, TogetherShared<Shape>* shared) {
  constexpr uint32_t kBytes = 2 * Shape::kStep * Shape::kHeads * Shape::kRowBytes;
  const bool first = threadIdx.x % 32 == 0;
  StepReader<Shape> reader(args, shared->cursor);
  typename StepReader<Shape>::Step ahead[Shape::kStages];
#pragma unroll
  for (int i = 0; i < Shape::kStages; ++i) reader.next(&ahead[i]);
  for (uint32_t parity = 1;; parity ^= 1) {
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) {
      const StageWork& work = ahead[i].work;
      const bool real = work.b >= 0 && work.length > 0;
      mbarrier_wait(&shared->empty[i], parity);
      if (first) {
        shared->work[i] = work;
        mbarrier_expect(&shared->full[i], real ? kBytes : 0);
      }
      if (work.b < 0) return;
      __syncwarp();
      if (real) copy_rows<Shape>(args, ahead[i], shared->stages[i], &shared->full[i]);
      reader.next(&ahead[i]);
    }
  }
}

// One head's queries as the products take them, in registers. float8 caches are multiplied in
// float16: see QueryLoader.
template <typename Shape>
struct HeadQueries {
  static constexpr bool kScaled = Shape::kFloat8 && !std::is_same_v<typename Shape::Format, Float16>;
  uint32_t words[Shape::kFragments][4];
  float unit;  // the power of 2 that this lane's row was divided by

  __device__ __forceinline__ void load(const DecodeArgs& args, int b, int key_head) {
    const int lane = threadIdx.x % 32, r = lane / 4, i = lane % 4;
    const char* from = args.q + b * args.q_strides[0] + r / args.group * args.q_strides[1] +
                       (key_head * args.group + r % args.group) * args.q_strides[2];
#pragma unroll
    for (int f = 0; f < Shape::kFragments; ++f) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        // As QueryLoader::store deals words out.
        const int d = Shape::kFloat8 ? 8 * (2 * (c / 2) + i / 2) + 2 * (2 * (i % 2) + c % 2)
                                     : 8 * c + 2 * i;
        words[f][c] = 0;
        if (r < args.rows) {
          words[f][c] = *reinterpret_cast<const uint32_t*>(from + (32 * f + d) * 2);
        }
      }
    }
    unit = 1.0f;
    if constexpr (kScaled) scale();
  }

  __device__ __forceinline__ void scale() {
    using Format = typename Shape::Format;
    float size = 0.0f;
#pragma unroll
    for (int f = 0; f < Shape::kFragments; ++f) {
      float values[8];
      unpack<Format, 4>(words[f], values);
#pragma unroll
      for (int i = 0; i < 8; ++i) size = fmaxf(size, fabsf(values[i]));
    }
    unit = query_unit(lanes_reduce<4>(size, Max()));
    const float down = 1.0f / unit;
#pragma unroll
    for (int f = 0; f < Shape::kFragments; ++f) {
      float values[8];
      unpack<Format, 4>(words[f], values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= down;
      pack<Float16, 4>(values, words[f]);
    }
  }
};

// What a warp has of one head: lanes as in WarpState, sums over all lanes.
template <typename Shape>
struct HeadParts {
  static constexpr int kVectors = Shape::kD / 16;

  const DecodeArgs& args;
  const StageWork& work;
  int head;  // of the 8

  __device__ __forceinline__ int64_t place(int64_t slot) const {
    return slot * Shape::kHeads + head;
  }
  __device__ __forceinline__ float4* vectors(int64_t slot) const {
    return reinterpret_cast<float4*>(args.partial) + place(slot) * kVectors * 32 + threadIdx.x % 32;
  }
  // The lane's two rows.
  __device__ __forceinline__ float4* sums(int64_t slot) const {
    return reinterpret_cast<float4*>(args.partial_sums) + place(slot) * (Shape::kRows / 2) +
           threadIdx.x % 4;
  }
  __device__ __forceinline__ bool real() const {
    return 2 * static_cast<int>(threadIdx.x % 4) < args.rows;
  }

  __device__ __forceinline__ void store(const WarpState<Shape>& state) const {
    if (!real()) return;
    float4* to = vectors(work.slot);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const float (&c)[4] = state.out[0][m];
      to[m * 32] = make_float4(c[0], c[1], c[2], c[3]);
    }
    if (threadIdx.x % 32 < 4) {
      *sums(work.slot) =
          make_float4(state.largest[0], state.sum[0], state.largest[1], state.sum[1]);
    }
  }

  // All parts, in their order.
  __device__ __forceinline__ void load(WarpState<Shape>* state) const {
    state->clear();
    if (!real()) return;
    for (int at = 0; at < work.parts; ++at) {
      const float4 both = __ldcg(sums(part_slot(work.first_block, 1, at)));
      state->largest[0] = fmaxf(state->largest[0], both.x);
      state->largest[1] = fmaxf(state->largest[1], both.z);
    }
#pragma unroll 2
    for (int at = 0; at < work.parts; ++at) {
      const int64_t slot = part_slot(work.first_block, 1, at);
      const float4 both = __ldcg(sums(slot));
      const float largest[2] = {both.x, both.z}, sum[2] = {both.y, both.w};
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = largest[r] == -INFINITY ? 0.0f : power_of_2(largest[r] - state->largest[r]);
        state->sum[r] += sum[r] * factor[r];
      }
      const float4* from = vectors(slot);
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        const float4 c = __ldcg(from + m * 32);
        float (&out)[4] = state->out[0][m];
        out[0] += c.x * factor[0], out[1] += c.y * factor[1];
        out[2] += c.z * factor[0], out[3] += c.w * factor[1];
      }
    }
  }
};

template <typename Shape>
__device__ __forceinline__ void store_head(const DecodeArgs& args, int b, int key_head,
                                           const WarpState<Shape>& state) {
  using Format = typename Shape::Format;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = scale_of(args.v_scale, args.v_scale_per_head, key_head);
  const float factor[2] = {normalizer(state.sum[0], scale), normalizer(state.sum[1], scale)};
  // Turned, a lane has dimensions of row g.
  const int query = g / args.group, head = key_head * args.group + g % args.group;
  char* to = args.out + b * args.out_strides[0] + query * args.out_strides[1] +
             head * args.out_strides[2];
#pragma unroll
  for (int m = 0; m < Shape::kD / 16; ++m) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float rows[2] = {state.out[0][m][2 * i] * factor[0],
                             state.out[0][m][2 * i + 1] * factor[1]};
      words[i] = warp_transpose(Format::pack(rows));
    }
    if constexpr (Shape::kFloat8) {
      // Even dimensions and odd ones.
      const uint32_t pairs[2] = {__byte_perm(words[0], words[1], 0x5410),
                                 __byte_perm(words[0], words[1], 0x7632)};
      if (g < args.rows) store_vector(to + (16 * m + 4 * t) * 2, pairs);
    } else if (g < args.rows) {
      *reinterpret_cast<uint32_t*>(to + (16 * m + 2 * t) * 2) = words[0];
      *reinterpret_cast<uint32_t*>(to + (16 * m + 8 + 2 * t) * 2) = words[1];
    }
  }
  if (args.lse == nullptr || g != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * t + r;
    if (row >= args.rows) continue;
    const int64_t line = static_cast<int64_t>(b) * args.heads + key_head * args.group;
    args.lse[(line + row % args.group) * args.queries + row / args.group] =
        log_of_sum(state.largest[r], state.sum[r]);
  }
}

template <typename Shape>
__device__ __forceinline__ void consume(const DecodeArgs& args, int head,
                                        TogetherShared<Shape>* shared) {
  const int lane = threadIdx.x % 32;
  HeadQueries<Shape> queries;
  Rows<Shape> rows;
  WarpState<Shape> state;
  for (int i = 0, parity = 0;;) {
    mbarrier_wait(&shared->full[i], parity);
    const StageWork work = shared->work[i];
    if (work.b < 0) return;
    const int key_head = work.heads * Shape::kHeads + head;
    const Sequence<Shape::kStep> sequence(args, work.length, work.prefix);
    if (work.begins) {
      queries.load(args, work.b, key_head);
      set_rows<Shape>(args, {work.b, key_head, 0}, work.length, &rows, [&](int row) {
        return __shfl_sync(kFullWarp, queries.unit, 4 * row);
      });
      state.clear();
    }
    if (work.length > 0) {
      const uint32_t keys = shared_address(shared->stages[i]) + head * Shape::kRowBytes;
      float s[1][Shape::kBlocks][4];
      scores<Shape>(
          keys,
          [&](int, int f) {
            const uint32_t (&words)[4] = queries.words[f];
            return make_uint4(words[0], words[1], words[2], words[3]);
          },
          s);
      softmax<Shape>(args, rows, sequence, work.key, s, &state);
      sums<Shape>(keys + Shape::kHalf, s, &state);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared->empty[i]);
    if (++i == Shape::kStages) i = 0, parity ^= 1;
    if (!work.ends) continue;

#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], offset);
      }
    }
    if (work.slot != kWhole) {
      const HeadParts<Shape> parts{args, work, head};
      parts.store(state);
      if (!arrive_last(args.arrived + head, Shape::kHeads, work.slot, work.first_block, 1,
                       work.parts)) {
        continue;
      }
      parts.load(&state);
    }
    store_head<Shape>(args, work.b, key_head, state);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kTogetherThreads, 1)
    decode_together(const __grid_constant__ DecodeArgs args) {
  static_assert(Shape::kTiles == 1 && !Shape::kAnyD && Shape::kHeads == kTogetherHeads);
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  TogetherShared<Shape>& shared = *reinterpret_cast<TogetherShared<Shape>*>(dynamic_shared);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], Shape::kHeads);
    }
    mbarrier_init_fence();
  }
  grid_dependency_wait();
  grid_dependency_launch();
  start_share<Shape::kStep, kTogetherThreads>(args, shared.scratch, &shared.cursor);
  if (shared.cursor.at >= shared.cursor.end) return;
  const int warp = threadIdx.x / 32;
  if (warp == Shape::kHeads) {
    produce<Shape>(args, &shared);
  } else {
    consume<Shape>(args, warp, &shared);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_TOGETHER_CUH_
