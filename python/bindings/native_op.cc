// SPDX-License-Identifier: Apache-2.0
// Operators as functions of torch's dispatcher that need no Python: what an EagerCall does, for
// calls from C++. A call that is not plain goes on to the EagerCall itself, with the GIL.
//
// torch's interface has no place for data beside a function, so each operator has a function of
// its own, which is one number in a template.
#include "python/bindings/native_op.h"

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings/call.h"
#include "python/bindings/eager_rules.h"
#include "python/bindings/functions.h"
#include "python/bindings/native_launch.h"
#include "python/bindings/reference.h"
#include "python/bindings/torch_shim.h"

namespace tiercel::python {
namespace {

constexpr size_t kMostOps = 384;
constexpr int kMaxDims = 16;
constexpr int kMostDevices = 64;

// An argument as the dispatcher passes it.
struct Argument {
  enum Kind : uint8_t { kTensor, kInt, kFloat, kBool, kDType, kText } kind;
  bool optional;
  size_t index;  // on the stack
};

// A value that outlives calls.
struct Constant {
  NativeValue value;
  std::string text;
};

struct NativeSlot {
  Slot::Kind kind;
  Py_ssize_t index;
  NativeValue constant;
  std::vector<std::pair<Constant, NativeValue>> table;
};

// torch's codes for the dtypes of an Output.
struct OutputDTypes {
  int32_t dtype, other, unwanted, instead;
};

struct NativeOp {
  std::string name;
  EagerCall* call;
  PyObject* native;  // what `call` launched when the operator was registered
  const NativeLaunch* launch;
  bool autograd;  // comes before autograd
  bool emulated;  // takes tensors on the CPU for a GPU's
  std::vector<Argument> arguments;
  std::vector<NativeSlot> slots;
  std::vector<OutputDTypes> outputs;
  std::vector<Py_ssize_t> mutated;
};

// What of torch's PythonRoad calls. Never freed: Python may be gone at exit.
struct Hooks {
  PyObject* tensors_of_handles;  // (list) -> list; takes the handles
  PyObject* handle_of_tensor;    // gives a new one
  std::map<int32_t, PyObject*> dtypes;
};
Hooks* hooks = nullptr;

std::atomic<uint64_t> ready_devices{0};

std::atomic<int64_t> calls_through_python{0};

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

// Where an argument's own value lies: an optional one is in a box.
StackValue* ValueOf(const Argument& argument, StackValue* stack) {
  StackValue* at = stack + argument.index;
  return argument.optional ? reinterpret_cast<StackValue*>(*at) : at;
}

void FreeBox(const TorchShim& shim, const Argument& argument, StackValue* stack) {
  if (!argument.optional || stack[argument.index] == 0) return;
  auto* box = reinterpret_cast<StackValue*>(stack[argument.index]);
  if (shim.torch_delete_stable_ivalue != nullptr) {
    shim.torch_delete_stable_ivalue(box);
  } else {
    delete box;
  }
}

// Frees what a call owns on the stack.
void FreeArguments(const TorchShim& shim, const NativeOp& op, StackValue* stack) {
  for (const Argument& argument : op.arguments) {
    const StackValue* value = ValueOf(argument, stack);
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
      const StackValue* from = ValueOf(argument, stack_);
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
    return reinterpret_cast<TensorHandle>(*ValueOf(op_.arguments[place], stack_));
  }
  // torch's code for a tensor's dtype, or the dtype that an argument is.
  int32_t dtype(Py_ssize_t place) const {
    return op_.arguments[place].kind == Argument::kTensor ? dtypes_[place]
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
    // A subclass may have no memory.
    if (view.data != nullptr) return true;
    for (int i = 0; i < view.ndim; ++i) {
      if (sizes[i] == 0) return true;
    }
    return false;
  }

  const TorchShim& shim_;
  const NativeOp& op_;
  StackValue* stack_;
  std::array<NativeValue, kMaxArguments> values_;
  std::array<int32_t, kMaxArguments> dtypes_;
  std::array<TensorView, kMaxTensors> views_;
  size_t count_ = 0;
};

// Calls one of torch's operators whose first argument is the tensor; the result is on the stack.
bool CallTorch(const TorchShim& shim, const char* name, TensorHandle tensor, StackValue* stack) {
  TensorHandle copy = nullptr;  // the dispatcher takes it
  if (shim.aoti_torch_new_tensor_handle(tensor, &copy) != 0) return false;
  stack[0] = reinterpret_cast<StackValue>(copy);
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
  return !CallTorch(shim, "aten::is_neg", tensor, stack) || (stack[0] & 0xFF) != 0;
}

// A new version: transposing a dimension with itself changes nothing else, and no function of the
// interface counts alone.
bool CountAsWritten(const TorchShim& shim, TensorHandle tensor) {
  StackValue stack[3] = {0, 0, 0};
  if (!CallTorch(shim, "aten::transpose_", tensor, stack)) return false;
  shim.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(stack[0]));
  return true;
}

// Whether autograd and whoever watches let a call pass.
bool MayPass(const TorchShim& shim, const NativeOp& op) {
  if (IsWatchedCall()) return false;
  return !op.autograd ||
         (!shim.aoti_torch_grad_mode_is_enabled() && !shim.any_modes_set(/*skip_infra_modes=*/false));
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
  if (!op.emulated && shim.aoti_torch_get_current_cuda_stream(of_stream.tensor->device_index,
                                                              &stream) != 0) {
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

// The text that the next exception of this thread has.
std::string& ErrorText() {
  thread_local std::string text;
  return text;
}

// Takes the pending Python exception; whoever called from Python gets it as it was.
void KeepError() {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  const Reference text(error == nullptr ? nullptr : PyObject_Str(error));
  const char* said = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  PyErr_Clear();
  ErrorText() = said != nullptr ? said : "tiercel: an exception without a text";
  PyErr_Restore(type, error, trace);
  if (IsWatchedCall()) {
    CarryError();
  } else {
    PyErr_Clear();
  }
}

// A new reference, or null with a Python exception. A tensor goes over into it.
PyObject* ObjectOf(const TorchShim& shim, const Argument& argument, StackValue* stack) {
  const StackValue* from = ValueOf(argument, stack);
  if (from == nullptr) Py_RETURN_NONE;
  switch (argument.kind) {
    case Argument::kTensor: {
      PyObject* handle = PyCapsule_New(reinterpret_cast<void*>(*from), nullptr, nullptr);
      const Reference handles(handle == nullptr ? nullptr : Py_BuildValue("[N]", handle));
      const Reference tensors(
          handles ? PyObject_CallOneArg(hooks->tensors_of_handles, handles.get()) : nullptr);
      return tensors ? PySequence_GetItem(tensors.get(), 0) : nullptr;
    }
    case Argument::kInt:
      return PyLong_FromLongLong(static_cast<int64_t>(*from));
    case Argument::kBool:
      return PyBool_FromLong((*from & 0xFF) != 0);
    case Argument::kFloat: {
      double value;
      std::memcpy(&value, from, sizeof(value));
      return PyFloat_FromDouble(value);
    }
    case Argument::kText: {
      const char* text = nullptr;
      const auto handle = reinterpret_cast<StringHandle>(*from);
      PyObject* object = shim.torch_string_c_str(handle, &text) == 0
                             ? PyUnicode_FromString(text)
                             : PyErr_Format(PyExc_RuntimeError, "torch could not read a string");
      shim.torch_delete_string(handle);
      return object;
    }
    case Argument::kDType: {
      const auto found = hooks->dtypes.find(static_cast<int32_t>(*from));
      if (found != hooks->dtypes.end()) return Py_NewRef(found->second);
      return PyErr_Format(PyExc_TypeError, "a dtype is unknown, torch's code is %d",
                          static_cast<int>(*from));
    }
  }
  return nullptr;
}

// False with a Python exception.
bool PutResult(PyObject* tensor, StackValue* to) {
  const Reference handle(PyObject_CallOneArg(hooks->handle_of_tensor, tensor));
  void* pointer = handle ? PyCapsule_GetPointer(handle.get(), nullptr) : nullptr;
  *to = reinterpret_cast<StackValue>(pointer);
  return pointer != nullptr;
}

// False with a Python exception; the arguments are gone then, too.
bool CallPython(const TorchShim& shim, const NativeOp& op, StackValue* stack, uint64_t results) {
  calls_through_python.fetch_add(1, std::memory_order_relaxed);
  std::array<PyObject*, kMaxArguments> objects{};
  bool good = true;
  for (size_t place = 0; place < op.arguments.size(); ++place) {
    objects[place] = ObjectOf(shim, op.arguments[place], stack);
    FreeBox(shim, op.arguments[place], stack);
    if (objects[place] == nullptr) good = false;
    if (!good && objects[place] == nullptr) objects[place] = Py_NewRef(Py_None);
  }
  Reference made;
  if (good) {
    made.Take(PyObject_Vectorcall(reinterpret_cast<PyObject*>(op.call), objects.data(),
                                  op.arguments.size(), nullptr));
  }
  for (size_t place = 0; place < op.arguments.size(); ++place) Py_DECREF(objects[place]);
  if (!made) return false;
  if (results == 0) return true;
  if (results == 1 && !PyTuple_Check(made.get())) return PutResult(made.get(), stack);
  if (!PyTuple_Check(made.get()) ||
      PyTuple_GET_SIZE(made.get()) != static_cast<Py_ssize_t>(results)) {
    PyErr_Format(PyExc_RuntimeError, "%s: expected %d results", op.name.c_str(),
                 static_cast<int>(results));
    return false;
  }
  for (uint64_t i = 0; i < results; ++i) {
    if (!PutResult(PyTuple_GET_ITEM(made.get(), static_cast<Py_ssize_t>(i)), stack + i)) {
      return false;
    }
  }
  return true;
}

void Run(const NativeOp& op, StackValue* stack, uint64_t results) {
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
    if (!done) KeepError();
    PyGILState_Release(state);
  }
  // It throws torch's own exception, from torch's own library.
  if (!done) shim.aoti_torch_check(false, "tiercel", "tiercel", 0, ErrorText().c_str());
}

std::array<NativeOp*, kMostOps> registered{};
size_t registered_count = 0;

template <size_t kIndex>
void Boxed(StackValue* stack, uint64_t, uint64_t results) {
  Run(*registered[kIndex], stack, results);
}

template <size_t... kIndices>
constexpr std::array<BoxedFunction, sizeof...(kIndices)> AllBoxed(
    std::index_sequence<kIndices...>) {
  return {Boxed<kIndices>...};
}
constexpr auto kBoxed = AllBoxed(std::make_index_sequence<kMostOps>());

// -- registration --------------------------------------------------------------------------------

// False where it has no counterpart in C++.
bool ReadConstant(PyObject* object, Constant* constant) {
  NativeValue& value = constant->value;
  if (object == Py_None) {
    value.kind = NativeValue::kNone;
  } else if (PyBool_Check(object) || PyLong_CheckExact(object)) {
    value.kind = PyBool_Check(object) ? NativeValue::kBool : NativeValue::kInt;
    value.number = PyLong_AsLongLong(object);
  } else if (PyFloat_CheckExact(object)) {
    value.kind = NativeValue::kFloat;
    value.real = PyFloat_AS_DOUBLE(object);
  } else if (const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : nullptr) {
    value.kind = NativeValue::kText;
    constant->text = text;
  } else {
    return false;
  }
  return !PyErr_Occurred();
}

// -1 for null or where torch has none.
int32_t CodeOfObject(PyObject* dtype) {
  const Reference text(dtype == nullptr ? nullptr : PyObject_Str(dtype));
  const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  constexpr char kPrefix[] = "torch.";
  if (name == nullptr || std::strncmp(name, kPrefix, sizeof(kPrefix) - 1) != 0) return -1;
  return TorchCodeOf(name + sizeof(kPrefix) - 1);
}

// Why a value of this kind does not go to that field; null if it does.
const char* WhyNot(const Argument& argument, FieldKind field) {
  switch (argument.kind) {
    case Argument::kTensor:
      return field == FieldKind::kTensor ? nullptr : "a tensor is read in Python";
    case Argument::kInt:
      return field == FieldKind::kOther || field == FieldKind::kTensor ? "an int is read in Python"
                                                                       : nullptr;
    case Argument::kFloat:
      return field == FieldKind::kFloat32 || field == FieldKind::kFloat64
                 ? nullptr
                 : "a float is read in Python";
    case Argument::kBool:
      return field == FieldKind::kBool ? nullptr : "a bool is read in Python";
    case Argument::kDType:
    case Argument::kText:
      break;
  }
  return "a text or dtype is read in Python";
}

// Why it cannot be called without Python; null if it can. The slots follow from the EagerCall's.
const char* ReadSlots(NativeOp* op) {
  const EagerCall& call = *op->call;
  if (call.native == Py_None) return "Python launches";
  op->native = call.native;
  op->launch = NativeLaunchFor(call.native);
  if (call.returns) return "the launch allocates the results";
  if (op->launch == nullptr) return "the launch needs more than its arguments";
  const auto count = static_cast<size_t>(call.slot_count);
  if (count < op->launch->required || count > op->launch->count) return "arguments are missing";
  for (size_t i = 0; i < count; ++i) {
    const Slot& slot = call.slots[i];
    const FieldKind field = op->launch->kind(i);
    NativeSlot to{slot.kind, slot.index, {}, {}};
    if (slot.kind == Slot::kArgument) {
      if (const char* why = WhyNot(op->arguments[slot.index], field)) return why;
    } else if (slot.kind == Slot::kConstant) {
      Constant constant;
      if (!ReadConstant(slot.value, &constant)) return "a constant is read in Python";
      if (constant.value.kind == NativeValue::kText) return "a constant is read in Python";
      if (field == FieldKind::kOther) return "a constant is read in Python";
      to.constant = constant.value;
    } else if (slot.kind == Slot::kLookup) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(slot.value, &at, &key, &value);) {
        Constant from, constant;
        if (!ReadConstant(key, &from) || !ReadConstant(value, &constant) ||
            constant.value.kind == NativeValue::kText) {
          return "a table is read in Python";
        }
        to.table.emplace_back(std::move(from), constant.value);
      }
      for (auto& entry : to.table) {  // the strings have their places now
        if (entry.first.value.kind == NativeValue::kText) {
          entry.first.value.text = entry.first.text.c_str();
        }
      }
    }
    op->slots.push_back(std::move(to));
  }
  for (Py_ssize_t i = 0; i < call.output_count; ++i) {
    const Output& output = call.outputs[i];
    const OutputDTypes codes{CodeOfObject(output.dtype), CodeOfObject(output.other_dtype),
                             CodeOfObject(output.unwanted), CodeOfObject(output.instead)};
    if (output.dtype == nullptr) {
      const Argument& dtype = op->arguments[output.dtype_place];
      if (dtype.kind != Argument::kTensor && dtype.kind != Argument::kDType) {
        return "a result's dtype is no argument's";
      }
      if (dtype.optional) return "a result's dtype may be absent";
    }
    op->outputs.push_back(codes);
  }
  return nullptr;
}

