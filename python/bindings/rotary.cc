// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/kv_cache_write.h"
#include "kernels/rotary/rotary_embedding.h"
#include "kernels/rotary/rotary_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace tiercel::python {
namespace {

constexpr char kRotary[] = "rotary_embedding";
constexpr char kKvCache[] = "kv_cache_write";

// (positions, q, k, cos_sin_cache, q_out, k_out, interleaved).
struct RotaryCall {
  PythonTensor positions, q, k, cache, q_out, k_out;
  bool interleaved = false;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kRotary, values, count);
    return arguments.Expect(7) && arguments.NextTensor("positions", &positions) &&
           arguments.NextTensor("q", &q) && arguments.NextTensor("k", &k) &&
           arguments.NextTensor("cos_sin_cache", &cache) && arguments.NextTensor("q_out", &q_out) &&
           arguments.NextTensor("k_out", &k_out) && arguments.NextBool("interleaved", &interleaved);
  }
  RotaryTensors views() const {
    return {positions.view(), q.view(), k.view(), cache.view(), q_out.view(), k_out.view()};
  }
};

PyObject* Rotary(PyObject*, PyObject* const* values, Py_ssize_t count) {
  RotaryCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.q, [&](void* stream) {
    return rotary_embedding(call.views(), call.interleaved, stream);
  });
}

PyObject* RotaryPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  RotaryCall call;
  if (!call.Parse(values, count)) return nullptr;
  RotaryPlan plan{};
  const Status status = rotary_plan(call.views(), call.interleaved, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:I, s:I}", "kernel", plan.kernel, "vector_bytes",
                       plan.vector_bytes, "grid", plan.grid, "block", plan.block);
}

Status LoadRotary(int device) {
  int count = 0;
  const RotaryKernel* kernels = rotary_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* RotaryLoad(PyObject*, PyObject* device) { return Load(device, LoadRotary); }

// (key, value, key_cache, value_cache, slots, key_scale or None, value_scale or None).
struct KvCacheCall {
  PythonTensor key, value, key_cache, value_cache, slots, key_scale, value_scale;
  const TensorView* key_scale_view = nullptr;
  const TensorView* value_scale_view = nullptr;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kKvCache, values, count);
    if (!arguments.Expect(7) || !arguments.NextTensor("key", &key) ||
        !arguments.NextTensor("value", &value) || !arguments.NextTensor("key_cache", &key_cache) ||
        !arguments.NextTensor("value_cache", &value_cache) ||
        !arguments.NextTensor("slots", &slots)) {
      return false;
    }
    if (values[5] != Py_None) {
      if (!key_scale.Read(values[5], kKvCache, "key_scale")) return false;
      key_scale_view = &key_scale.view();
    }
    if (values[6] != Py_None) {
      if (!value_scale.Read(values[6], kKvCache, "value_scale")) return false;
      value_scale_view = &value_scale.view();
    }
    return true;
  }
  KvCacheTensors views() const {
    return {key.view(),   value.view(),   key_cache.view(), value_cache.view(),
            slots.view(), key_scale_view, value_scale_view};
  }
};

PyObject* KvCacheWrite(PyObject*, PyObject* const* values, Py_ssize_t count) {
  KvCacheCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.key, [&](void* stream) { return kv_cache_write(call.views(), stream); });
}

PyObject* KvCachePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  KvCacheCall call;
  if (!call.Parse(values, count)) return nullptr;
  KvCachePlan plan{};
  const Status status = kv_cache_plan(call.views(), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:I, s:I}", "kernel", plan.kernel, "vector_bytes",
                       plan.vector_bytes, "grid", plan.grid, "block", plan.block);
}

Status LoadKvCache(int device) {
  int count = 0;
  const KvCacheKernel* kernels = kv_cache_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* KvCacheLoad(PyObject*, PyObject* device) { return Load(device, LoadKvCache); }

PyMethodDef functions[] = {
    {"rotary_embedding", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Rotary)),
     METH_FASTCALL,
     "rotary_embedding(positions, q, k, cos_sin_cache, q_out, k_out, interleaved, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `q_out` and `k_out`."},
    {"rotary_embedding_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(RotaryPlanOf)), METH_FASTCALL,
     "rotary_embedding_plan(positions, q, k, cos_sin_cache, q_out, k_out, interleaved, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"rotary_embedding_load", RotaryLoad, METH_O,
     "rotary_embedding_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"kv_cache_write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(KvCacheWrite)),
     METH_FASTCALL,
     "kv_cache_write(key, value, key_cache, value_cache, slots, key_scale, value_scale, "
     "/)\n--\n\nLaunches the kernel on the current stream; writes to both caches."},
    {"kv_cache_write_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(KvCachePlanOf)), METH_FASTCALL,
     "kv_cache_write_plan(key, value, key_cache, value_cache, slots, key_scale, value_scale, "
     "/)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"kv_cache_write_load", KvCacheLoad, METH_O,
     "kv_cache_write_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* RotaryFunctions() { return functions; }

}  // namespace tiercel::python
