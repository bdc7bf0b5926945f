// SPDX-License-Identifier: Apache-2.0
// The tile of a block.
#ifndef KERNELS_TRANSPOSE_TILE_CUH_
#define KERNELS_TRANSPOSE_TILE_CUH_

#include <cstdint>

#include "kernels/transpose/copy_transpose_kernels.h"

namespace tiercel {

struct Tile {
  int row;  // in tiles
  int column;
  int64_t matrix;
};

template <bool kDownFirst>
__device__ __forceinline__ Tile tile_of(const CopyTransposeArgs& args, unsigned block) {
  const unsigned down = args.tile_rows, across = args.tile_columns;
  if constexpr (kDownFirst) {
    const unsigned stack = block / down;
    return {static_cast<int>(block % down), static_cast<int>(stack % across), stack / across};
  } else {
    const unsigned line = block / across;
    return {static_cast<int>(line % down), static_cast<int>(block % across), line / down};
  }
}

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_TILE_CUH_
