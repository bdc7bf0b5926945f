// SPDX-License-Identifier: Apache-2.0
// tiercel._C.Launcher: sm90's `run` of an operator whose outputs are like its arguments. It makes
// them, puts them and constants between the arguments, and launches. Whatever is not the plain case
// goes on to the Python function that knows them all.
#include "python/bindings/launcher.h"

#include <structmember.h>

#include <array>
#include <cstring>

#include "python/bindings/allocate.h"
#include "python/bindings/eager.h"
#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {
namespace {

constexpr Py_ssize_t kMaxOutputs = 2;
constexpr Py_ssize_t kMaxSlots = 16;
constexpr Py_ssize_t kMaxDims = 3;

// What the launch's function takes at one place.
struct Slot {
  enum Kind { kArgument, kOutput, kChoice, kConstant } kind;
  Py_ssize_t index;
  PyObject* value;  // a choice's table
};

// A contiguous tensor of an argument's shape, its last dimension divided; or, where that argument
// has `rank` dimensions, one whose dimensions are some of the arguments'.
struct Output {
  Py_ssize_t like;
  int64_t divisor;
  PyObject* dtype;  // None: the argument's
  Py_ssize_t rank;  // -1: any
  Py_ssize_t dim_count;
  struct {
    Py_ssize_t argument, dim;
  } dims[kMaxDims];
};

// An operator's own; lives as long as the process.
struct Launcher {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* launch;     // a function of this module
  PyObject* otherwise;  // (*arguments) -> outputs
  Py_ssize_t count;     // of the operator's arguments
  uint64_t dense;       // bit i: argument i is a tensor that has to be contiguous
  Py_ssize_t slot_count;
  Py_ssize_t output_count;
  Slot slots[kMaxSlots];
  Output outputs[kMaxOutputs];
};

PyObject* Kept(PyObject* object) {
  Py_INCREF(object);
  return object;
}

bool IsContiguous(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

// The arguments as tensors; the one read last is kept.
class Tensors {
 public:
  explicit Tensors(PyObject* const* args) : args_(args) {}

  // Null where it is not a tensor of torch's own.
  const TensorView* Read(Py_ssize_t place) {
    if (place == place_) return &tensor_.view();
    place_ = -1;
    if (!ArePlainTensors(args_ + place, 1)) return nullptr;
    if (!tensor_.Read(args_[place], "", "")) {
      PyErr_Clear();
      return nullptr;
    }
    place_ = place;
    return &tensor_.view();
  }

  PyObject* object(Py_ssize_t place) const { return args_[place]; }

 private:
  PyObject* const* args_;
  Py_ssize_t place_ = -1;
  PythonTensor tensor_;
};

bool AreDense(const Launcher* self, Tensors& tensors) {
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    if (!(self->dense >> i & 1)) continue;
    const TensorView* view = tensors.Read(i);
    if (view == nullptr || !IsContiguous(*view)) return false;
  }
  return true;
}

// The next three: null without a Python exception is not the plain case.

PyObject* SizesLike(const TensorView& view, int64_t divisor) {
  const int last = view.ndim - 1;
  if (divisor != 1 && (last < 0 || view.shape[last] % divisor != 0)) return nullptr;
  PyObject* sizes = PyTuple_New(view.ndim);
  for (int i = 0; sizes != nullptr && i <= last; ++i) {
    PyObject* size = PyLong_FromLongLong(view.shape[i] / (i == last ? divisor : 1));
    if (size != nullptr) {
      PyTuple_SET_ITEM(sizes, i, size);
    } else {
      Py_CLEAR(sizes);
    }
  }
  return sizes;
}

PyObject* SizesOf(const Output& output, Tensors& tensors) {
  PyObject* sizes = PyTuple_New(output.dim_count);
  for (Py_ssize_t i = 0; sizes != nullptr && i < output.dim_count; ++i) {
    const auto [argument, dim] = output.dims[i];
    const TensorView* view = tensors.Read(argument);
    PyObject* size = nullptr;
    if (view != nullptr && dim < view->ndim) size = PyLong_FromLongLong(view->shape[dim]);
    if (size != nullptr) {
      PyTuple_SET_ITEM(sizes, i, size);
    } else {
      Py_CLEAR(sizes);
    }
  }
  return sizes;
}

PyObject* MakeOutput(const Output& output, Tensors& tensors) {
  const TensorView* like = tensors.Read(output.like);
  if (like == nullptr) return nullptr;
  const bool any_rank = output.rank < 0;
  if (!any_rank && output.rank != like->ndim) return nullptr;
  PyObject* sizes = any_rank ? SizesLike(*like, output.divisor) : SizesOf(output, tensors);
  if (sizes == nullptr) return nullptr;
  PyObject* object = tensors.object(output.like);
  PyObject* dtype = output.dtype == Py_None ? DTypeObjectOf(object) : Kept(output.dtype);
  PyObject* made = dtype == nullptr ? nullptr : NewTensor(object, sizes, dtype);
  Py_XDECREF(dtype);
  Py_DECREF(sizes);
  return made;
}

// A borrowed reference, or null: without a Python exception, the table has nothing for it.
PyObject* Chosen(const Slot& slot, PyObject* const* args) {
  PyObject* key = args[slot.index];
  // Others may not be hashable.
  if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return nullptr;
  return PyDict_GetItemWithError(slot.value, key);
}

// What the operator returns: nothing, a tensor, or a tuple of them. Takes the references.
PyObject* Packed(PyObject* const* outputs, Py_ssize_t count) {
  if (count == 0) Py_RETURN_NONE;
  if (count == 1) return outputs[0];
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tuple == nullptr) {
      Py_DECREF(outputs[i]);
    } else {
      PyTuple_SET_ITEM(tuple, i, outputs[i]);
    }
  }
  return tuple;
}

