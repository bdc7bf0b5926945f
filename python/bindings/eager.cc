// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/eager.h"

#include "python/bindings/arguments.h"
#include "python/bindings/call.h"

namespace tiercel::python {
namespace {

// A property or a method without arguments of torch.Tensor, called without looking it up: that
// would take longer than what it does. Only for tensors whose type is torch's own.
class TensorReader {
 public:
  // False with a Python exception.
  bool Find(PyObject* type, const char* name) {
    name_ = PyUnicode_InternFromString(name);
    // Kept: torch's types live as long as we do.
    PyObject* found = name_ == nullptr ? nullptr : PyObject_GetAttr(type, name_);
    if (found == nullptr) return false;
    if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
      const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
      if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
      is_method_ = true;
    } else if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
      property_ = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
    }
    return true;
  }

  PyObject* Read(PyObject* tensor) const {
    if (method_ != nullptr) return method_(tensor, nullptr);
    if (property_ != nullptr) return property_->get(tensor, property_->closure);
    return is_method_ ? PyObject_CallMethodNoArgs(tensor, name_) : PyObject_GetAttr(tensor, name_);
  }

 private:
  PyObject* name_ = nullptr;
  PyCFunction method_ = nullptr;
  const PyGetSetDef* property_ = nullptr;
  bool is_method_ = false;
};

// A function without arguments; one in C is called without Python's checks of the call.
class Getter {
 public:
  explicit Getter(PyObject* function) : function_(function) {
    if (PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == METH_NOARGS) {
      direct_ = PyCFunction_GET_FUNCTION(function);
      self_ = PyCFunction_GET_SELF(function);
    }
  }

  PyObject* operator()() const {
    return direct_ != nullptr ? direct_(self_, nullptr) : PyObject_CallNoArgs(function_);
  }

 private:
  PyObject* function_;
  PyCFunction direct_ = nullptr;
  PyObject* self_ = nullptr;
};

// Set by tiercel.core.eager once torch is imported. Never freed: Python may be gone at exit.
struct Hooks {
  PyObject* exact_types[2];  // torch.Tensor and torch.nn.Parameter
  Getter transforms;         // whether a functorch transform is active
  PyObject* forward_ad;      // module whose _current_level is negative outside of forward AD
  Getter dispatch_modes;     // how many are active
  Getter function_modes;     // how many are active
  Getter is_tracing;         // whether torch.jit.trace runs
  Getter is_grad_enabled;    // bool
  Getter is_profiled;        // whether a profiler runs
  PyObject* name_level;      // "_current_level"
  TensorReader needs_grad;
  TensorReader is_neg;
  TensorReader device;
  TensorReader dtype;
};
Hooks* hooks = nullptr;

// The checks below return 1 for yes, 0 for no, -1 with a Python exception.

int Truth(PyObject* value) {
  if (value == nullptr) return -1;
  const int truth = PyObject_IsTrue(value);
  Py_DECREF(value);
  return truth;
}

int IsTransformed() {
  const int level = Truth(hooks->transforms());
  if (level != 0) return level;
  PyObject* forward = PyObject_GetAttr(hooks->forward_ad, hooks->name_level);
  if (forward == nullptr) return -1;
  const long depth = PyLong_AsLong(forward);
  Py_DECREF(forward);
  return depth == -1 && PyErr_Occurred() ? -1 : depth >= 0;
}

int IsObserved() {
  int observed = Truth(hooks->dispatch_modes());
  if (observed == 0) observed = Truth(hooks->function_modes());
  if (observed == 0) observed = Truth(hooks->is_tracing());
  return observed;
}

// What a dtype tells about tensors; null is one that could not be read. To ask torch takes longer.

// Real parts of complex tensors have other dtypes, and torch refuses a view of them as one of
// these.
bool MayBeNegated(const TensorView* view) {
  return view == nullptr || view->dtype == DType::kFloat32 || view->dtype == DType::kFloat16 ||
         view->dtype == DType::kFloat64 || view->dtype == DType::kUnknown;
}

