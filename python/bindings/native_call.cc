// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/native_call.h"

#include <array>
#include <atomic>
#include <cstring>
#include <exception>

namespace tiercel::python {
namespace {

constexpr int kMaxDims = 16;

std::atomic<uint64_t> ready_devices{0};

bool operator==(const NativeValue& a, const NativeValue& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case NativeValue::kNone:
      return true;
    case NativeValue::kText:
      return std::strcmp(a.text, b.text) == 0;
    case NativeValue::kFloat:
      return a.real == b.real;
    default:
      return a.number == b.number;
  }
}

// Without the GIL while it lives, if this thread had it.
class NoGil {
 public:
  NoGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~NoGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* state_;
};

// Frees what a call owns on the stack.
void FreeArguments(const TorchShim& shim, const NativeOp& op, StackValue* stack) {
  for (const Argument& argument : op.arguments) {
    const StackValue* value = StackValueOf(argument, stack);
    if (value == nullptr) continue;
    if (argument.kind == Argument::kTensor) {
      shim.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(*value));
    } else if (argument.kind == Argument::kText) {
      shim.torch_delete_string(reinterpret_cast<StringHandle>(*value));
    }
    FreeBox(shim, argument, stack);
  }
}

// One call's arguments, for the rules of eager_rules.h too.
class Arguments {
 public:
  Arguments(const TorchShim& shim, const NativeOp& op, StackValue* stack)
      : shim_(shim), op_(op), stack_(stack) {}

  // False where one is left to Python.
  bool Read() {
    for (size_t place = 0; place < op_.arguments.size(); ++place) {
      const Argument& argument = op_.arguments[place];
      const StackValue* from = StackValueOf(argument, stack_);
      if (from == nullptr) continue;
      NativeValue& value = values_[place];
      switch (argument.kind) {
        case Argument::kTensor:
          if (!ReadTensor(place, reinterpret_cast<TensorHandle>(*from))) return false;
          break;
        case Argument::kFloat:
          value.kind = NativeValue::kFloat;
          std::memcpy(&value.real, from, sizeof(value.real));
          break;
        case Argument::kText:
          value.kind = NativeValue::kText;
          if (shim_.torch_string_c_str(reinterpret_cast<StringHandle>(*from), &value.text) != 0) {
            return false;
          }
          break;
        case Argument::kInt:
          value.kind = NativeValue::kInt;
          value.number = static_cast<int64_t>(*from);
          break;
        case Argument::kBool:
          value.kind = NativeValue::kBool;
          value.number = (*from & 0xFF) != 0;
          break;
        case Argument::kDType:
          value.kind = NativeValue::kInt;
          value.number = static_cast<int32_t>(*from);
          break;
      }
    }
    return true;
  }

  bool IsGiven(Py_ssize_t place) const { return values_[place].kind != NativeValue::kNone; }
  const TensorView* view(Py_ssize_t place) const {
    return values_[place].kind == NativeValue::kTensor ? values_[place].tensor : nullptr;
  }
  bool ReadInt(Py_ssize_t place, long long* number) const {
    if (values_[place].kind != NativeValue::kInt) return false;
    *number = values_[place].number;
    return true;
  }
  const NativeValue& value(Py_ssize_t place) const { return values_[place]; }
  TensorHandle handle(Py_ssize_t place) const {
    return reinterpret_cast<TensorHandle>(*StackValueOf(op_.arguments[place], stack_));
  }
  // torch's code for a tensor's dtype, or the dtype that an argument is.
  int32_t dtype(Py_ssize_t place) const {
    return op_.arguments[place].kind == Argument::kTensor
               ? dtypes_[place]
               : static_cast<int32_t>(value(place).number);
  }

 private:
  bool ReadTensor(size_t place, TensorHandle tensor) {
    bool defined = false;
    int32_t layout = 0, device = 0;
    int64_t dim = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    if (count_ == views_.size()) return false;
    TensorView& view = views_[count_];
    const bool read = shim_.aoti_torch_is_defined(tensor, &defined) == 0 && defined &&
                      shim_.aoti_torch_get_layout(tensor, &layout) == 0 &&
                      layout == shim_.aoti_torch_layout_strided() &&
                      shim_.aoti_torch_get_dim(tensor, &dim) == 0 && dim <= kMaxDims &&
                      shim_.aoti_torch_get_sizes(tensor, &sizes) == 0 &&
                      shim_.aoti_torch_get_strides(tensor, &strides) == 0 &&
                      shim_.aoti_torch_get_dtype(tensor, &dtypes_[place]) == 0 &&
                      shim_.aoti_torch_get_device_type(tensor, &device) == 0 &&
                      shim_.aoti_torch_get_device_index(tensor, &view.device_index) == 0 &&
                      shim_.aoti_torch_get_data_ptr(tensor, &view.data) == 0;
    if (!read) return false;
    view.ndim = static_cast<int32_t>(dim);
    view.shape = sizes;
    view.strides = strides;
    view.dtype = DTypeOfTorchCode(dtypes_[place]);
    view.device_type = device == shim_.aoti_torch_device_type_cuda()  ? DeviceType::kCUDA
                       : device == shim_.aoti_torch_device_type_cpu() ? DeviceType::kCPU
                                                                      : DeviceType::kOther;
    if (op_.emulated && view.device_type == DeviceType::kCPU) {
      view.device_type = DeviceType::kCUDA;
      view.device_index = 0;
    }
    values_[place].kind = NativeValue::kTensor;
    values_[place].tensor = &view;
    ++count_;
    return view.data != nullptr;  // a fake tensor has none; an empty one is left to Python with it
  }

