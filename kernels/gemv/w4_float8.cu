// SPDX-License-Identifier: Apache-2.0
// w4_linear for activations of e4m3: out[t, n] = act(x_scale[t] * sum over k of x[t, k] *
// weight[n, k] + bias[n]), the weight in 4 bits.
//
// The plan is that of w4_tiles.cu: rows of the weight are the product's rows, decoded in registers
// as the A operand of wgmma, tokens are its columns, and the blocks of a cluster split K. Products
// are in e4m3, which holds every 4-bit number exactly, at twice the rate of 16 bits.
//  - A thread needs 2 bytes of each 8 of its row. It loads the word that has them, so that the 16
//    bytes for 32 values of K are two loads of 4 bytes, and looks up e4m3 with byte permutations:
//    10 instructions for 8 weights of e2m1, 12 for 8 whole numbers, whose table of 16 bytes comes
//    from shared memory by their zero point.
//  - MXFP4's scales are powers of two. A block finds the largest of each row in its share of K, and
//    lowers the exponents of looked up bytes by the distance to it, which is exact up to 2^14. All
//    products of a row then add up in one accumulator.
//  - Scales of whole numbers multiply a group's sums, which are then added in float32. With groups
//    of 128, four products share that; smaller groups are scaled after each 32 of K.
//  - A step's operands have separate registers, so that decoding does not wait for the products of
//    the previous chunk.
#include <cstdint>
#include <iterator>

#include "kernels/gemv/w4_float8_kernels.h"
#include "kernels/gemv/w4_float8_weights.cuh"
#include "kernels/gemv/w4_tile.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kRowBytes = kW4Step / 2;  // of a row of the weight in a stage
constexpr int kChunk = 32;              // values of K, a product
constexpr int kChunks = kW4Step / kChunk;

// A value that the compiler holds in a register instead of computing it again for each use, where
// there are registers.
template <bool kHold>
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  if constexpr (kHold) asm volatile("" : "+r"(value));
  return value;
}

// The largest exponents of two rows, which begin so many bytes behind `scales`, among groups
// `first` to `last`, found by the 4 lanes that share the rows.
__device__ __forceinline__ void largest_exponents(uint32_t (&largest)[2], const char* scales,
                                                  const uint32_t (&rows)[2], int first, int last) {
  largest[0] = largest[1] = 0;
#pragma unroll 8
  for (int group = first + threadIdx.x % 4 * 2; group < last; group += 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + group + rows[i]);
      largest[i] = max(largest[i], max(two & 0xff, two >> 8));
    }
  }
#pragma unroll
  for (uint32_t& one : largest) {
    one = max(one, __shfl_xor_sync(0xffffffffu, one, 1));
    one = max(one, __shfl_xor_sync(0xffffffffu, one, 2));
  }
}

// A row's scales of a step as read from memory, not used before they have to be. e2m1's: two
// exponents a word. Whole numbers': 16-bit floats, and zero points, if any.
template <bool kFloats, int kGroup>
struct RowScales {
  static constexpr int kParts = kFloats ? 2 : kW4Step / kGroup;
  uint32_t scale[kParts];
  uint32_t zero[kFloats ? 1 : kParts];

  // Those of the rows that begin `row` and `zero_row` bytes behind the pointers, from value k of K
  // on. What lies behind the last value of K is replaced by a scale before it; its products are
  // with zeros.
  __device__ __forceinline__ void read(const W4Scales& all, uint32_t row, uint32_t zero_row, int k,
                                       int last_k) {
    // All rows share the pointer before it, so each row's address takes one addition.
    const auto load = [](const char* from, uint32_t behind) {
      return uint32_t{*reinterpret_cast<const uint16_t*>(from + behind)};
    };
    if constexpr (kFloats) {
      scale[0] = load(all.scale + k / 32, row);
      scale[1] = load(all.scale + min(k + 64, last_k - 64) / 32, row);
    } else {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int at = (min(k + i * kGroup, last_k - kGroup) >> all.group_shift) * 2;
        scale[i] = load(all.scale + at, row);
        if (all.zero != nullptr) zero[i] = load(all.zero + at, zero_row);
      }
    }
  }
};

