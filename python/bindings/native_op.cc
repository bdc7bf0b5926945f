// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/native_op.h"

#include <atomic>
#include <cstring>
#include <list>
#include <mutex>

#include "kernels/sm90/driver.h"
#include "python/bindings/torch_shim.h"

namespace tiercel::python {
namespace {

const TorchShim* torch = nullptr;  // set before the first call

Status OfTorch(const NativeOp& op, const char* what) {
  return Status::RuntimeError(op.name + ": PyTorch could not " + what);
}

template <typename Value>
Value FromStack(StackValue word) {
  Value value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <typename Value>
StackValue ToStack(Value value) {
  StackValue word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

// The arguments of one call, which belong to it.
class StackArguments {
 public:
  StackArguments(const NativeOp& op, const StackValue* stack) : op_(op) {
    for (size_t i = 0; i < op.arguments.size(); ++i) Take(i, stack[i]);
  }
  StackArguments(const StackArguments&) = delete;
  StackArguments& operator=(const StackArguments&) = delete;
  ~StackArguments() {
    for (size_t i = 0; i < op_.arguments.size(); ++i) {
      if (!given_[i]) continue;
      const auto kind = op_.arguments[i].kind;
      if (kind == NativeArgument::kTensor) torch->delete_tensor_object(tensor(i));
      if (kind == NativeArgument::kString) torch->delete_string(string(i));
    }
  }

  // Describes the tensors.
  Status Read() {
    for (const ptrdiff_t place : op_.layout.tensors) {
      if (!given_[place]) continue;
      TensorView& view = views_[place];
      int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
      int32_t dtype = 0, device_type = 0;
      TensorOfTorch* handle = tensor(place);
      if (torch->get_dim(handle, &dim) != 0 || torch->get_sizes(handle, &sizes) != 0 ||
          torch->get_strides(handle, &strides) != 0 || torch->get_dtype(handle, &dtype) != 0 ||
          torch->get_device_type(handle, &device_type) != 0 ||
          torch->get_device_index(handle, &view.device_index) != 0 ||
          torch->get_data_ptr(handle, &view.data) != 0) {
        return OfTorch(op_, ("describe `" + op_.arguments[place].name + "`").c_str());
      }
      view.ndim = static_cast<int32_t>(dim);
      view.shape = sizes;
      view.strides = strides;
      view.dtype = torch->DTypeOf(dtype);
      view.device_type = device_type == torch->cuda ? DeviceType::kCUDA : DeviceType::kOther;
      dtypes_[place] = dtype;
    }
    return Status();
  }

  bool IsGiven(ptrdiff_t place) const { return given_[place]; }
  const TensorView* view(ptrdiff_t place) const {
    const bool is_tensor = op_.arguments[place].kind == NativeArgument::kTensor;
    return is_tensor && given_[place] ? &views_[place] : nullptr;
  }
  bool ReadInt(ptrdiff_t place, long long* number) const {
    if (op_.arguments[place].kind != NativeArgument::kInt || !given_[place]) return false;
    *number = FromStack<int64_t>(words_[place]);
    return true;
  }
  TensorOfTorch* tensor(ptrdiff_t place) const { return FromStack<TensorOfTorch*>(words_[place]); }

  // torch's number of a tensor's dtype, or of the dtype that the argument is.
  int32_t DTypeOf(ptrdiff_t place) const {
    const bool is_tensor = op_.arguments[place].kind == NativeArgument::kTensor;
    return is_tensor ? dtypes_[place] : FromStack<int32_t>(words_[place]);
  }

  std::string TextOf(ptrdiff_t place) const {
    const char* text = nullptr;
    size_t length = 0;
    if (torch->string_c_str(string(place), &text) != 0 ||
        torch->string_length(string(place), &length) != 0) {
      return std::string();
    }
    return std::string(text, length);
  }

  NativeValue Value(ptrdiff_t place) const {
    if (!given_[place]) return NativeValue();
    switch (op_.arguments[place].kind) {
      case NativeArgument::kTensor:
        return NativeValue::Of(&views_[place]);
      case NativeArgument::kBool:
        return NativeValue::Of(FromStack<bool>(words_[place]));
      case NativeArgument::kInt:
        return NativeValue::Of(FromStack<int64_t>(words_[place]));
      case NativeArgument::kFloat:
        return NativeValue::Of(FromStack<double>(words_[place]));
      default:
        return NativeValue();
    }
  }

  // The argument as the key of a lookup.
  std::string KeyOf(ptrdiff_t place) const {
    if (!given_[place]) return "-";
    long long number = 0;
    if (ReadInt(place, &number)) return "i:" + std::to_string(number);
    return op_.arguments[place].kind == NativeArgument::kString ? "s:" + TextOf(place) : "?";
  }

 private:
  void Take(size_t place, StackValue word) {
    given_[place] = true;
    if (op_.arguments[place].optional) {
      auto* value = FromStack<StackValue*>(word);
      given_[place] = value != nullptr;
      if (value == nullptr) return;
      word = *value;
      if (torch->delete_stable_ivalue != nullptr) {
        torch->delete_stable_ivalue(value);
      } else {
        delete value;
      }
    }
    words_[place] = word;
  }

  StringOfTorch* string(ptrdiff_t place) const { return FromStack<StringOfTorch*>(words_[place]); }

  const NativeOp& op_;
  bool given_[kMaxArguments] = {};
  StackValue words_[kMaxArguments];
  int32_t dtypes_[kMaxArguments];
  TensorView views_[kMaxArguments];
};

// The results, which belong to the call until they are handed over.
class StackOutputs {
 public:
  ~StackOutputs() {
    for (ptrdiff_t i = 0; i < count_; ++i) torch->delete_tensor_object(tensors_[i]);
  }

  Status Make(const NativeOp& op, const StackArguments& arguments) {
    for (const auto& output : op.outputs) {
      const TensorView* like = arguments.view(output.like);
      int64_t* const sizes = sizes_[count_];
      int64_t* const strides = strides_[count_];
      bool fits = like != nullptr;
      const ptrdiff_t dim =
          !fits ? -1 : EachSize(output, arguments, [&](ptrdiff_t i, int64_t size) {
            fits = fits && i < kMaxOutputDims;
            if (fits) sizes[i] = size;
          });
      if (dim < 0 || !fits) {
        return Status::InvalidArgument(op.name + ": the arguments do not give the results' shapes");
      }
      int64_t step = 1;
      for (ptrdiff_t i = dim; i-- > 0;) {
        strides[i] = step;
        step *= sizes[i] > 0 ? sizes[i] : 1;
      }
      const int32_t dtype = DTypeOf(output, arguments);
      if (torch->empty_strided(dim, sizes, strides, dtype, torch->cuda, like->device_index,
                               &tensors_[count_]) != 0) {
        return OfTorch(op, "allocate a result");
      }
      TensorView& view = views_[count_];
      const int place = static_cast<int>(count_++);
      if (torch->get_data_ptr(tensors_[place], &view.data) != 0) {
        return OfTorch(op, "describe a result");
      }
      view.dtype = torch->DTypeOf(dtype);
      view.device_type = DeviceType::kCUDA;
      view.device_index = like->device_index;
      view.ndim = static_cast<int32_t>(dim);
      view.shape = sizes;
      view.strides = strides;
    }
    return Status();
  }

  const TensorView* view(ptrdiff_t i) const { return &views_[i]; }

  void Release(StackValue* stack) {
    for (ptrdiff_t i = 0; i < count_; ++i) stack[i] = ToStack(tensors_[i]);
    count_ = 0;
  }

 private:
  static int32_t DTypeOf(const OutputOf<const char*>& output, const StackArguments& arguments) {
    const bool other = output.other_dtype != nullptr && arguments.IsGiven(output.other_place);
    const char* name = other ? output.other_dtype : output.dtype;
    const int32_t dtype =
        name != nullptr ? torch->DTypeNamed(name) : arguments.DTypeOf(output.dtype_place);
    const bool unwanted =
        !other && output.unwanted != nullptr && dtype == torch->DTypeNamed(output.unwanted);
    return unwanted ? torch->DTypeNamed(output.instead) : dtype;
  }

  ptrdiff_t count_ = 0;
  TensorOfTorch* tensors_[kMaxOutputs];
  TensorView views_[kMaxOutputs];
  int64_t sizes_[kMaxOutputs][kMaxOutputDims];
  int64_t strides_[kMaxOutputs][kMaxOutputDims];
};

// Kernels are built for compute capability 9.0.
Status CheckDevice(const NativeOp& op, int device) {
  constexpr int kDevices = 64;
  static std::atomic<bool> known[kDevices];
  if (device >= 0 && device < kDevices && known[device].load(std::memory_order_relaxed)) {
    return Status();
  }
  int major = 0, minor = 0;
  if (const Status status = device_capability(device, &major, &minor); !status.ok()) return status;
  if (major != 9 || minor != 0) {
    return Status::RuntimeError(op.name + ": GPU " + std::to_string(device) +
                                " has compute capability " + std::to_string(major) + "." +
                                std::to_string(minor) +
                                ", and the kernels are built for 9.0 (H100, H200)");
  }
  if (device >= 0 && device < kDevices) known[device].store(true, std::memory_order_relaxed);
  return Status();
}

Status CheckBackend(const NativeOp& op, const StackArguments& arguments) {
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (op.arguments[i].name != "backend" || !arguments.IsGiven(i)) continue;
    const std::string backend = arguments.TextOf(i);
    if (backend == "sm90" || backend == "auto") return Status();
    return Status::InvalidArgument(op.name +
                                   ": `backend` must be 'sm90', 'auto' or None where ops "
                                   "run without Python, got '" +
                                   backend + "'");
  }
  return Status();
}

// A new version for autograd: that of a view without elements is its tensor's, and zero_ adds one.
Status CountAsWritten(const NativeOp& op, const StackArguments& arguments) {
  static constexpr int64_t kNoElements[64] = {};
  for (const ptrdiff_t place : op.layout.tensors) {
    const TensorView* view = arguments.view(place);
    if (!op.arguments[place].written || view == nullptr) continue;
    TensorOfTorch* part = nullptr;
    if (view->ndim < 1 || view->ndim > 64 ||
        torch->as_strided(arguments.tensor(place), kNoElements, view->strides, &part) != 0) {
      return OfTorch(op, ("mark `" + op.arguments[place].name + "` as written").c_str());
    }
    const int failed = torch->zero_(part);
    torch->delete_tensor_object(part);
    if (failed != 0) {
      return OfTorch(op, ("mark `" + op.arguments[place].name + "` as written").c_str());
    }
  }
  return Status();
}

Status RunCall(const NativeOp& op, const StackArguments& arguments, StackOutputs* outputs) {
  const ptrdiff_t first = op.layout.tensors.items[0];
  const TensorView& device_of = *arguments.view(first);
  if (device_of.device_type != DeviceType::kCUDA) {
    return Status::InvalidArgument(op.name + ": `" + op.arguments[first].name +
                                   "` must be on a CUDA device");
  }
  if (Status status = CheckBackend(op, arguments); !status.ok()) return status;
  if (Status status = CheckDevice(op, device_of.device_index); !status.ok()) return status;
  if (const ptrdiff_t place = UnfitTensor(op.layout, arguments); place >= 0) {
    return Status::Unimplemented(
        op.name + ": without Python, `" + op.arguments[place].name +
        "` must have the shape, and be contiguous, as the kernel takes it; only Python rearranges "
        "tensors");
  }
  if (Status status = outputs->Make(op, arguments); !status.ok()) return status;
  NativeValue values[kMaxArguments];
  size_t count = 0;
  for (const NativeSlot& slot : op.slots) {
    NativeValue& value = values[count++];
    if (slot.kind == NativeSlot::kArgument) {
      value = arguments.Value(slot.index);
    } else if (slot.kind == NativeSlot::kOutput) {
      value = NativeValue::Of(outputs->view(slot.index));
    } else if (slot.kind == NativeSlot::kConstant) {
      value = slot.constant;
    } else {
      const std::string key = arguments.KeyOf(slot.index);
      bool found = false;
      for (const auto& [known, of_key] : slot.table) {
        if (known != key) continue;
        value = of_key;
        found = true;
      }
      if (!found) {
        return Status::InvalidArgument(
            op.name + ": `" + op.arguments[slot.index].name +
            "` has a value that the kernels do not take: " + key.substr(key.find(':') + 1));
      }
    }
  }
  void* stream = nullptr;
  if (Status status = torch->CurrentStream(device_of.device_index, &stream); !status.ok()) {
    return status;
  }
  if (Status status = op.function(values, count, stream); !status.ok()) return status;
  return CountAsWritten(op, arguments);
}

// The text of this thread's last error, which torch's exception takes when all else of the call is
// gone.
thread_local std::string last_error;

bool RunStack(const NativeOp& op, StackValue* stack) {
  StackArguments arguments(op, stack);
  StackOutputs outputs;
  Status status = arguments.Read();
  if (status.ok()) status = RunCall(op, arguments, &outputs);
  if (status.ok()) outputs.Release(stack);
  if (!status.ok()) last_error = status.message();
  return status.ok();
}

// torch's functions have no argument for the op, so that each op has a function of its own.
constexpr size_t kMostOps = 256;

template <size_t kOp>
void RunOp(StackValue* stack, uint64_t, uint64_t) {
  if (RunStack(NativeOps()[kOp], stack)) return;
  torch->check(false, "tiercel", __FILE__, __LINE__, last_error.c_str());
}

template <size_t... kOps>
BoxedFunction FunctionOf(size_t op, std::index_sequence<kOps...>) {
  static constexpr BoxedFunction kFunctions[] = {RunOp<kOps>...};
  return kFunctions[op];
}

std::string RegisterAll() {
  if (const Status status = FindTorch(&torch); !status.ok()) return status.message();
  if (const char* owner = ClaimOps("C++"); owner != nullptr) {
    return std::string("tiercel: the ops of this process are registered already, from ") + owner;
  }
  LibraryOfTorch *definitions = nullptr, *kernels = nullptr;
  if (torch->library_init_fragment("tiercel", __FILE__, __LINE__, &definitions) != 0 ||
      torch->library_init_impl("tiercel", "CUDA", __FILE__, __LINE__, &kernels) != 0) {
    return "tiercel: PyTorch could not make a library of ops";
  }
  const std::vector<NativeOp>& ops = NativeOps();
  for (size_t i = 0; i < ops.size() && i < kMostOps; ++i) {
    const BoxedFunction run = FunctionOf(i, std::make_index_sequence<kMostOps>());
    if (torch->library_def(definitions, ops[i].schema.c_str()) != 0 ||
        torch->library_impl(kernels, ops[i].name.c_str(), run, kTorchInterface) != 0) {
      return "tiercel: PyTorch could not register " + ops[i].name;
    }
  }
  return std::string();
}

}  // namespace

const char* ClaimOps(const char* owner) {
  static std::atomic<const char*> claimed{nullptr};
  const char* before = nullptr;
  return claimed.compare_exchange_strong(before, owner) ? nullptr : before;
}

}  // namespace tiercel::python

extern "C" const char* tiercel_register_torch_ops() {
  static std::mutex mutex;
  static auto* const errors = new std::list<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::string error = tiercel::python::RegisterAll();
  if (error.empty()) return nullptr;
  errors->push_back(std::move(error));
  return errors->back().c_str();
}
