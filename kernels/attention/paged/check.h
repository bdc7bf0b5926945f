// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_CHECK_H_
#define KERNELS_ATTENTION_PAGED_CHECK_H_

#include <cstdint>
#include <string>

#include "kernels/attention/paged/paged.h"
#include "kernels/sm90/checks.h"

namespace tiercel {

inline constexpr char kPagedOp[] = "paged_attention";

// The head dimension up to which kernel.py has tiles; paged_wide.cu has the rest.
inline constexpr int64_t kMostOfTiles = 256;

inline Status unsupported(const Argument& argument, const std::string& expected,
                          const std::string& got) {
  return Status::Unimplemented(mismatch(argument, expected + " for the precompiled kernels", got));
}

inline bool is_float8(const TensorView& view) { return view.dtype == DType::kFloat8E4M3; }

// Checks that a call's arguments fit together.
Status check_paged(const PagedAttentionCall& call);

// Checks that there is a kernel for the head dimension of values, if it is not that of keys.
Status check_paged_values(const PagedAttentionCall& call);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_CHECK_H_