template <bool kFloats, int kTokens, int kStages, int kTogether, int kGroup>
__global__ void __launch_bounds__(w4_threads(kTogether, 1), kTogether)
    w4_float8(const __grid_constant__ W4Float8Args args) {
  using Shape = W4Tile<kTokens, 1, kStages, kTogether, 1>;
  using Scales = RowScales<kFloats, kGroup>;
  constexpr bool kHold = kTogether == 1;
  constexpr int kPerGroup = kGroup / kChunk;         // products between two scalings
  constexpr int kInFlight = kPerGroup == 1 ? 1 : 2;  // with the one before
  extern __shared__ __align__(1024) char shared[];
  __shared__ W4Barriers<Shape> barriers;
  __shared__ float x_scales[kTokens];
  __shared__ __align__(16) uint8_t tables[kFloats ? 64 : 256];
  const W4TilesArgs& tile_args = args.tile;
  const W4Scales& all = tile_args.scales;
  const W4Share share(tile_args, kTokens);
  const int first = share.first, last = share.last;
  if constexpr (kFloats) {
    if (threadIdx.x < 64) write_small_magnitudes(tables, threadIdx.x);
  } else if (threadIdx.x < 256) {
    write_number(tables, threadIdx.x / 16, threadIdx.x % 16);
  }
  barriers.init(share);
  grid_dependency_launch();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp >= kW4Consumers / 32) {
    run_loader<Shape>(tile_args, share, shared, barriers, [](int) {});
    return;
  }
  take_registers<Shape>();

  grid_dependency_wait();
  if (threadIdx.x < kTokens) {
    const int token = share.first_token + threadIdx.x;
    const bool inside = token < tile_args.tokens;
    x_scales[threadIdx.x] = inside ? args.x_scale[token * int64_t{args.x_scale_step}] : 0.0f;
  }
  // Rows of this thread, within the block, are my_row and 8 further.
  const int my_row = warp * 16 + lane / 4;
  uint32_t scale_rows[2], zero_rows[2], largest[2];  // bytes, and exponents
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = min(share.first_row + my_row + half * 8, tile_args.features - 1);
    scale_rows[half] = kept<kHold>(row * static_cast<uint32_t>(all.scale_row));
    zero_rows[half] = kept<kHold>(row * static_cast<uint32_t>(all.zero_row));
  }
  if constexpr (kFloats) {
    constexpr int kGroups = kW4Step / 32;
    largest_exponents(largest, all.scale, scale_rows, first * kGroups,
                      min(last * kGroups, tile_args.k / 32));
  }
  float sums[kTokens / 2];
  float group_sums[kFloats ? 1 : kTokens / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t base = shared_address(shared);
  const uint32_t small_tables = shared_address(tables);
  // Offset of this thread's first word of each chunk; chunks of 16 bytes are swizzled by rows.
  uint32_t places[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    places[chunk] = kept<kHold>(my_row * kRowBytes + (chunk ^ lane / 8) * 16 + lane % 4 / 2 * 4);
  }
  const uint32_t picks = kept<kHold>(lane % 2 == 0 ? 0x5410 : 0x7632);
  Scales bits[2];  // of the next step
  // Scales of the step that is decoded. e2m1: four distances from the row's largest exponent. Whole
  // numbers': in each word a scale and above it a zero point.
  uint32_t step_bits[2][kFloats ? 1 : Scales::kParts];
  const auto load_bits = [&](int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bits[half].read(all, scale_rows[half], zero_rows[half], step * kW4Step, tile_args.k);
    }
  };
  const auto take_bits = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Scales& row = bits[half];
      if constexpr (kFloats) {
        // No byte borrows from another.
        step_bits[half][0] = largest[half] * 0x01010101u - (row.scale[0] | row.scale[1] << 16);
      } else {
#pragma unroll
        for (int i = 0; i < Scales::kParts; ++i) {
          step_bits[half][i] =
              all.zero == nullptr ? row.scale[i] : row.scale[i] | row.zero[i] << 16;
        }
      }
    }
  };
  uint4 numbers[2];  // tables of the rows' zero points
  uint32_t words[2][2];
  const auto load_words = [&](int stage, int chunk) {
    const char* const weights = shared + stage * Shape::kStageBytes + Shape::kXBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* const at = weights + places[chunk] + half * 8 * kRowBytes;
      words[half][0] = *reinterpret_cast<const uint32_t*>(at);
      words[half][1] = *reinterpret_cast<const uint32_t*>(at + 8);
    }
  };
  uint32_t a[kChunks][4];  // a step's operands: decoding runs ahead of the products
  // Decodes the words of a step's `chunk`th 32 values of K.
  const auto decode_chunk = [&](int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // 8 weights, 4 neighbours from each word.
      const uint32_t word = permute_bytes(words[half][0], words[half][1], picks);
      uint32_t (&to)[4] = a[chunk];
      if constexpr (kFloats) {
        const uint32_t down = step_bits[half][0] >> chunk * 8 & 0xff;
        look_up(to[half], to[half + 2], word, magnitudes(down, small_tables));
      } else {
        if (chunk % kPerGroup == 0) {
          const uint32_t bits_of_zero = step_bits[half][chunk / kPerGroup] >> 16;
          const int zero =
              all.zero == nullptr ? 8 : zero_point_index(bits_of_zero, args.float16_scales);
          numbers[half] = reinterpret_cast<const uint4*>(tables)[zero];
        }
        look_up(to[half], to[half + 2], word, numbers[half]);
      }
    }
  };
  // Adds the sums of a finished group.
  const auto add_group = [&](const float (&scales)[2]) {
    if constexpr (!kFloats) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        sums[i] = fmaf(group_sums[i], scales[i / 2 % 2], sums[i]);
      }
    }
  };
  consumers_sync<Shape>();  // x_scales is written
  int stage = 0;
  uint32_t parity = 0;
  if (first < last) {
    load_bits(first);
    take_bits();
    load_bits(min(first + 1, last - 1));
    mbarrier_wait(barriers.filled, 0);
    load_words(0, 0);
    decode_chunk(0);
    load_words(0, 1);
  }
  for (int step = first; step < last; ++step) {
    const uint64_t x = rows_descriptor(base + stage * Shape::kStageBytes);
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + 1 < last;
    const int next_stage = !more ? stage : stage + 1 == kStages ? 0 : stage + 1;
    const uint32_t next_parity = parity ^ (more && next_stage == 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t b = x + chunk * (kChunk >> 4);
      wgmma_fence();
      if constexpr (kFloats) {
        wgmma_float8_from_registers(sums, a[chunk], b, true);
      } else {
        wgmma_float8_from_registers(group_sums, a[chunk], b, chunk % kPerGroup != 0);
      }
      wgmma_commit();
      float scales[2];
      if constexpr (!kFloats) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scales[half] =
              wide_half(step_bits[half][chunk / kPerGroup] & 0xffff, args.float16_scales);
        }
      }
      if (chunk == kChunks - 2) mbarrier_wait(barriers.filled + next_stage, next_parity);
      if (chunk == kChunks - 1) take_bits();
      wgmma_wait<kInFlight>();
      // Words are loaded one chunk ahead of their use.
      decode_chunk((chunk + 1) % kChunks);
      load_words(chunk + 2 < kChunks ? stage : next_stage, (chunk + 2) % kChunks);
      if constexpr (!kFloats) {
        if (chunk % kPerGroup == kPerGroup - 1) {
          wgmma_wait<0>();
          wgmma_settle(group_sums);
          add_group(scales);
        }
      }
    }
    load_bits(min(step + 2, last - 1));
    if constexpr (kFloats) {
      // The compiler runs products one by one if some are in flight at the loop's end.
      wgmma_wait<0>();
      wgmma_settle(sums);
    }
    __syncwarp();  // all lanes have read the stage; one lane arrives for its warp
    if (lane == 0) mbarrier_arrive(barriers.freed + stage);
    stage = next_stage, parity = next_parity;
  }

  if constexpr (kFloats) {
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // 2^-127 is not a normal number, and 255 stands for NaN.
      const uint32_t odd = largest[half] == 0 || largest[half] == 255 ? 1u << 22 : 0u;
      factors[half] = __uint_as_float(largest[half] << 23 | odd) * (1.0f / (1 << kScaledUp));
    }
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] *= factors[i / 2 % 2];
  }
  const float factor =
      tile_args.epilogue.global_scale != nullptr ? *tile_args.epilogue.global_scale : 1.0f;
  const float* const my_scales = x_scales + lane % 4 * 2;
  const auto finish = [&](float sum, int token, float bias) {
    return fmaf(sum * my_scales[token], factor, bias);
  };
  finish_tile<Shape, BFloat16>(tile_args, shared, barriers, sums, my_row, finish);
}

#define TIERCEL_FLOAT8(floats, tokens, stages, together, group, name)                        \
  {tokens,                                                                                   \
   floats,                                                                                   \
   group,                                                                                    \
   together,                                                                                 \
   stages,                                                                                   \
   Kernel("w4_float8<" name ", tokens=" #tokens ">",                                         \
          reinterpret_cast<const void*>(w4_float8<floats, tokens, stages, together, group>), \
          kW4Float8MaxShared)}

const W4Float8Kernel kKernels[] = {TIERCEL_FLOAT8(true, 32, 8, 2, 128, "e2m1"),
                                   TIERCEL_FLOAT8(true, 128, 8, 1, 128, "e2m1"),
                                   TIERCEL_FLOAT8(true, 256, 5, 1, 128, "e2m1"),
                                   TIERCEL_FLOAT8(false, 32, 8, 2, 128, "int4, group=128"),
                                   TIERCEL_FLOAT8(false, 128, 8, 1, 128, "int4, group=128"),
                                   TIERCEL_FLOAT8(false, 32, 8, 1, 32, "int4, group=32"),
                                   TIERCEL_FLOAT8(false, 128, 8, 1, 32, "int4, group=32")};

}  // namespace

const W4Float8Kernel* w4_float8_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
