// SPDX-License-Identifier: Apache-2.0
// The rows of a block of norm_backward, tile by tile, and their addresses.
#ifndef KERNELS_NORM_ROW_TILES_CUH_
#define KERNELS_NORM_ROW_TILES_CUH_

#include <cstdint>

#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"

namespace tiercel {

// Blocks take tiles in turn, so neighbouring rows are read at about the same time. The rows left
// after an equal number of tiles are a last, smaller tile of equal size for each block (only for
// 16-byte aligned rows: the others' kernels have no registers for it).
template <bool kAligned16>
struct RowTiles {
  int part;   // number of this block or its cluster
  int count;  // number of its tiles
  int end;    // end of the rows of its last tile

  __device__ __forceinline__ RowTiles(const NormBackwardArgs& args, const Team& team, int per_warp,
                                      int per_tile)
      : part(blockIdx.x / team.blocks),
        args_(args),
        parts_(gridDim.x / team.blocks),
        per_warp_(per_warp),
        per_tile_(per_tile),
        team_(team.index) {
    count = kAligned16 ? args.whole_tiles + (args.last_share > 0 ? 1 : 0)
                       : ((args.rows + per_tile - 1) / per_tile - part + parts_ - 1) / parts_;
    end = kAligned16 ? min(args.rows, args.whole_tiles * args.rows_of_tiles +
                                          (part + 1) * args.last_share * per_warp)
                     : args.rows;
  }

  // The team's first row in a tile.
  __device__ __forceinline__ int first_row(int tile) const {
    if (!kAligned16) return (part + tile * parts_) * per_tile_ + team_ * per_warp_;
    const int share = tile < args_.whole_tiles ? per_tile_ : args_.last_share * per_warp_;
    return tile * args_.rows_of_tiles + part * share + team_ * per_warp_;
  }

 private:
  const NormBackwardArgs& args_;
  int parts_;
  int per_warp_;
  int per_tile_;
  int team_;
};

// Addresses of a team's rows in several tensors, one row after the other. In whole tiles the next
// row is always at the same distance, so the addresses advance and are not recomputed from row
// numbers.
template <int kTensors>
class RowPointers {
 public:
  // Starts at row number 0; `first` and `strides` are kernel arguments.
  __device__ __forceinline__ RowPointers(const char* const* first, const int64_t* strides,
                                         const NormBackwardArgs& args, const RowTiles<true>& tiles)
      : args_(args), tiles_(tiles), strides_(strides) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      first_[k] = first[k];
      at_[k] = first_[k] + int64_t{tiles.first_row(0)} * strides[k];
      step_[k] = int64_t{args.rows_of_tiles} * strides[k];
      asm("" : "+l"(step_[k]));  // computed once
    }
  }

  // Advances to row number `i`, the next one; the step is shorter after the whole tiles.
  __device__ __forceinline__ void come_to(int i) {
    if (i != args_.whole_tiles) return;
#pragma unroll
    for (int k = 0; k < kTensors; ++k)
      at_[k] = first_[k] + int64_t{tiles_.first_row(i)} * strides_[k];
  }
  __device__ __forceinline__ void step() {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) at_[k] += step_[k];
  }
  __device__ __forceinline__ const char* at(int k) const { return at_[k]; }

 private:
  const NormBackwardArgs& args_;
  const RowTiles<true>& tiles_;
  const int64_t* strides_;
  const char* first_[kTensors];
  const char* at_[kTensors];
  int64_t step_[kTensors];
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ROW_TILES_CUH_