// (kind, whether it may be None, its place on the stack) of each argument, `backend` last. False
// with a Python exception.
bool ReadArguments(PyObject* items, NativeOp* op) {
  static constexpr const char* kKinds[] = {"Tensor", "int", "float", "bool", "ScalarType", "str"};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    const char* name = nullptr;
    int optional = 0;
    Py_ssize_t index = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, i), "spn", &name, &optional, &index)) {
      return false;
    }
    size_t kind = 0;
    while (kind < std::size(kKinds) && std::strcmp(kKinds[kind], name) != 0) ++kind;
    if (kind == std::size(kKinds) || index < 0 || index >= PyTuple_GET_SIZE(items)) {
      PyErr_Format(PyExc_ValueError, "register_native: no argument is a %s at place %zd", name,
                   index);
      return false;
    }
    op->arguments.push_back(
        {static_cast<Argument::Kind>(kind), optional != 0, static_cast<size_t>(index)});
  }
  if (PyTuple_GET_SIZE(items) != op->call->count || op->arguments.back().kind != Argument::kText) {
    PyErr_SetString(PyExc_ValueError, "register_native: the arguments are not the EagerCall's");
    return false;
  }
  return true;
}

// Null where torch refuses.
LibraryHandle LibraryFor(const TorchShim& shim, const std::string& ns, const char* key) {
  static auto* const libraries = new std::map<std::pair<std::string, std::string>, LibraryHandle>;
  LibraryHandle& library = (*libraries)[{ns, key}];
  if (library == nullptr) {
    shim.aoti_torch_library_init_impl(ns.c_str(), key, "tiercel", 0, &library);
  }
  return library;
}

