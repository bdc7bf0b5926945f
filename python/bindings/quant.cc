// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/fp8_quantize.h"
#include "kernels/quant/nvfp4.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

constexpr char kFp8Quantize[] = "fp8_quantize";
constexpr char kNvfp4Quantize[] = "nvfp4_quantize";
constexpr char kNvfp4Dequantize[] = "nvfp4_dequantize";

// (x, q, scale, partial or None, granularity's index)
struct Fp8QuantizeCall {
  PythonTensor x, q, scale;
  OptionalTensor partial;
  Fp8Granularity granularity = Fp8Granularity::kTensor;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kFp8Quantize, values, count).Expect(5)) return false;
    if (!x.Read(values[0], kFp8Quantize, "x") || !q.Read(values[1], kFp8Quantize, "q") ||
        !scale.Read(values[2], kFp8Quantize, "scale") ||
        !partial.Read(values[3], kFp8Quantize, "partial")) {
      return false;
    }
    const long index = PyLong_AsLong(values[4]);
    if (index == -1 && PyErr_Occurred()) return false;
    if (index < 0 || index > static_cast<long>(Fp8Granularity::kBlock)) {
      PyErr_Format(PyExc_ValueError, "%s: no granularity has the index %ld", kFp8Quantize, index);
      return false;
    }
    granularity = static_cast<Fp8Granularity>(index);
    return true;
  }
};

PyObject* Fp8Quantize(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Fp8QuantizeCall call;
  if (!call.Parse(values, count)) return nullptr;
  // An empty x has no memory and so no stream, yet its scale is written.
  return Launch(call.scale, [&](void* stream) {
    return fp8_quantize(call.x.view(), call.q.view(), call.scale.view(), call.partial.view(),
                        call.granularity, stream);
  });
}

PyObject* Fp8QuantizePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Fp8QuantizeCall call;
  if (!call.Parse(values, count)) return nullptr;
  Fp8QuantizePlan plan{};
  const Status status = fp8_quantize_plan(call.x.view(), call.q.view(), call.scale.view(),
                                          call.partial.view(), call.granularity, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:L, s:I}", "kernel", plan.kernel, "launches",
                       plan.launches, "vectors", plan.vectors, "grid",
                       static_cast<long long>(plan.grid), "block", plan.block);
}

// (x, q, scale, counters or None, granularity's index, x_is_older, starts_next)
PyObject* Fp8QuantizeBetween(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!Arguments(kFp8Quantize, values, count).Expect(7)) return nullptr;
  Fp8QuantizeCall call;
  if (!call.Parse(values, 5)) return nullptr;
  const bool x_is_older = values[5] == Py_True, starts_next = values[6] == Py_True;
  return Launch(call.scale, [&](void* stream) {
    return fp8_quantize_between(call.x.view(), call.q.view(), call.scale.view(),
                                call.partial.view(), call.granularity, x_is_older, starts_next,
                                stream);
  });
}

// (x, scale, q)
PyObject* Fp8QuantizeStatic(PyObject*, PyObject* const* values, Py_ssize_t count) {
  PythonTensor x, scale, q;
  Arguments arguments(kFp8Quantize, values, count);
  if (!arguments.Expect(3) || !arguments.NextTensor("x", &x) ||
      !arguments.NextTensor("scale", &scale) || !arguments.NextTensor("q", &q)) {
    return nullptr;
  }
  return Launch(x, [&](void* stream) {
    return fp8_quantize_static(x.view(), scale.view(), q.view(), stream);
  });
}

// (x, global_scale or None, q, scale); for the way back (q, scale, global_scale or None, out).
struct Nvfp4Call {
  PythonTensor values, q, scale;
  OptionalTensor global_scale;

  bool ParseQuantize(PyObject* const* objects, Py_ssize_t count) {
    return Arguments(kNvfp4Quantize, objects, count).Expect(4) &&
           values.Read(objects[0], kNvfp4Quantize, "x") &&
           global_scale.Read(objects[1], kNvfp4Quantize, "global_scale") &&
           q.Read(objects[2], kNvfp4Quantize, "q") &&
           scale.Read(objects[3], kNvfp4Quantize, "scale");
  }
  bool ParseDequantize(PyObject* const* objects, Py_ssize_t count) {
    return Arguments(kNvfp4Dequantize, objects, count).Expect(4) &&
           q.Read(objects[0], kNvfp4Dequantize, "q") &&
           scale.Read(objects[1], kNvfp4Dequantize, "scale") &&
           global_scale.Read(objects[2], kNvfp4Dequantize, "global_scale") &&
           values.Read(objects[3], kNvfp4Dequantize, "out");
  }
};

