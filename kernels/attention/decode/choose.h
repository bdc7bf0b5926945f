// SPDX-License-Identifier: Apache-2.0
// How decode_attention shares its work out.
#ifndef KERNELS_ATTENTION_DECODE_CHOOSE_H_
#define KERNELS_ATTENTION_DECODE_CHOOSE_H_

#include <cstdint>

namespace tiercel {

struct DecodeLoad {
  int64_t tiles;          // of all sequences, where a cluster has one
  int64_t spread_tiles;   // where they are spread: they may have more rows
  int64_t steps;          // of a tile, at most
  int64_t step_bytes;     // keys and values
  int64_t blocks;         // resident on the device at once
  int64_t spread_blocks;  // the same when tiles are spread
  int64_t row_bytes;      // of a key
  int warps;              // of a block
  int spread_warps;
  bool float8;
};

struct DecodeSplit {
  int cluster;  // blocks that share a tile; 0: tiles are spread
  int64_t grid;
  double microseconds;  // expected
};

// True if spread tiles of more rows than a cluster takes gain. They read keys fewer times, but
// their starts and ends take longer.
bool decode_is_long(const DecodeLoad& load);

// The number of columns that `tiles` of a sequence are dealt to: it divides them and leaves few of
// `blocks` out.
int decode_columns(int tiles, int64_t blocks);

// The split with the least expected time. `forced`: as DecodeOptions::split.
DecodeSplit decode_choose(const DecodeLoad& load, int forced);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_CHOOSE_H_
