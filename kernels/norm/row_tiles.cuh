// SPDX-License-Identifier: Apache-2.0
// Which rows a block of norm_backward has, tile by tile, and where they are.
#ifndef KERNELS_NORM_ROW_TILES_CUH_
#define KERNELS_NORM_ROW_TILES_CUH_

#include <cstdint>

#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"

namespace tiercel {

// Blocks take tiles in turns: neighbours are read at about the same time, which memory likes.
// What is left after as many tiles for all is a last one of fewer rows, the same for each block.
// (Not where rows are not of 16 bytes: there it would take registers that are not there.)
template <bool kWide>
struct RowTiles {
  int part;   // this block's number, or its cluster's
  int count;  // of its tiles
  int end;    // the row that its last tile ends before

  __device__ __forceinline__ RowTiles(const NormBackwardArgs& args, const Team& team, int per_warp,
                                      int per_tile)
      : part(blockIdx.x / team.blocks),
        args_(args),
        parts_(gridDim.x / team.blocks),
        per_warp_(per_warp),
        per_tile_(per_tile),
        team_(team.index) {
    count = kWide ? args.whole_tiles + (args.last_share > 0 ? 1 : 0)
                  : ((args.rows + per_tile - 1) / per_tile - part + parts_ - 1) / parts_;
    end = kWide ? min(args.rows, args.whole_tiles * args.rows_of_tiles +
                                     (part + 1) * args.last_share * per_warp)
                : args.rows;
  }

  // The first of the team's rows in a tile.
  __device__ __forceinline__ int first_row(int tile) const {
    if (!kWide) return (part + tile * parts_) * per_tile_ + team_ * per_warp_;
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

// Where a team's rows are in each of some tensors, for one after the other: stepped on, as in whole
// tiles the next row is always equally far, and not made again from row numbers.
template <int kTensors>
class RowPointers {
 public:
  // At row number 0; `first` and `strides` are arguments of the kernel.
  __device__ __forceinline__ RowPointers(const char* const* first, const int64_t* strides,
                                         const NormBackwardArgs& args, const RowTiles<true>& tiles)
      : args_(args), tiles_(tiles), strides_(strides) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      first_[k] = first[k];
      at_[k] = first_[k] + int64_t{tiles.first_row(0)} * strides[k];
      step_[k] = int64_t{args.rows_of_tiles} * strides[k];
      asm("" : "+l"(step_[k]));  // made once
    }
  }

  // Goes to row number `i`, the next one: after the whole tiles it is less far.
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
