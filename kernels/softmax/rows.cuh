// SPDX-License-Identifier: Apache-2.0
// Reads and writes a row by a group of threads, in 16-byte vectors for any alignment, with the mask
// of each vector.
#ifndef KERNELS_SOFTMAX_ROWS_CUH_
#define KERNELS_SOFTMAX_ROWS_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/softmax/row_group.cuh"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {

// The position of a thread's vectors in a row. In a row that begins between two multiples of 16
// bytes, vectors are numbered from the multiple before it; its first and last vectors, which also
// hold elements of other rows, are not whole and are written element by element. If whole blocks
// share a row, vectors are numbered from a multiple of 128 bytes, so that warps access whole lines.
// kAligned: all rows consist of whole vectors.
template <typename Format, typename Group, bool kAligned = false>
struct RowPlace {
  static constexpr bool kAlignedRows = kAligned;
  static constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;
  static constexpr int kPerLine = kSoftmaxLineBytes / Format::kBytes;

  int64_t row;
  int first;       // column of the thread's first vector, may be negative
  int stride;      // columns to the thread's next vector
  int columns;     // 0 behind the last row
  int last_whole;  // column of the row's last whole vector; negative if there is none
  bool vectors;

  __device__ __forceinline__ RowPlace(const SoftmaxArgs& args, const Group& group)
      : row(group.row()),
        stride(group.size() * kPerVector),
        columns(row < args.rows ? args.columns : 0),
        last_whole(kAligned || args.vectors ? columns - kPerVector : -1),
        vectors(args.vectors) {
    first = group.rank() * kPerVector;
    if constexpr (!kAligned) {
      const uint64_t address = reinterpret_cast<uint64_t>(args.x.data + row * args.x.row_stride);
      constexpr int kFrom =
          std::is_same_v<Group, BlockGroup> ? kSoftmaxLineBytes : kSoftmaxVectorBytes;
      const int shift = static_cast<int>(address % kFrom) / Format::kBytes;
      first -= vectors ? shift : 0;
    }
  }

  __device__ __forceinline__ int column(int v) const { return first + v * stride; }
  __device__ __forceinline__ bool whole(int v) const {
    return (kAligned || column(v) >= 0) && column(v) <= last_whole;
  }
  // True if the thread's first kVectors vectors are whole.
  template <int kVectors>
  __device__ __forceinline__ bool all_whole() const {
    return (kAligned || first >= 0) && column(kVectors - 1) <= last_whole;
  }
  __device__ __forceinline__ bool some(int v) const {
    return column(v) > -kPerVector && column(v) < columns;
  }
  __device__ __forceinline__ bool has(int v, int i) const {
    return static_cast<unsigned>(column(v) + i) < static_cast<unsigned>(columns);
  }
  // The thread's first vector in a matrix; the next ones follow every `stride` columns.
  __device__ __forceinline__ char* base(const SoftmaxRows& rows) const {
    return rows.data + row * rows.row_stride + static_cast<int64_t>(first) * Format::kBytes;
  }
  __device__ __forceinline__ int offset(int v, int i = 0) const {
    return (v * stride + i) * Format::kBytes;
  }
  // Bytes from one vector to the next.
  __device__ __forceinline__ uint32_t step() const { return stride * Format::kBytes; }
};

// The element-wise functions below are loops that shift elements through a vector's 16 bytes:
// unrolled for every vector, they would need more registers than the vectors.
struct VectorBits {
  uint64_t low, high;

  __device__ __forceinline__ VectorBits() : low(0), high(0) {}
  __device__ __forceinline__ explicit VectorBits(const uint32_t (&words)[4])
      : low(words[0] | static_cast<uint64_t>(words[1]) << 32),
        high(words[2] | static_cast<uint64_t>(words[3]) << 32) {}
  __device__ __forceinline__ void get(uint32_t (&words)[4]) const {
    words[0] = static_cast<uint32_t>(low), words[1] = static_cast<uint32_t>(low >> 32);
    words[2] = static_cast<uint32_t>(high), words[3] = static_cast<uint32_t>(high >> 32);
  }
  // Shifts in a new first element; the last one drops out.
  template <int kBits>
  __device__ __forceinline__ void push(uint32_t element) {
    high = high << kBits | low >> (64 - kBits);
    low = low << kBits | element;
  }
  // Shifts out the first element; the others move up.
  template <int kBits>
  __device__ __forceinline__ uint32_t pop() {
    const uint32_t element = static_cast<uint32_t>(low);
    low = low >> kBits | high << (64 - kBits);
    high >>= kBits;
    return element;
  }
};

// A word of `pad`.
template <typename Format>
__device__ __forceinline__ uint32_t pad_word(float pad) {
  return Format::to_bits(pad) * (Format::kBytes == 4 ? 1u : 0x10001u);
}