bool MayNeedGrad(const TensorView* view) {
  return view == nullptr || (view->dtype != DType::kInt32 && view->dtype != DType::kInt64);
}

// Views like z.conj().imag hold the negative of what is in memory; the dispatcher resolves them.
int IsNegated(PyObject* const* tensors, Py_ssize_t count, const TensorsOfCall& read) {
  int negated = 0;
  for (Py_ssize_t i = 0; i < count && negated == 0; ++i) {
    if (MayBeNegated(read.view(i))) negated = Truth(hooks->is_neg.Read(tensors[i]));
  }
  return negated;
}

int NeedsGrad(PyObject* const* tensors, Py_ssize_t count, const TensorsOfCall& read) {
  int wanted = 0;
  for (Py_ssize_t i = 0; i < count && wanted == 0; ++i) {
    if (MayNeedGrad(read.view(i))) wanted = Truth(hooks->needs_grad.Read(tensors[i]));
  }
  return wanted > 0 ? Truth(hooks->is_grad_enabled()) : wanted;
}

// route(*tensors)
PyObject* RouteOf(PyObject*, PyObject* const* tensors, Py_ssize_t count) {
  Route route;
  TensorsOfCall read;
  return FindRoute(tensors, count, &read, &route) ? PyLong_FromLong(static_cast<long>(route))
                                                  : nullptr;
}

// In the order of the fields of Hooks.
PyObject* SetRouteHooks(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!ExpectCount("set_route_hooks", 9, count)) return nullptr;
  TensorReader needs_grad, is_neg, device, dtype;
  PyObject* name_level = PyUnicode_InternFromString("_current_level");
  if (name_level == nullptr || !needs_grad.Find(values[0], "requires_grad") ||
      !is_neg.Find(values[0], "is_neg") || !device.Find(values[0], "get_device") ||
      !dtype.Find(values[0], "dtype")) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) Py_INCREF(values[i]);
  hooks = new Hooks{{values[0], values[1]},
                    Getter(values[2]),
                    values[3],
                    Getter(values[4]),
                    Getter(values[5]),
                    Getter(values[6]),
                    Getter(values[7]),
                    Getter(values[8]),
                    name_level,
                    needs_grad,
                    is_neg,
                    device,
                    dtype};
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"route", AsMethod(RouteOf), METH_FASTCALL,
     "route(*tensors)\n--\n\nHow to run an operator on these tensors, see tiercel.core.eager."},
    {"set_route_hooks", AsMethod(SetRouteHooks), METH_FASTCALL,
     "set_route_hooks(tensor, parameter, transforms, forward_ad, dispatch_modes, function_modes, "
     "is_tracing, is_grad_enabled, is_profiled, /)\n--\n\nWhat of torch's `route` asks."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool ArePlainTensors(PyObject* const* tensors, Py_ssize_t count) {
  if (hooks == nullptr) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensors[i]));
    if (type != hooks->exact_types[0] && type != hooks->exact_types[1]) return false;
  }
  return true;
}

bool FindRoute(PyObject* const* tensors, Py_ssize_t count, TensorsOfCall* read, Route* route) {
  *route = Route::kDispatch;
  if (!ArePlainTensors(tensors, count)) return true;
  int answer = IsTransformed();
  if (answer > 0) *route = Route::kTransformed;
  if (answer != 0) return answer > 0;
  answer = IsObserved();
  if (answer != 0) return answer > 0;
  read->Read(tensors, count);
  answer = IsNegated(tensors, count, *read);
  if (answer != 0) return answer > 0;
  answer = NeedsGrad(tensors, count, *read);
  *route = answer > 0 ? Route::kGrad : Route::kDirect;
  return answer >= 0;
}

int IsProfiled() { return Truth(hooks->is_profiled()); }

PyObject* DeviceOf(PyObject* tensor) { return hooks->device.Read(tensor); }

PyObject* DTypeObjectOf(PyObject* tensor) { return hooks->dtype.Read(tensor); }

PyMethodDef* EagerFunctions() { return functions; }

}  // namespace tiercel::python
