// SPDX-License-Identifier: Apache-2.0
// tiercel._C.JitKernel: a kernel that was compiled on this machine, launched as all others are.
#include "python/bindings/jit.h"

#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/cubin.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"
#include "python/bindings/call.h"
#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

// What a launch keeps alive and points to. Never freed: the driver keeps what was loaded of it.
struct Loaded {
  std::string image, symbol, name;
  std::vector<CubinParameter> parameters;
  Cubin cubin;
  CubinSymbol cubin_symbol;
  Kernel kernel;

  Loaded(std::string image_, std::string symbol_, std::string name_,
         std::vector<CubinParameter> parameters_, uint32_t max_dynamic_smem)
      : image(std::move(image_)),
        symbol(std::move(symbol_)),
        name(std::move(name_)),
        parameters(std::move(parameters_)),
        cubin(image.data()),
        cubin_symbol{&cubin, symbol.c_str(), parameters.data(),
                     static_cast<int>(parameters.size())},
        kernel(name.c_str(), &cubin_symbol, max_dynamic_smem) {}
};

// Returns the result of `work`; an exception of C++ becomes one of Python.
template <typename Work>
auto Guarded(Work&& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return {};
  }
}

// False with an exception set, as all checks below.
bool Passed(const Status& status) { return status.ok() || Raise(status) != nullptr; }

bool Fail(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  return false;
}

// `type` is raised where it is no number of 32 bits.
bool AsUnsigned(PyObject* value, uint32_t* out, PyObject* type) {
  const Reference index(PyNumber_Index(value));
  const unsigned long number = index ? PyLong_AsUnsignedLong(index.get()) : 0;
  if (PyErr_Occurred() || number > UINT32_MAX) {
    return Fail(type, "a size of a launch is an integer from 0 to 4294967295");
  }
  *out = static_cast<uint32_t>(number);
  return true;
}

bool AsSizes(PyObject* sizes, Dim3* out) {
  if (PyTuple_GET_SIZE(sizes) != 3) return Fail(PyExc_IndexError, "three sizes are expected");
  uint32_t* const values[] = {&out->x, &out->y, &out->z};
  for (int i = 0; i < 3; ++i) {
    if (!AsUnsigned(PyTuple_GET_ITEM(sizes, i), values[i], PyExc_RuntimeError)) return false;
  }
  return true;
}

// One launch's arguments: where each is, and what it points into.
class Values {
 public:
  explicit Values(const Loaded& loaded) : loaded_(loaded) {}

  bool Add(PyObject* value, const char* label) {
    const size_t place = pointers_.size();
    const size_t size = loaded_.parameters[place].size;
    if (PyBytes_Check(value)) {  // as it is, of the right size: tiercel.jit sees to that
      if (static_cast<size_t>(PyBytes_GET_SIZE(value)) != size) {
        return Fail(PyExc_ValueError, Text(label) + " must have " + std::to_string(size) +
                                          " bytes, got " + std::to_string(PyBytes_GET_SIZE(value)));
      }
      pointers_.push_back(PyBytes_AS_STRING(value));
      return true;
    }
    if (PyTuple_Check(value)) {
      if (size != sizeof(CUtensorMap)) {
        return Fail(PyExc_ValueError, Text(label) + " is no tensor map");
      }
      return AddMap(value, label);
    }
    if (size != sizeof(void*)) {
      return Fail(PyExc_ValueError,
                  Text(label) + " has " + std::to_string(size) + " bytes and takes no tensor");
    }
    if (!Read(value, label)) return false;
    addresses_.push_back(tensors_.back().view().data);
    pointers_.push_back(&addresses_.back());
    return true;
  }

  const PythonTensor* first() const { return tensors_.empty() ? nullptr : &tensors_.front(); }
  void** pointers() { return pointers_.data(); }

 private:
  std::string Text(const char* label) const { return loaded_.name + ": `" + label + "`"; }

