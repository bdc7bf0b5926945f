// SPDX-License-Identifier: Apache-2.0
// Sorting networks over keys in registers, descending. All indices are compile-time constants.
#ifndef KERNELS_ROUTING_SORTING_CUH_
#define KERNELS_ROUTING_SORTING_CUH_

#include <cstdint>

namespace tiercel {

template <typename Key>
__device__ __forceinline__ Key key_max(Key a, Key b) {
  return a < b ? b : a;
}

// Two min/max instructions for 32-bit keys; one comparison and four selects for 64-bit ones.
template <typename Key>
__device__ __forceinline__ void order_pair(Key& high, Key& low) {
  const Key a = high;
  const Key b = low;
  high = a < b ? b : a;
  low = a < b ? a : b;
}

template <typename Key, int kCount, int kPairs>
__device__ __forceinline__ void run_network(Key (&keys)[kCount],
                                            const unsigned char (&pairs)[kPairs][2]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) order_pair(keys[pairs[i][0]], keys[pairs[i][1]]);
}

// The shortest known networks. They sort all sequences of 0 and 1, hence (0-1 principle) all
// sequences.
template <typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[1]) {}

template <typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[2]) {
  order_pair(keys[0], keys[1]);
}

template <typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[4]) {
  constexpr unsigned char kNetwork[5][2] = {{0, 2}, {1, 3}, {0, 1}, {2, 3}, {1, 2}};
  run_network(keys, kNetwork);
}

template <typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[8]) {
  constexpr unsigned char kNetwork[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6},
                                             {3, 7}, {0, 1}, {2, 3}, {4, 5}, {6, 7}, {2, 4}, {3, 5},
                                             {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
  run_network(keys, kNetwork);
}

template <typename Key>
__device__ __forceinline__ void sort_descending(Key (&keys)[16]) {
  constexpr unsigned char kNetwork[60][2] = {
      {0, 13}, {1, 12}, {2, 15},  {3, 14},  {4, 8},   {5, 6},   {7, 11},  {9, 10},  {0, 5},
      {1, 7},  {2, 9},  {3, 4},   {6, 13},  {8, 14},  {10, 15}, {11, 12}, {0, 1},   {2, 3},
      {4, 5},  {6, 8},  {7, 9},   {10, 11}, {12, 13}, {14, 15}, {0, 2},   {1, 3},   {4, 10},
      {5, 11}, {6, 7},  {8, 9},   {12, 14}, {13, 15}, {1, 2},   {3, 12},  {4, 6},   {5, 7},
      {8, 10}, {9, 11}, {13, 14}, {1, 4},   {2, 6},   {5, 8},   {7, 10},  {9, 13},  {11, 14},
      {2, 4},  {3, 6},  {9, 12},  {11, 13}, {3, 5},   {6, 8},   {7, 9},   {10, 12}, {3, 4},
      {5, 6},  {7, 8},  {9, 10},  {11, 12}, {6, 7},   {8, 9}};
  run_network(keys, kNetwork);
}

// Sorts a bitonic sequence (the cleaner stages of a bitonic merge).
template <int kCount, typename Key>
__device__ __forceinline__ void sort_bitonic(Key (&keys)[kCount]) {
#pragma unroll
  for (int stride = kCount / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & stride) == 0) order_pair(keys[i], keys[i + stride]);
    }
  }
}

// Replaces `top` by the kCount largest of `top` and `other`, sorted; both are sorted.
template <int kCount, typename Key>
__device__ __forceinline__ void merge_top(Key (&top)[kCount], const Key (&other)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) top[i] = key_max(top[i], other[kCount - 1 - i]);
  sort_bitonic(top);
}

// The kTop largest of `keys`, sorted, padded with 0 if there are fewer.
template <int kTop, int kCount, typename Key>
__device__ __forceinline__ void select_top(Key (&top)[kTop], const Key (&keys)[kCount]) {
#pragma unroll
  for (int group = 0; group < (kCount + kTop - 1) / kTop; ++group) {
    Key sorted[kTop];
#pragma unroll
    for (int i = 0; i < kTop; ++i) {
      sorted[i] = group * kTop + i < kCount ? keys[group * kTop + i] : 0;
    }
    sort_descending(sorted);
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < kTop; ++i) top[i] = sorted[i];
    } else {
      merge_top(top, sorted);
    }
  }
}

// Gives every lane of each group of kLanes neighbours the group's kTop largest keys, sorted.
template <int kLanes, int kTop, typename Key>
__device__ __forceinline__ void merge_lanes(Key (&top)[kTop]) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    Key other[kTop];
#pragma unroll
    for (int i = 0; i < kTop; ++i) other[i] = __shfl_xor_sync(0xffffffffu, top[i], offset);
    merge_top(top, other);
  }
}

// keys[place * kLanes + lane] without indexing registers by `lane`; 0 behind the end.
template <int kLanes, int kCount, typename Key>
__device__ __forceinline__ Key pick(const Key (&keys)[kCount], int place, int lane) {
  Key picked = 0;
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
    if (place * kLanes + l < kCount) picked = lane == l ? keys[place * kLanes + l] : picked;
  }
  return picked;
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_SORTING_CUH_
