// SPDX-License-Identifier: Apache-2.0
// The instances of fused_moe_few_tokens; few_tokens.cuh has the plan.
#include "kernels/moe/few_tokens.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(scales)                \
  Kernel("fused_moe_few_tokens<" #scales ">", \
         reinterpret_cast<const void*>(fused_moe_few_tokens<FewScales::k##scales>), kFewMaxShared)

const Kernel kRows = TIERCEL_KERNEL(Rows);
const Kernel kBlocks = TIERCEL_KERNEL(Blocks);

}  // namespace

const Kernel& few_tokens_kernel(bool blocks) { return blocks ? kBlocks : kRows; }

int few_tokens_fixed_shared() { return sizeof(FewShared) + kFewPartBytes; }

}  // namespace tiercel