  const TorchShim& shim_;
  const NativeOp& op_;
  StackValue* stack_;
  std::array<NativeValue, kMaxArguments> values_;
  std::array<int32_t, kMaxArguments> dtypes_;
  std::array<TensorView, kMaxTensors> views_;
  size_t count_ = 0;
};

// Calls one of torch's operators, whose first `count` arguments are the tensor; the result is on
// the stack.
bool CallTorch(const TorchShim& shim, const char* name, TensorHandle tensor, int count,
               StackValue* stack) {
  for (int i = 0; i < count; ++i) {
    TensorHandle copy = nullptr;  // the dispatcher takes it
    if (shim.aoti_torch_new_tensor_handle(tensor, &copy) != 0) return false;
    stack[i] = reinterpret_cast<StackValue>(copy);
  }
  return shim.torch_call_dispatcher(name, "", stack, kShimVersion) == 0;
}

// Views like z.conj().imag hold the negative of what is in memory. Before autograd the dispatcher
// has not resolved them; see MayBeNegated in eager.cc.
bool MayBeNegated(const TorchShim& shim, const TensorView& view, TensorHandle tensor) {
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kFloat16 &&
      view.dtype != DType::kFloat64 && view.dtype != DType::kUnknown) {
    return false;
  }
  StackValue stack[1];
  return !CallTorch(shim, "aten::is_neg", tensor, 1, stack) || (stack[0] & 0xFF) != 0;
}

// A new version: a copy of a tensor to itself does nothing else, and no function of the interface
// counts alone.
bool CountAsWritten(const TorchShim& shim, TensorHandle tensor) {
  StackValue stack[3] = {0, 0, 0};  // the last one: non_blocking
  if (!CallTorch(shim, "aten::copy_", tensor, 2, stack)) return false;
  shim.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(stack[0]));
  return true;
}

// Whether autograd and whoever watches let a call pass.
bool MayPass(const TorchShim& shim, const NativeOp& op) {
  if (IsWatchedCall()) return false;
  return !op.autograd || (!shim.aoti_torch_grad_mode_is_enabled() &&
                          !shim.any_modes_set(/*skip_infra_modes=*/false));
}

bool TakesSm90(const NativeOp& op, const Arguments& arguments) {
  const NativeValue& backend = arguments.value(op.call->count - 1);
  if (backend.kind == NativeValue::kNone) {
    if (IsOverriding()) return false;
  } else if (std::strcmp(backend.text, "sm90") != 0) {
    return false;
  }
  const TensorView* first = arguments.view(op.call->tensors[0]);
  if (first == nullptr || first->device_type != DeviceType::kCUDA) return false;
  const int32_t device = first->device_index;
  return device >= 0 && device < kMostDevices && (ready_devices.load() >> device & 1) != 0;
}

// The outputs of one call; they are freed unless they are given to the stack.
class Outputs {
 public:
  explicit Outputs(const TorchShim& shim) : shim_(shim) {}
  ~Outputs() {
    for (size_t i = 0; i < count_; ++i) shim_.aoti_torch_delete_tensor_object(handles_[i]);
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  bool Make(const Output& rule, const OutputDTypes& dtypes, const Arguments& arguments,
            bool emulated) {
    const TensorView* like = arguments.view(rule.like);
    if (like == nullptr) return false;
    const Py_ssize_t batch = rule.batched ? like->ndim - rule.dropped : 0;
    if (batch < 0 || batch + rule.count > kMaxDims) return false;
    TensorView& view = views_[count_];
    int64_t* sizes = sizes_[count_].data();
    int64_t* strides = sizes + kMaxDims;
    view = *like;
    view.ndim = static_cast<int32_t>(batch + rule.count);
    view.shape = sizes;
    view.strides = strides;
    for (Py_ssize_t i = 0; i < batch; ++i) sizes[i] = like->shape[i];
    for (Py_ssize_t i = 0; i < rule.count; ++i) {
      if (!SizeOf(rule.sizes[i], arguments, &sizes[batch + i])) return false;
    }
    int64_t step = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
      strides[i] = step;
      step *= sizes[i] > 0 ? sizes[i] : 1;  // as torch's are
    }
    int32_t dtype = rule.dtype == nullptr ? arguments.dtype(rule.dtype_place) : dtypes.dtype;
    if (rule.other_dtype != nullptr && arguments.IsGiven(rule.other_place)) dtype = dtypes.other;
    if (rule.unwanted != nullptr && dtype == dtypes.unwanted) dtype = dtypes.instead;
    view.dtype = DTypeOfTorchCode(dtype);
    const int32_t device =
        emulated ? shim_.aoti_torch_device_type_cpu() : shim_.aoti_torch_device_type_cuda();
    if (shim_.aoti_torch_empty_strided(view.ndim, sizes, strides, dtype, device, view.device_index,
                                       &handles_[count_]) != 0) {
      return false;
    }
    return shim_.aoti_torch_get_data_ptr(handles_[count_++], &view.data) == 0;
  }

