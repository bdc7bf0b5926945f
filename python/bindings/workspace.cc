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

bool Workspace::Get(PyObject* like, int device, void* stream, int64_t floats) {
  uint64_t number = 0;
  const Status status = stream_number(device, stream, &number);
  if (!status.ok()) return Raise(status) != nullptr;
  auto& kept = all_kept();
  const auto found = number == 0 ? kept.end() : kept.find({device, number});
  if (found != kept.end() && found->second.floats >= floats) {
    tensor_.Take(Py_NewRef(found->second.tensor));
    data_ = found->second.data;
    return true;
  }
  tensor_.Take(NewFloat32(like, {floats}));
  PythonTensor tensor;
  if (!tensor_ || !tensor.Read(tensor_.get(), "workspace", "workspace")) return false;
  data_ = static_cast<float*>(tensor.view().data);
  if (number == 0 || (found == kept.end() && kept.size() >= kMostStreams)) return true;
  Kept& own = kept[{device, number}];
  Py_XDECREF(own.tensor);
  own = {Py_NewRef(tensor_.get()), data_, floats};
  return true;
}

}  // namespace tiercel::python