// Loads a vector's elements one by one, `step` bytes apart from `address` on. `column` is the
// vector's; elements outside the row become `pad`.
template <typename Format>
__device__ __forceinline__ void load_elements(uint32_t (&words)[4], const char* address,
                                              int64_t step, int column, int columns, float pad) {
  constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;
  VectorBits bits;
#pragma unroll 1
  for (int i = kPerVector - 1; i >= 0; --i) {
    uint32_t element = Format::to_bits(pad);
    if (static_cast<unsigned>(column + i) < static_cast<unsigned>(columns)) {
      element = *reinterpret_cast<const typename Format::Storage*>(address + i * step);
    }
    bits.push<8 * Format::kBytes>(element);
  }
  bits.get(words);
}

// Replaces the elements of the vector at `column` that are outside the row by `pad`.
template <typename Format>
__device__ __forceinline__ void pad_outside(uint32_t (&words)[4], int column, int columns,
                                            float pad) {
  constexpr int kPerWord = Format::kPerWord;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t outside = 0;
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) {
      const bool has =
          static_cast<unsigned>(column + w * kPerWord + i) < static_cast<unsigned>(columns);
      outside |= has ? 0 : (kPerWord == 1 ? ~0u : 0xffffu << 16 * i);
    }
    words[w] = (words[w] & ~outside) | (pad_word<Format>(pad) & outside);
  }
}

// Prefetches the lines that a group's threads will load to L2, one line per eight threads.
template <int kVectors, typename Place, typename Group>
__device__ __forceinline__ void prefetch_row(const Place& place, const Group& group,
                                             const SoftmaxRows& rows) {
  if (group.rank() % (kSoftmaxLineBytes / kSoftmaxVectorBytes) != 0) return;
  const char* base = place.base(rows);
#pragma unroll 1
  for (int v = 0; v < kVectors; ++v) {
    if (place.some(v)) prefetch_l2(base + place.offset(v));
  }
}

// Loads a thread's vectors of a row as words, with `pad` for elements outside the row. Vectors at a
// row's ends are read whole if they lie in the matrix. kBranches: a separate path for threads whose
// vectors are all whole. (With unaligned rows, warps at their ends would execute both paths, which
// costs more.)
template <bool kBranches = false, typename Format, typename Group, bool kAligned, int kVectors>
__device__ __forceinline__ void load_row(uint32_t (&words)[kVectors][4],
                                         const RowPlace<Format, Group, kAligned>& place,
                                         const SoftmaxRows& rows, float pad) {
  const char* base = place.base(rows);
  if constexpr (kBranches) {
    if (place.template all_whole<kVectors>()) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v, base += place.step()) load_stream(words[v], base);
      return;
    }
  }
  int least = 0, most = place.last_whole;  // columns of vectors that are read whole
  if constexpr (!kAligned) {
    const char* start = rows.data + place.row * rows.row_stride;
    const char* end = start + static_cast<int64_t>(place.columns) * Format::kBytes;
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 16);
    const int behind = static_cast<int>(-reinterpret_cast<uintptr_t>(end) % 16);
    if (place.vectors && start - before >= rows.data) least = 1 - place.kPerVector;
    if (place.vectors && end + behind <= rows.end) most = place.columns - 1;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[v][w] = pad_word<Format>(pad);
    if (place.column(v) >= least && place.column(v) <= most) {
      load_stream(words[v], base + place.offset(v));
    }
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!place.some(v) || place.whole(v)) continue;
      if (place.column(v) < least || place.column(v) > most) {
        load_elements<Format>(words[v], base + place.offset(v), Format::kBytes, place.column(v),
                              place.columns, pad);
      } else {
        pad_outside<Format>(words[v], place.column(v), place.columns, pad);
      }
    }
  }
}

// Writes a thread's vectors of a row in order.
template <typename Format, typename Place>
class RowWriter {
 public:
  static constexpr bool kAligned = Place::kAlignedRows;
  __device__ __forceinline__ RowWriter(const Place& place, const SoftmaxRows& rows)
      : place_(place), address_(place.base(rows)) {}

  __device__ __forceinline__ void operator()(int v, const float (&values)[Place::kPerVector]) {
    uint32_t words[4];
    pack<Format>(values, words);
    if (place_.whole(v)) {
      store_vector(address_, words);
    } else if (!kAligned && place_.some(v)) {
      VectorBits bits(words);
      char* address = address_;
#pragma unroll 1
      for (int i = 0; i < Place::kPerVector; ++i, address += Format::kBytes) {
        const uint32_t element = bits.pop<8 * Format::kBytes>();
        if (!place_.has(v, i)) continue;
        *reinterpret_cast<typename Format::Storage*>(address) =
            static_cast<typename Format::Storage>(element);
      }
    }
    address_ += place_.step();
  }

 private:
  const Place& place_;
  char* address_;
};