PyObject* Call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const Launcher*>(object);
  Tensors tensors(args);
  if (PyVectorcall_NARGS(flags) != self->count || names != nullptr || !AreDense(self, tensors)) {
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
  }
  std::array<PyObject*, kMaxOutputs> outputs;
  Py_ssize_t made = 0;
  const auto drop = [&] {
    for (Py_ssize_t i = 0; i < made; ++i) Py_DECREF(outputs[i]);
  };
  for (; made < self->output_count; ++made) {
    outputs[made] = MakeOutput(self->outputs[made], tensors);
    if (outputs[made] != nullptr) continue;
    drop();
    return PyErr_Occurred() ? nullptr : PyObject_Vectorcall(self->otherwise, args, flags, nullptr);
  }
  std::array<PyObject*, kMaxSlots> values;
  for (Py_ssize_t i = 0; i < self->slot_count; ++i) {
    const Slot& slot = self->slots[i];
    values[i] = slot.kind == Slot::kArgument ? args[slot.index]
                : slot.kind == Slot::kOutput ? outputs[slot.index]
                : slot.kind == Slot::kChoice ? Chosen(slot, args)
                                             : slot.value;
    if (values[i] != nullptr) continue;
    drop();
    return PyErr_Occurred() ? nullptr : PyObject_Vectorcall(self->otherwise, args, flags, nullptr);
  }
  PyObject* launched = PyObject_Vectorcall(self->launch, values.data(), self->slot_count, nullptr);
  if (launched == nullptr) {
    drop();
    return nullptr;
  }
  Py_DECREF(launched);
  return Packed(outputs.data(), made);
}

bool Fail(const char* text) {
  PyErr_Format(PyExc_ValueError, "Launcher: %s", text);
  return false;
}

// A slot is ("argument", place), ("output", place), ("choice", (place, table)) or
// ("constant", value).
bool ReadSlots(Launcher* self, PyObject* slots) {
  if (PyTuple_GET_SIZE(slots) > kMaxSlots) return Fail("too many slots");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    const char* kind = nullptr;
    PyObject* value = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "sO", &kind, &value)) return false;
    Slot& slot = self->slots[self->slot_count++];
    slot.kind = std::strcmp(kind, "argument") == 0 ? Slot::kArgument
                : std::strcmp(kind, "output") == 0 ? Slot::kOutput
                : std::strcmp(kind, "choice") == 0 ? Slot::kChoice
                                                   : Slot::kConstant;
    if (slot.kind == Slot::kConstant) {
      slot.value = Kept(value);
      continue;
    }
    if (slot.kind == Slot::kChoice) {
      if (!PyArg_ParseTuple(value, "nO!", &slot.index, &PyDict_Type, &slot.value)) return false;
      Py_INCREF(slot.value);
    } else {
      slot.index = PyLong_AsSsize_t(value);
      if (slot.index == -1 && PyErr_Occurred()) return false;
    }
    const Py_ssize_t end = slot.kind == Slot::kOutput ? self->output_count : self->count;
    if (slot.index < 0 || slot.index >= end) return Fail("a slot's place is out of range");
  }
  return true;
}

// An output is (the argument that it is like, what its last dimension is divided by, its dtype, the
// argument's rank, [(argument, dimension)]).
bool ReadOutput(Launcher* self, PyObject* item) {
  Output& output = self->outputs[self->output_count++];
  long long divisor = 0;
  PyObject* dims = nullptr;
  if (!PyArg_ParseTuple(item, "nLOnO!", &output.like, &divisor, &output.dtype, &output.rank,
                        &PyTuple_Type, &dims)) {
    return false;
  }
  Py_INCREF(output.dtype);
  output.divisor = divisor;
  output.dim_count = PyTuple_GET_SIZE(dims);
  if (output.like < 0 || output.like >= self->count || divisor < 1 || output.dim_count > kMaxDims) {
    return Fail("an output is like no argument");
  }
  for (Py_ssize_t i = 0; i < output.dim_count; ++i) {
    auto& dim = output.dims[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(dims, i), "nn", &dim.argument, &dim.dim)) return false;
    if (dim.argument < 0 || dim.argument >= self->count || dim.dim < 0) {
      return Fail("an output's dimension is no argument's");
    }
  }
  return true;
}

bool ReadOutputs(Launcher* self, PyObject* outputs) {
  if (PyTuple_GET_SIZE(outputs) > kMaxOutputs) return Fail("too many outputs");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
    if (!ReadOutput(self, PyTuple_GET_ITEM(outputs, i))) return false;
  }
  return true;
}

PyObject* New(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {"launch", "count",     "slots", "outputs",
                                "dense",  "otherwise", nullptr};
  PyObject *launch, *slots, *outputs, *otherwise;
  Py_ssize_t count;
  unsigned long long dense;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "$OnO!O!KO:Launcher",
                                   const_cast<char**>(names), &launch, &count, &PyTuple_Type,
                                   &slots, &PyTuple_Type, &outputs, &dense, &otherwise)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Launcher*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = Call;
  self->count = count;
  self->dense = dense;
  self->launch = Kept(launch);
  self->otherwise = Kept(otherwise);
  if (ReadOutputs(self, outputs) && ReadSlots(self, slots)) {
    return reinterpret_cast<PyObject*>(self);
  }
  Py_DECREF(self);
  return nullptr;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("An operator's outputs and launch, see tiercel._launcher.")},
    {0, nullptr},
};

PyType_Spec spec = {"tiercel._C.Launcher", sizeof(Launcher), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

PyObject* MakeLauncherType() { return PyType_FromSpec(&spec); }

bool IsLauncher(PyObject* object) { return Py_TYPE(object)->tp_new == New; }

}  // namespace tiercel::python
