// SPDX-License-Identifier: Apache-2.0
// tiercel._C.JitKernel: a kernel that was compiled on this machine, launched as all others are.
#include "python/bindings/jit.h"

#include <cxxabi.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/cubin.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"
#include "python/bindings/call.h"

namespace py = pybind11;

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

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  Raise(status);
  throw py::error_already_set();
}

Dim3 Sizes(const py::tuple& sizes) {
  return {sizes[0].cast<uint32_t>(), sizes[1].cast<uint32_t>(), sizes[2].cast<uint32_t>()};
}

// One launch's arguments: where each is, and what it points into.
class Values {
 public:
  explicit Values(const Loaded& loaded) : loaded_(loaded) {}

  void Add(py::handle value, const std::string& label) {
    const size_t place = pointers_.size();
    const size_t size = loaded_.parameters[place].size;
    if (PyBytes_Check(value.ptr())) {  // as it is, of the right size: tiercel.jit sees to that
      if (static_cast<size_t>(PyBytes_GET_SIZE(value.ptr())) != size) {
        throw py::value_error(Text(label) + " must have " + std::to_string(size) + " bytes, got " +
                              std::to_string(PyBytes_GET_SIZE(value.ptr())));
      }
      pointers_.push_back(PyBytes_AS_STRING(value.ptr()));
    } else if (PyTuple_Check(value.ptr())) {
      if (size != sizeof(CUtensorMap)) throw py::value_error(Text(label) + " is no tensor map");
      AddMap(value.cast<py::tuple>(), label);
    } else {
      if (size != sizeof(void*)) {
        throw py::value_error(Text(label) + " has " + std::to_string(size) +
                              " bytes and takes no tensor");
      }
      addresses_.push_back(Read(value, label).data);
      pointers_.push_back(&addresses_.back());
    }
  }

  const PythonTensor* first() const { return tensors_.empty() ? nullptr : &tensors_.front(); }
  void** pointers() { return pointers_.data(); }

 private:
  std::string Text(const std::string& label) const { return loaded_.name + ": `" + label + "`"; }

  const TensorView& Read(py::handle value, const std::string& label) {
    PythonTensor& tensor = tensors_.emplace_back();
    if (!tensor.Read(value.ptr(), loaded_.name.c_str(), label.c_str())) {
      throw py::error_already_set();
    }
    const Argument argument{loaded_.name.c_str(), label.c_str(), tensor.view()};
    ThrowIfError(check_cuda(argument));
    if (tensors_.size() > 1) {
      const Argument first{loaded_.name.c_str(), "the first tensor", tensors_.front().view()};
      ThrowIfError(check_same_device(argument, first));
    }
    return tensor.view();
  }

  // (tensor, box, swizzle, L2 promotion), the last two as the driver counts.
  void AddMap(const py::tuple& value, const std::string& label) {
    TensorMapSpec spec{};
    for (py::handle side : value[1]) {
      if (spec.rank == kTensorMapMaxRank)
        throw py::value_error(Text(label) + " has a rank above 5");
      spec.box[spec.rank++] = side.cast<uint32_t>();
    }
    spec.swizzle = static_cast<CUtensorMapSwizzle>(value[2].cast<int>());
    spec.l2_promotion = static_cast<CUtensorMapL2promotion>(value[3].cast<int>());
    const TensorView& view = Read(value[0], label);
    ThrowIfError(driver_status());
    auto map = std::make_unique<CUtensorMap>();
    ThrowIfError(encode_tensor_map(spec, view, loaded_.name.c_str(), label.c_str(), map.get()));
    pointers_.push_back(map.get());
    maps_.push_back(std::move(map));
  }

  const Loaded& loaded_;
  std::deque<PythonTensor> tensors_;
  std::deque<void*> addresses_;
  std::deque<std::unique_ptr<CUtensorMap>> maps_;
  std::vector<void*> pointers_;
};

class JitKernel {
 public:
  JitKernel(const py::bytes& image, std::string symbol, std::string name,
            const std::vector<std::pair<int, int>>& parameters, uint32_t max_dynamic_smem) {
    std::vector<CubinParameter> layout;
    for (const auto& [offset, size] : parameters) {
      layout.push_back({static_cast<uint16_t>(offset), static_cast<uint16_t>(size)});
    }
    loaded_ =
        new Loaded(image, std::move(symbol), std::move(name), std::move(layout), max_dynamic_smem);
  }

  void Launch(const py::tuple& grid, const py::tuple& block, const py::tuple& cluster,
              uint32_t dynamic_smem, bool dependent, const py::tuple& labels,
              const py::tuple& arguments) const {
    if (arguments.size() != loaded_->parameters.size() || labels.size() != arguments.size()) {
      throw py::type_error(loaded_->name + ": takes " + std::to_string(loaded_->parameters.size()) +
                           " arguments, got " + std::to_string(arguments.size()));
    }
    Values values(*loaded_);
    for (size_t i = 0; i < arguments.size(); ++i) {
      values.Add(arguments[i], labels[i].cast<std::string>());
    }
    if (values.first() == nullptr) {
      throw py::value_error(loaded_->name +
                            ": one argument must be a tensor, whose device and "
                            "stream it is launched on");
    }
    LaunchConfig config;
    config.grid = Sizes(grid);
    config.block = Sizes(block);
    config.cluster = Sizes(cluster);
    config.dynamic_smem = dynamic_smem;
    config.dependent = dependent;
    if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
    void* stream = nullptr;
    if (!values.first()->CurrentStream(&stream)) throw py::error_already_set();
    const int device = values.first()->view().device_index;
    ThrowIfError(WithoutGil(
        [&] { return loaded_->kernel.launch(config, device, stream, values.pointers()); }));
  }

  void Load(int device) const {
    ThrowIfError(WithoutGil([&] { return loaded_->kernel.load(device); }));
  }

 private:
  Loaded* loaded_;
};

// "_Z5twicePfi" -> "twice(float*, int)"; what is not mangled stays as it is.
std::string Demangled(const std::string& symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : symbol;
  std::free(text);
  return result;
}

}  // namespace

void AddJit(py::module_& module) {
  py::class_<JitKernel>(module, "JitKernel", "A kernel of a cubin in memory, see tiercel.jit.")
      .def(py::init<const py::bytes&, std::string, std::string,
                    const std::vector<std::pair<int, int>>&, uint32_t>(),
           py::arg("image"), py::arg("symbol"), py::arg("name"), py::arg("parameters"),
           py::arg("max_dynamic_smem"))
      .def("launch", &JitKernel::Launch, py::arg("grid"), py::arg("block"), py::arg("cluster"),
           py::arg("dynamic_smem"), py::arg("dependent"), py::arg("labels"), py::arg("arguments"))
      .def("load", &JitKernel::Load, py::arg("device"));
  module.def("demangle", &Demangled, py::arg("symbol"), "The C++ name of a symbol.");
}

}  // namespace tiercel::python