// The address of a row's mask.
__device__ __forceinline__ const char* mask_row(const SoftmaxMaskRows& mask, int64_t row) {
  // Avoids divisions, which cost more than a short row's loads.
  if (row < mask.sizes[1]) return mask.data + row * mask.strides[2];
  const int64_t middle = row / mask.sizes[1];
  const int64_t outer = middle / mask.sizes[0];
  return mask.data + outer * mask.strides[0] + (middle - outer * mask.sizes[0]) * mask.strides[1] +
         (row - middle * mask.sizes[1]) * mask.strides[2];
}

// A bool mask's bytes for a thread's vectors, which are all whole.
template <typename Format, typename Group, int kVectors>
__device__ __forceinline__ void load_kept(uint32_t (&kept)[kVectors][4 / Format::kBytes],
                                          const SoftmaxMaskRows& mask,
                                          const RowPlace<Format, Group, true>& place) {
  const char* base = mask_row(mask, place.row) + place.first;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (place.whole(v)) load_vector(kept[v], base + v * place.stride);
  }
}

// Replaces a vector's masked elements by `pad`.
template <typename Format>
__device__ __forceinline__ void pad_dropped(uint32_t (&words)[4],
                                            const uint32_t (&kept)[4 / Format::kBytes], float pad) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    // Each byte's highest bit is set if the byte is not 0. The permutation replicates that bit,
    // which
    // __byte_perm() cannot.
    const uint32_t bytes = kept[w * Format::kPerWord / 4];
    const uint32_t high = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
    const uint32_t first = w * Format::kPerWord % 4;
    uint32_t keep;
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(keep)
        : "r"(high), "r"((Format::kPerWord == 1 ? 0x8888 : 0x9988) + 0x1111 * first));
    words[w] = (words[w] & keep) | (pad_word<Format>(pad) & ~keep);
  }
}

// Bit i is the bool mask of the vector's element i.
template <typename Format, typename Group>
__device__ __forceinline__ uint32_t mask_bits(const SoftmaxMaskRows& mask, const char* mask_row,
                                              const RowPlace<Format, Group>& place, int v) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  uint32_t bits = 0;
  if (mask.vectors && place.whole(v)) {
    uint32_t words[kPerVector / 4];
    load_vector(words, mask_row + place.column(v));
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      bits |= (words[i / 4] >> (8 * (i % 4)) & 0xff) != 0 ? 1u << i : 0u;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kPerVector; ++i) {
      const char* address = mask_row + (place.column(v) + i) * mask.step;
      if (place.has(v, i) && *address != 0) bits |= 1u << i;
    }
  }
  return bits;
}

// An added mask's values for a thread's vectors, each whole or behind the row, and aligned. No load
// waits for another.
template <typename Format, typename Place, int kVectors>
__device__ __forceinline__ void load_added(float (&added)[kVectors][Place::kPerVector],
                                           const SoftmaxMaskRows& mask, const char* mask_row,
                                           const Place& place) {
  const bool is_float = Format::kBytes == 4 || mask.kind == SoftmaxMask::kAddFloat32;
  const char* address = mask_row + place.first * mask.step;
  const int64_t step = place.stride * mask.step;
  if (is_float) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v, address += step) {
#pragma unroll
      for (int i = 0; i < Place::kPerVector; i += 4) {
        uint32_t words[4] = {};
        if (place.whole(v)) load_vector(words, address + 4 * i);
#pragma unroll
        for (int w = 0; w < 4; ++w) added[v][i + w] = __uint_as_float(words[w]);
      }
    }
    return;
  }
  uint32_t words[kVectors][4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v, address += step) {
    if (place.whole(v)) load_vector(words[v], address);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) unpack<Format>(words[v], added[v]);
}

// Applies the mask to a vector's scaled scores; -inf outside the row.
template <typename Format, typename Group>
__device__ __forceinline__ void apply_mask(float (&x)[RowPlace<Format, Group>::kPerVector],
                                           const SoftmaxMaskRows& mask, const char* mask_row,
                                           const RowPlace<Format, Group>& place, int v) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  if (mask.kind == SoftmaxMask::kKeep) {
    const uint32_t bits = mask_bits(mask, mask_row, place, v);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) x[i] = bits >> i & 1 ? x[i] : -kInfinity;
    return;
  }
  float added[kPerVector];
  const bool fast = mask.vectors && place.whole(v);
  const char* address = mask_row + place.column(v) * mask.step;
  if (mask.kind == SoftmaxMask::kAddFloat32) {
#pragma unroll
    for (int i = 0; i < kPerVector; i += 4) {
      uint32_t words[4];
      if (fast) {
        load_vector(words, address + 4 * i);
      } else {
        load_elements<Float32>(words, address + i * mask.step, mask.step, place.column(v) + i,
                               place.columns, 0.0f);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) added[i + w] = __uint_as_float(words[w]);
    }
  } else {
    uint32_t words[4];
    if (fast) {
      load_vector(words, address);
    } else {
      load_elements<Format>(words, address, mask.step, place.column(v), place.columns, 0.0f);
    }
    unpack<Format>(words, added);
  }
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) x[i] += added[i];
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_ROWS_CUH_