// False with a Python exception.
bool Register(const TorchShim& shim, const std::string& ns, const char* key,
              std::unique_ptr<NativeOp> op) {
  if (registered_count == kMostOps) {
    PyErr_SetString(PyExc_RuntimeError, "register_native: too many operators");
    return false;
  }
  const LibraryHandle library = LibraryFor(shim, ns, key);
  const BoxedFunction function = kBoxed[registered_count];
  const std::string name = op->name;
  registered[registered_count++] = op.release();  // torch keeps the function
  if (library != nullptr &&
      shim.torch_library_impl(library, name.c_str(), function, kShimVersion) == 0) {
    return true;
  }
  PyErr_Format(PyExc_RuntimeError, "register_native: torch refuses %s for %s", name.c_str(), key);
  return false;
}

PyObject* RegisterNative(PyObject*, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"ns", "name", "below", "autograd", "arguments", "emulated", nullptr};
  const char *ns = nullptr, *name = nullptr;
  PyObject *below = nullptr, *autograd = nullptr, *arguments = nullptr;
  int emulated = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ssOOO!|$p:register_native",
                                   const_cast<char**>(names), &ns, &name, &below, &autograd,
                                   &PyTuple_Type, &arguments, &emulated)) {
    return nullptr;
  }
  const TorchShim* shim = FindTorchShim();
  PyObject* const calls[] = {below, autograd};
  for (const bool of_autograd : {false, true}) {
    if (!IsEagerCall(calls[of_autograd])) return nullptr;
    auto op = std::make_unique<NativeOp>();
    op->name = name;
    op->call = reinterpret_cast<EagerCall*>(Py_NewRef(calls[of_autograd]));
    op->autograd = of_autograd;
    op->emulated = emulated != 0;
    if (!ReadArguments(arguments, op.get())) return nullptr;
    if (const char* why = ReadSlots(op.get())) {
      return PyErr_Occurred() ? nullptr : PyUnicode_FromString(why);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(op->call->mutated); ++i) {
      op->mutated.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(op->call->mutated, i)));
    }
    if (shim == nullptr || hooks == nullptr) continue;
    if (of_autograd && shim->any_modes_set == nullptr) continue;
    if (!emulated && shim->aoti_torch_get_current_cuda_stream == nullptr) continue;
    const std::string backend = emulated ? "CPU" : "CUDA";
    const std::string key = of_autograd ? "Autograd" + backend : backend;
    if (!Register(*shim, ns, key.c_str(), std::move(op))) return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* SetNativeHooks(PyObject*, PyObject* args) {
  PyObject *tensors_of_handles, *handle_of_tensor, *dtypes;
  if (!PyArg_ParseTuple(args, "OOO!:set_native_hooks", &tensors_of_handles, &handle_of_tensor,
                        &PyTuple_Type, &dtypes)) {
    return nullptr;
  }
  auto made = std::make_unique<Hooks>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes); ++i) {
    PyObject* dtype = PyTuple_GET_ITEM(dtypes, i);
    const int32_t code = CodeOfObject(dtype);
    if (PyErr_Occurred()) return nullptr;
    if (code >= 0) made->dtypes.emplace(code, Py_NewRef(dtype));
  }
  made->tensors_of_handles = Py_NewRef(tensors_of_handles);
  made->handle_of_tensor = Py_NewRef(handle_of_tensor);
  hooks = made.release();
  Py_RETURN_NONE;
}

