// SPDX-License-Identifier: Apache-2.0
// Which rows a block of norm_backward has, tile by tile, and where a warp goes on reading.
#ifndef KERNELS_NORM_ROW_TILES_CUH_
#define KERNELS_NORM_ROW_TILES_CUH_

#include <cstdint>

#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/ring.cuh"

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

// Of a warp that has rows of its own, in whole tiles: there the next row is always equally far, so
// that pointers are stepped on instead of made again from row numbers.
class NextRows {
 public:
  // From row `row` on.
  __device__ __forceinline__ NextRows(const NormBackwardArgs& args, int row) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      from_[k] = args.streams[k] + int64_t{row} * args.strides[k];
      step_[k] = int64_t{args.rows_of_tiles} * args.strides[k];
    }
  }

  // Asks for the row's `bytes` of x, and for those of grad `apart` behind them, and steps on.
  __device__ __forceinline__ void load(uint32_t to, uint32_t apart, uint32_t bytes,
                                       uint32_t barrier) {
    elected_load_pair(to, from_[0], to + apart, from_[1], bytes, barrier);
#pragma unroll
    for (int k = 0; k < 2; ++k) from_[k] += step_[k];
  }

 private:
  const char* from_[2];
  int64_t step_[2];
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ROW_TILES_CUH_