PyObject* PlanDict(const Status& status, const Nvfp4Plan& plan) {
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:L, s:I}", "kernel", plan.kernel, "grid",
                       static_cast<long long>(plan.grid), "block", plan.block);
}

PyObject* Nvfp4Quantize(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Nvfp4Call call;
  if (!call.ParseQuantize(objects, count)) return nullptr;
  return Launch(call.values, [&](void* stream) {
    return nvfp4_quantize(call.values.view(), call.global_scale.view(), call.q.view(),
                          call.scale.view(), stream);
  });
}

PyObject* Nvfp4QuantizePlanOf(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Nvfp4Call call;
  if (!call.ParseQuantize(objects, count)) return nullptr;
  Nvfp4Plan plan{};
  const Status status = nvfp4_quantize_plan(call.values.view(), call.global_scale.view(),
                                            call.q.view(), call.scale.view(), &plan);
  return PlanDict(status, plan);
}

PyObject* Nvfp4Dequantize(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Nvfp4Call call;
  if (!call.ParseDequantize(objects, count)) return nullptr;
  return Launch(call.values, [&](void* stream) {
    return nvfp4_dequantize(call.q.view(), call.scale.view(), call.global_scale.view(),
                            call.values.view(), stream);
  });
}

PyObject* Nvfp4DequantizePlanOf(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Nvfp4Call call;
  if (!call.ParseDequantize(objects, count)) return nullptr;
  Nvfp4Plan plan{};
  const Status status = nvfp4_dequantize_plan(call.q.view(), call.scale.view(),
                                              call.global_scale.view(), call.values.view(), &plan);
  return PlanDict(status, plan);
}

PyObject* Fp8QuantizeLoad(PyObject*, PyObject* device) { return Load(device, fp8_quantize_load); }
PyObject* Nvfp4QuantizeLoad(PyObject*, PyObject* device) {
  return Load(device, nvfp4_quantize_load);
}
PyObject* Nvfp4DequantizeLoad(PyObject*, PyObject* device) {
  return Load(device, nvfp4_dequantize_load);
}

#define TIERCEL_FAST(name, function, signature, text)                                          \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, \
   name signature "\n--\n\n" text}
#define TIERCEL_LOAD(name, function) \
  {name, function, METH_O,           \
   name "(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."}

PyMethodDef functions[] = {
    TIERCEL_FAST("fp8_quantize", Fp8Quantize, "(x, q, scale, partial, granularity, /)",
                 "Launches the kernels on the current stream; fills `q` and `scale`."),
    TIERCEL_FAST("fp8_quantize_plan", Fp8QuantizePlanOf, "(x, q, scale, partial, granularity, /)",
                 "Checks the arguments as a launch does and returns the configuration."),
    TIERCEL_FAST("fp8_quantize_between", Fp8QuantizeBetween,
                 "(x, q, scale, counters, granularity, x_is_older, starts_next, /)",
                 "Of rows or groups, overlapping with the launches before and after it."),
    TIERCEL_FAST("fp8_quantize_static", Fp8QuantizeStatic, "(x, scale, q, /)",
                 "The same with a scale that is given; fills `q`."),
    TIERCEL_LOAD("fp8_quantize_load", Fp8QuantizeLoad),
    TIERCEL_FAST("nvfp4_quantize", Nvfp4Quantize, "(x, global_scale, q, scale, /)",
                 "Launches the kernel on the current stream; fills `q` and `scale`."),
    TIERCEL_FAST("nvfp4_quantize_plan", Nvfp4QuantizePlanOf, "(x, global_scale, q, scale, /)",
                 "Checks the arguments as a launch does and returns the configuration."),
    TIERCEL_LOAD("nvfp4_quantize_load", Nvfp4QuantizeLoad),
    TIERCEL_FAST("nvfp4_dequantize", Nvfp4Dequantize, "(q, scale, global_scale, out, /)",
                 "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("nvfp4_dequantize_plan", Nvfp4DequantizePlanOf, "(q, scale, global_scale, out, /)",
                 "Checks the arguments as a launch does and returns the configuration."),
    TIERCEL_LOAD("nvfp4_dequantize_load", Nvfp4DequantizeLoad),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* QuantFunctions() { return functions; }

}  // namespace tiercel::python
