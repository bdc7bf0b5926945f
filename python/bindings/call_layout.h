// SPDX-License-Identifier: Apache-2.0
// The layouts that a call's tensors need and the sizes of its outputs, as the op's declaration
// gives them. `Arguments` in the templates is any class with
//
//   const TensorView* view(Py_ssize_t place) const        null where it is not a tensor
//   bool IsGiven(Py_ssize_t place) const                  false for None
//   bool ReadInt(Py_ssize_t place, long long* out) const  false where it is not an int
#ifndef PYTHON_BINDINGS_CALL_LAYOUT_H_
#define PYTHON_BINDINGS_CALL_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

constexpr ptrdiff_t kMaxArguments = 32;
constexpr ptrdiff_t kMaxTensors = 16;
constexpr ptrdiff_t kMaxOutputs = 5;
constexpr ptrdiff_t kMaxOutputDims = 16;

// Up to kMost items, in place.
template <typename Item, ptrdiff_t kMost_>
struct Few {
  static constexpr ptrdiff_t kMost = kMost_;

  ptrdiff_t count;
  Item items[kMost];

  const Item* begin() const { return items; }
  const Item* end() const { return items + count; }
};

// A size of an output: argument `place`'s dimension `dim`, or its value if it is an int, divided by
// `divisor` unless argument `unless` (-1: none) is given.
struct Size {
  ptrdiff_t place, dim;
  long long divisor;
  ptrdiff_t unless;
};

// A contiguous output on the device of argument `like`. `Type` names a dtype.
template <typename Type>
struct OutputOf {
  ptrdiff_t like;
  Type dtype;  // null: that of argument `dtype_place`, or the dtype that it is
  ptrdiff_t dtype_place;
  Type other_dtype;  // if argument `other_place` is given; null: never
  ptrdiff_t other_place;
  Type unwanted;  // a dtype that `instead` takes the place of; null: none
  Type instead;
  bool batched;  // begins with all dimensions of `like` but the last `dropped`
  ptrdiff_t dropped;
  Few<Size, 4> sizes;
};

// Argument `place` has `rank` dimensions.
struct Rank {
  ptrdiff_t place, rank;
};

// Dimension `dim` of argument `place` is the int argument `number`.
struct Equal {
  ptrdiff_t place, dim, number;
};

// The layouts that a native function takes.
struct Layout {
  Few<ptrdiff_t, kMaxTensors> tensors;  // places of the tensor arguments, which may be None
  uint64_t contiguous;                  // bit i: argument i is contiguous
  uint64_t absent;                      // bit i: argument i is None
  Few<Rank, 16> ranks;
  Few<Equal, 16> equals;
};

bool IsContiguous(const TensorView& view);

// The place of a tensor that the native function does not take as it is, -1 where there is none.
template <typename Arguments>
ptrdiff_t UnfitTensor(const Layout& layout, const Arguments& arguments) {
  for (const ptrdiff_t place : layout.tensors) {
    if (!arguments.IsGiven(place)) continue;
    const TensorView* view = arguments.view(place);
    if (view == nullptr || (layout.absent >> place & 1)) return place;
    if ((layout.contiguous >> place & 1) && !IsContiguous(*view)) return place;
  }
  for (const Rank& rule : layout.ranks) {
    const TensorView* view = arguments.view(rule.place);
    if (view == nullptr || view->ndim != rule.rank) return rule.place;
  }
  for (const Equal& rule : layout.equals) {
    const TensorView* view = arguments.view(rule.place);
    long long number = 0;
    if (view == nullptr || rule.dim >= view->ndim || !arguments.ReadInt(rule.number, &number) ||
        view->shape[rule.dim] != number) {
      return rule.place;
    }
  }
  return -1;
}

// False where the arguments do not give the size.
template <typename Arguments>
bool SizeOf(const Size& size, const Arguments& arguments, int64_t* value) {
  if (const TensorView* view = arguments.view(size.place)) {
    const ptrdiff_t dim = size.dim < 0 ? size.dim + view->ndim : size.dim;
    if (dim < 0 || dim >= view->ndim) return false;
    *value = view->shape[dim];
  } else {
    long long number = 0;
    if (!arguments.ReadInt(size.place, &number) || number < 0) return false;
    *value = number;
  }
  if (size.divisor == 1 || (size.unless >= 0 && arguments.IsGiven(size.unless))) return true;
  if (*value % size.divisor != 0) return false;
  *value /= size.divisor;
  return true;
}

// Calls take(i, size) for each dimension of an output. Returns their number, -1 where the arguments
// do not give them.
template <typename Type, typename Arguments, typename Take>
ptrdiff_t EachSize(const OutputOf<Type>& output, const Arguments& arguments, Take&& take) {
  const TensorView& like = *arguments.view(output.like);
  const ptrdiff_t batch = output.batched ? like.ndim - output.dropped : 0;
  if (batch < 0) return -1;
  for (ptrdiff_t i = 0; i < batch + output.sizes.count; ++i) {
    int64_t value = i < batch ? like.shape[i] : 0;
    if (i >= batch && !SizeOf(output.sizes.items[i - batch], arguments, &value)) return -1;
    take(i, value);
  }
  return batch + output.sizes.count;
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_CALL_LAYOUT_H_
