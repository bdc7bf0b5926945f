// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/workspace.h"

#include <map>
#include <utility>

#include "kernels/sm90/stream.h"
#include "python/bindings/allocate.h"
#include "python/bindings/call.h"
#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {
namespace {

struct Kept {
  PyObject* tensor = nullptr;
  float* data = nullptr;
  int64_t floats = 0;
  bool taken = false;  // by a call that launches
};

// Streams beyond that allocate for each launch.
constexpr size_t kMostStreams = 128;

// By device and stream_number. Under the GIL; never freed: Python may be gone at exit.
using Streams = std::map<std::pair<int, uint64_t>, Kept>;
Streams& all_kept() {
  static auto* const kept = new Streams;
  return *kept;
}

}  // namespace

Workspace::~Workspace() {
  if (taken_ != nullptr) *taken_ = false;
}

bool Workspace::Get(PyObject* like, int device, void* stream, int64_t floats) {
  uint64_t number = 0;
  const Status status = stream_number(device, stream, &number);
  if (!status.ok()) return Raise(status) != nullptr;
  auto& all = all_kept();
  const auto kept_of = [&all, key = std::pair(device, number)]() -> Kept* {
    if (key.second == 0) return nullptr;
    const auto found = all.find(key);
    if (found != all.end()) return found->second.taken ? nullptr : &found->second;
    return all.size() < kMostStreams ? &all[key] : nullptr;
  };
  const auto take = [this](Kept* kept) {
    kept->taken = true;
    taken_ = &kept->taken;
  };
  if (Kept* kept = kept_of(); kept != nullptr && kept->floats >= floats) {
    tensor_.Take(Py_NewRef(kept->tensor));
    data_ = kept->data;
    take(kept);
    return true;
  }
  tensor_.Take(NewFloat32(like, {floats}));
  PythonTensor tensor;
  if (!tensor_ || !tensor.Read(tensor_.get(), "workspace", "workspace")) return false;
  data_ = static_cast<float*>(tensor.view().data);
  // To allocate may have released the GIL.
  Kept* kept = kept_of();
  if (kept == nullptr) return true;
  take(kept);
  PyObject* before = kept->tensor;
  kept->tensor = Py_NewRef(tensor_.get());
  kept->data = data_;
  kept->floats = floats;
  Py_XDECREF(before);
  return true;
}

}  // namespace tiercel::python