  const TensorView* view(Py_ssize_t i) const { return &views_[i]; }

  void GiveTo(StackValue* stack) {
    for (size_t i = 0; i < count_; ++i) stack[i] = reinterpret_cast<StackValue>(handles_[i]);
    count_ = 0;
  }

 private:
  const TorchShim& shim_;
  size_t count_ = 0;
  std::array<TensorHandle, kMaxOutputs> handles_;
  std::array<TensorView, kMaxOutputs> views_;
  std::array<std::array<int64_t, 2 * kMaxDims>, kMaxOutputs> sizes_;
};

// False where the table has nothing for the argument.
bool LookUp(const NativeSlot& slot, const NativeValue& key, NativeValue* value) {
  for (const auto& [known, found] : slot.table) {
    if (!(known.value == key)) continue;
    *value = found;
    return true;
  }
  return false;
}

// Runs the call and puts its results on the stack; false where it is left to Python, and then the
// stack is as it was.
bool Launch(const TorchShim& shim, const NativeOp& op, StackValue* stack) {
  if (!MayPass(shim, op)) return false;
  Arguments arguments(shim, op, stack);
  if (!arguments.Read() || !TakesSm90(op, arguments)) return false;
  const EagerCall& call = *op.call;
  if (call.native != op.native || !HasPlainLayout(call, arguments)) return false;
  if (op.autograd) {
    for (Py_ssize_t i = 0; i < call.tensor_count; ++i) {
      const TensorView* view = arguments.view(call.tensors[i]);
      if (view != nullptr && MayBeNegated(shim, *view, arguments.handle(call.tensors[i]))) {
        return false;
      }
    }
  }
  Outputs outputs(shim);
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    if (!outputs.Make(call.outputs[i], op.outputs[i], arguments, op.emulated)) return false;
  }
  std::array<NativeValue, kMaxSlots> values;
  for (size_t i = 0; i < op.slots.size(); ++i) {
    const NativeSlot& slot = op.slots[i];
    if (slot.kind == Slot::kArgument) {
      values[i] = arguments.value(slot.index);
    } else if (slot.kind == Slot::kConstant) {
      values[i] = slot.constant;
    } else if (slot.kind == Slot::kOutput) {
      values[i].kind = NativeValue::kTensor;
      values[i].tensor = outputs.view(slot.index);
    } else if (!LookUp(slot, arguments.value(slot.index), &values[i])) {
      return false;
    }
  }
  void* stream = nullptr;
  const NativeValue& of_stream = values[op.launch->stream];
  if (of_stream.kind != NativeValue::kTensor) return false;
  if (!op.emulated &&
      shim.aoti_torch_get_current_cuda_stream(of_stream.tensor->device_index, &stream) != 0) {
    return false;
  }
  for (const Py_ssize_t place : op.mutated) {
    if (arguments.IsGiven(place) && !CountAsWritten(shim, arguments.handle(place))) return false;
  }
  try {
    if (!op.launch->run(values.data(), op.slots.size(), stream).ok()) return false;
  } catch (const std::exception&) {
    return false;
  }
  FreeArguments(shim, op, stack);
  outputs.GiveTo(stack);
  return true;
}

// The text of this thread's next exception; it outlives the frame that torch's exception leaves.
std::string& ErrorText() {
  thread_local std::string text;
  return text;
}

}  // namespace

void SetNativeDevice(int device, bool ready) {
  if (device < 0) {
    ready_devices.store(0);
  } else if (device < kMostDevices) {
    const uint64_t bit = uint64_t{1} << device;
    ready ? ready_devices.fetch_or(bit) : ready_devices.fetch_and(~bit);
  }
}

void RunNativeOp(const NativeOp& op, StackValue* stack, uint64_t results) {
  const TorchShim& shim = *FindTorchShim();
  bool done = false;
  if (Py_IsInitialized()) {
    const NoGil no_gil;
    done = Launch(shim, op, stack);
  } else if (!(done = Launch(shim, op, stack))) {
    ErrorText() = op.name + ": this call needs Python, which has ended";
  }
  if (done) return;
  if (Py_IsInitialized()) {
    const PyGILState_STATE state = PyGILState_Ensure();
    done = CallPython(shim, op, stack, results);
    if (!done) ErrorText() = TakeError();
    PyGILState_Release(state);
  }
  // It throws torch's own exception, from torch's own library.
  if (!done) shim.aoti_torch_check(false, "tiercel", "tiercel", 0, ErrorText().c_str());
}

}  // namespace tiercel::python