  // Into tensors_, as its last.
  bool Read(PyObject* value, const char* label) {
    PythonTensor& tensor = tensors_.emplace_back();
    if (!tensor.Read(value, loaded_.name.c_str(), label)) return false;
    const Argument argument{loaded_.name.c_str(), label, tensor.view()};
    if (!Passed(check_cuda(argument))) return false;
    const Argument first{loaded_.name.c_str(), "the first tensor", tensors_.front().view()};
    return tensors_.size() == 1 || Passed(check_same_device(argument, first));
  }

  // (tensor, box, swizzle, L2 promotion), the last two as the driver counts.
  bool AddMap(PyObject* value, const char* label) {
    PyObject *tensor = nullptr, *box = nullptr;
    int swizzle = 0, promotion = 0;
    if (!PyArg_ParseTuple(value, "OOii", &tensor, &box, &swizzle, &promotion)) return false;
    const Reference sides(PySequence_Fast(box, "the box of a tensor map is a sequence"));
    if (!sides) return false;
    TensorMapSpec spec{};
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sides.get()); ++i) {
      if (spec.rank == kTensorMapMaxRank) {
        return Fail(PyExc_ValueError, Text(label) + " has a rank above 5");
      }
      uint32_t side = 0;
      if (!AsUnsigned(PySequence_Fast_GET_ITEM(sides.get(), i), &side, PyExc_RuntimeError))
        return false;
      spec.box[spec.rank++] = side;
    }
    spec.swizzle = static_cast<CUtensorMapSwizzle>(swizzle);
    spec.l2_promotion = static_cast<CUtensorMapL2promotion>(promotion);
    if (!Read(tensor, label) || !Passed(driver_status())) return false;
    auto map = std::make_unique<CUtensorMap>();
    if (!Passed(encode_tensor_map(spec, tensors_.back().view(), loaded_.name.c_str(), label,
                                  map.get()))) {
      return false;
    }
    pointers_.push_back(map.get());
    maps_.push_back(std::move(map));
    return true;
  }

  const Loaded& loaded_;
  std::deque<PythonTensor> tensors_;
  std::deque<void*> addresses_;
  std::deque<std::unique_ptr<CUtensorMap>> maps_;
  std::vector<void*> pointers_;
};

struct JitKernel {
  PyObject_HEAD;
  Loaded* loaded;
};

const Loaded& LoadedOf(PyObject* self) { return *reinterpret_cast<JitKernel*>(self)->loaded; }

// [(offset, size), ...]
bool AsLayout(PyObject* parameters, std::vector<CubinParameter>* layout) {
  const Reference all(PySequence_Fast(parameters, "parameters: a sequence is expected"));
  if (!all) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
    const Reference one(PySequence_Tuple(PySequence_Fast_GET_ITEM(all.get(), i)));
    int offset = 0, size = 0;
    if (!one || !PyArg_ParseTuple(one.get(), "ii", &offset, &size)) return false;
    layout->push_back({static_cast<uint16_t>(offset), static_cast<uint16_t>(size)});
  }
  return true;
}

PyObject* NewKernel(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* const kNames[] = {"image",      "symbol",           "name",
                                       "parameters", "max_dynamic_smem", nullptr};
  PyObject *image = nullptr, *parameters = nullptr, *most = nullptr;
  const char *symbol = nullptr, *name = nullptr;
  uint32_t max_dynamic_smem = 0;
  std::vector<CubinParameter> layout;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "SssOO:JitKernel", const_cast<char**>(kNames),
                                   &image, &symbol, &name, &parameters, &most) ||
      !AsUnsigned(most, &max_dynamic_smem, PyExc_TypeError)) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    if (!AsLayout(parameters, &layout)) return nullptr;
    Reference self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    std::string bytes(PyBytes_AS_STRING(image), static_cast<size_t>(PyBytes_GET_SIZE(image)));
    reinterpret_cast<JitKernel*>(self.get())->loaded =
        new Loaded(std::move(bytes), symbol, name, std::move(layout), max_dynamic_smem);
    return self.Release();
  });
}

