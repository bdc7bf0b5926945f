// SPDX-License-Identifier: Apache-2.0
// The interface of nvfp4_linear's host and device code.
#ifndef KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
#define KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/gemv/w4_format.h"
#include "kernels/gemv/w4_linear.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/math.h"

namespace tiercel {

struct Nvfp4LinearArgs {
  CUtensorMap weight_map;  // boxes of 16 rows and 128 bytes
  const char* x;
  int64_t x_row;  // bytes from one token to the next
  W4Scales scales;
  W4Epilogue epilogue;
  uint16_t* out;  // contiguous
  int tokens;
  int features;  // rows of the weight
  int k;
  int tiles;              // of 16 rows, per turn of a block
  int parts;              // warps that split K of a tile
  int passes;             // lines of K per warp and section
  int sections;           // of K; as many as are needed for x to fit
  int all_turns;          // of all blocks; each covers `tiles` tiles
  int turns;              // per block
  int group;              // turns after which the parts' sums are added
  bool prefetch_weights;  // the first weights to L2, before the previous grid ends
};

inline constexpr int kLinearMaxTokens = 16;
inline constexpr int kLinearMaxShared = 226 * 1024;  // of 227 KiB

// Warps per block: the most that leave each thread the registers that the kernel needs.
constexpr int linear_max_threads(W4Format format, int tokens) {
  if (tokens == 1 || (format == W4Format::kInt4 && tokens > 8)) return 640;
  return tokens <= 8 ? 896 : 768;
}

inline constexpr int kLinearLine = 256;  // values of K, 128 bytes of weights
// Layout of x in shared memory: the values of 8 tokens that a warp reads at once, padded so that
// stores use all banks too; and all of these in a line.
inline constexpr int kLinearPieceBytes = 512 + 16;
inline constexpr int kLinearTileBytes = 8 * kLinearPieceBytes;

// Shared memory for a line of x; for a single token including the factor to multiply by later.
constexpr int linear_line_bytes(int tokens) {
  return tokens == 1 ? kLinearLine * 2 + 16 : (tokens + 7) / 8 * kLinearTileBytes;
}
inline constexpr int kLinearZeroBytes = 192;  // for a single token, behind its lines

// Shared memory per stage and warp: a line of 16 rows of weights and the barrier on which it
// arrives, with room for the sums' barrier and the next array's alignment.
inline constexpr int kLinearStageBytes = 16 * (kLinearLine / 2 + 1);

// Shared memory for a warp's sums of 16 rows, for that many tokens.
constexpr int linear_sum_bytes(int tokens) { return tokens == 1 ? 64 : tokens <= 8 ? 512 : 1024; }

// Blocks that run at once, one per multiprocessor, in clusters of this size.
constexpr int cluster_places(int cluster) {
  return cluster <= 2 ? kDefaultMultiprocessors : cluster == 4 ? 120 : 112;
}

// A launch for few tokens. The caller fills the arguments that no configuration changes.
struct FewLaunch {
  Nvfp4LinearArgs args{};
  const Kernel* kernel = nullptr;
  LaunchConfig config;
};

// With `config`; or, if that is null, with what was tuned for the problem, else with what has the
// least expected time.
Status nvfp4_linear_configure(const char* op, const TunedProblem& problem,
                              const Nvfp4LinearConfig* config, FewLaunch* launch);

// The kernel for up to `tokens` tokens with `stages` stages per warp, or null.
const Kernel* nvfp4_linear_kernel(W4Format format, int tokens, int stages);

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
