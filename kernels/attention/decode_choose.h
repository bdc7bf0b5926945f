// SPDX-License-Identifier: Apache-2.0
// How decode_attention shares its work out.
#ifndef KERNELS_ATTENTION_DECODE_CHOOSE_H_
#define KERNELS_ATTENTION_DECODE_CHOOSE_H_

#include <cstdint>

namespace tiercel {

inline constexpr int kSplitTogether = -2;

struct DecodeLoad {
  int64_t tiles;          // of all sequences
  int64_t steps;          // of a tile, at most
  int64_t step_bytes;     // keys and values
  int64_t blocks;         // resident on the device at once
  int64_t spread_blocks;  // of them, when tiles are spread
  int64_t together_blocks;  // of decode_together; 0: it does not take this
  bool float8;
};

struct DecodeSplit {
  int cluster;  // blocks that share a tile; 0: tiles are spread
  bool together;  // by decode_together
  int64_t grid;
  double microseconds;  // expected
};

// How many columns `tiles` of a sequence are dealt to: as many as divide them and leave few of
// `blocks` out.
int decode_columns(int tiles, int64_t blocks);

// The split with the least expected time. `forced`: as DecodeOptions::split.
DecodeSplit decode_choose(const DecodeLoad& load, int forced);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_CHOOSE_H_