PyObject* LaunchKernel(PyObject* self, PyObject* args, PyObject* keywords) {
  static const char* const kNames[] = {"grid",      "block",  "cluster",   "dynamic_smem",
                                       "dependent", "labels", "arguments", nullptr};
  PyObject *grid = nullptr, *block = nullptr, *cluster = nullptr, *smem = nullptr;
  PyObject *labels = nullptr, *arguments = nullptr;
  int dependent = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!O!OpO!O!:launch",
                                   const_cast<char**>(kNames), &PyTuple_Type, &grid, &PyTuple_Type,
                                   &block, &PyTuple_Type, &cluster, &smem, &dependent,
                                   &PyTuple_Type, &labels, &PyTuple_Type, &arguments)) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    const Loaded& loaded = LoadedOf(self);
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    if (static_cast<size_t>(count) != loaded.parameters.size() ||
        PyTuple_GET_SIZE(labels) != count) {
      Fail(PyExc_TypeError, loaded.name + ": takes " + std::to_string(loaded.parameters.size()) +
                                " arguments, got " + std::to_string(count));
      return nullptr;
    }
    Values values(loaded);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const char* label = PyUnicode_AsUTF8(PyTuple_GET_ITEM(labels, i));
      if (label == nullptr || !values.Add(PyTuple_GET_ITEM(arguments, i), label)) return nullptr;
    }
    if (values.first() == nullptr) {
      Fail(PyExc_ValueError, loaded.name +
                                 ": one argument must be a tensor, whose device and "
                                 "stream it is launched on");
      return nullptr;
    }
    LaunchConfig config;
    if (!AsSizes(grid, &config.grid) || !AsSizes(block, &config.block) ||
        !AsSizes(cluster, &config.cluster) ||
        !AsUnsigned(smem, &config.dynamic_smem, PyExc_TypeError)) {
      return nullptr;
    }
    config.dependent = dependent != 0;
    if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) Py_RETURN_NONE;
    const int device = values.first()->view().device_index;
    return Launch(*values.first(), [&](void* stream) {
      return loaded.kernel.launch(config, device, stream, values.pointers());
    });
  });
}

PyObject* LoadKernel(PyObject* self, PyObject* args, PyObject* keywords) {
  static const char* const kNames[] = {"device", nullptr};
  int device = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "i:load", const_cast<char**>(kNames), &device)) {
    return nullptr;
  }
  if (!Passed(WithoutGil([&] { return LoadedOf(self).kernel.load(device); }))) return nullptr;
  Py_RETURN_NONE;
}

// "_Z5twicePfi" -> "twice(float*, int)"; what is not mangled stays as it is.
PyObject* Demangle(PyObject*, PyObject* symbol) {
  const char* mangled = PyUnicode_AsUTF8(symbol);
  if (mangled == nullptr) return nullptr;
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  PyObject* result = PyUnicode_FromString(status == 0 ? text : mangled);
  std::free(text);
  return result;
}

using WithKeywords = PyObject* (*)(PyObject*, PyObject*, PyObject*);

PyCFunction AsMethod(WithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"launch", AsMethod(LaunchKernel), METH_VARARGS | METH_KEYWORDS,
     "launch($self, grid, block, cluster, dynamic_smem, dependent, labels, arguments)\n--\n\n"},
    {"load", AsMethod(LoadKernel), METH_VARARGS | METH_KEYWORDS, "load($self, device)\n--\n\n"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewKernel)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("A kernel of a cubin in memory, see tiercel.jit.")},
    {0, nullptr},
};

PyType_Spec spec = {"tiercel._C.JitKernel", sizeof(JitKernel), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef functions[] = {
    {"demangle", Demangle, METH_O, "demangle(symbol, /)\n--\n\nThe C++ name of a symbol."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* MakeJitKernelType() { return PyType_FromSpec(&spec); }

PyMethodDef* JitFunctions() { return functions; }

}  // namespace tiercel::python