PyObject* SetNativeDevice(PyObject*, PyObject* args) {
  int device = 0, ready = 0;
  if (!PyArg_ParseTuple(args, "ip:set_native_device", &device, &ready)) return nullptr;
  if (device < 0) {
    ready_devices.store(0);
  } else if (device < kMostDevices) {
    const uint64_t bit = uint64_t{1} << device;
    ready ? ready_devices.fetch_or(bit) : ready_devices.fetch_and(~bit);
  }
  Py_RETURN_NONE;
}

PyObject* HasNativeOps(PyObject*, PyObject*) {
  const TorchShim* shim = FindTorchShim();
  return PyBool_FromLong(shim != nullptr && hooks != nullptr);
}

PyObject* CallsThroughPython(PyObject*, PyObject*) {
  return PyLong_FromLongLong(calls_through_python.load());
}

PyMethodDef functions[] = {
    {"calls_through_python", CallsThroughPython, METH_NOARGS,
     "calls_through_python()\n--\n\nHow many calls of native operators went on to Python."},
    {"register_native",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(RegisterNative)),
     METH_VARARGS | METH_KEYWORDS,
     "register_native(ns, name, below, autograd, arguments, *, emulated=False)\n--\n\n"
     "Registers an operator's EagerCalls, below autograd and before it, as functions that C++ calls "
     "without Python. Returns None, or why only Python can call it."},
    {"set_native_hooks", SetNativeHooks, METH_VARARGS,
     "set_native_hooks(tensors_of_handles, handle_of_tensor, dtypes, /)\n--\n\n"
     "How calls from C++ go on to Python, and all dtypes of torch's."},
    {"set_native_device", SetNativeDevice, METH_VARARGS,
     "set_native_device(device, ready, /)\n--\n\n"
     "Whether calls from C++ may use a CUDA device; -1 stands for all that were named."},
    {"has_native_ops", HasNativeOps, METH_NOARGS,
     "has_native_ops()\n--\n\nWhether this torch has the interface: 2.10 and newer."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* NativeOpFunctions() { return functions; }

}  // namespace tiercel::python
