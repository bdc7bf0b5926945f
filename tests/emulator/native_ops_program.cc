// SPDX-License-Identifier: Apache-2.0
// A program without Python that calls Tiercel's ops through torch's dispatcher.
//
// usage: native_ops_program LIBTORCH_CPU EXTENSION [register]
//
// It registers the ops; unless that is all, it prints the results of add_rms_norm and silu_and_mul
// of fixed values, the text of an error, and the host time of a call in nanoseconds, each in a line
// behind its name.
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Word = uint64_t;

void* torch_library = nullptr;

[[noreturn]] void fail(const char* text) {
  std::fprintf(stderr, "%s\n", text);
  std::exit(1);
}

template <typename... Values>
int call(const char* name, Values... values) {
  void* function = dlsym(torch_library, name);
  if (function == nullptr) fail(name);
  return reinterpret_cast<int (*)(Values...)>(function)(values...);
}

template <typename... Values>
void must(const char* name, Values... values) {
  if (call(name, values...) != 0) fail(name);
}

void* tensor_of(std::vector<int64_t> sizes, float first, float step) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = count;
    count *= sizes[i];
  }
  void *tensor = nullptr, *data = nullptr;
  must("aoti_torch_empty_strided", static_cast<int64_t>(sizes.size()),
       static_cast<const int64_t*>(sizes.data()), static_cast<const int64_t*>(strides.data()),
       call("aoti_torch_dtype_float32"), call("aoti_torch_device_type_cpu"), int32_t{0}, &tensor);
  must("aoti_torch_get_data_ptr", tensor, &data);
  for (int64_t i = 0; i < count; ++i) static_cast<float*>(data)[i] = first + step * i;
  return tensor;
}

void print(const char* name, Word result) {
  void *tensor = reinterpret_cast<void*>(result), *data = nullptr;
  int64_t bytes = 0;
  must("aoti_torch_get_data_ptr", tensor, &data);
  must("aoti_torch_get_storage_size", tensor, &bytes);
  std::printf("%s", name);
  for (int64_t i = 0; i < bytes / 4; ++i) std::printf(" %.9g", static_cast<float*>(data)[i]);
  std::printf("\n");
  must("aoti_torch_delete_tensor_object", tensor);
}

Word of(void* tensor) { return reinterpret_cast<Word>(tensor); }

// An optional argument; torch frees it.
Word some(void* tensor) { return reinterpret_cast<Word>(new Word(of(tensor))); }

Word of(double value) {
  Word word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

void add_rms_norm(int64_t rows, Word* stack) {
  void* const x = tensor_of({rows, 8}, -1.5f, 0.25f);
  void* const residual = tensor_of({rows, 8}, 0.5f, 0.125f);
  void* const weight = tensor_of({8}, 1.0f, 0.5f);
  const Word arguments[] = {of(x), of(residual), some(weight), 0, of(1e-6), 0};
  std::memcpy(stack, arguments, sizeof arguments);
  must("aoti_torch_call_dispatcher", "tiercel::add_rms_norm", "", stack);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) fail("usage: native_ops_program LIBTORCH_CPU EXTENSION [register]");
  torch_library = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
  if (torch_library == nullptr) fail(dlerror());
  void* extension = dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL);
  if (extension == nullptr) fail(dlerror());
  const auto register_ops =
      reinterpret_cast<const char* (*)()>(dlsym(extension, "tiercel_register_torch_ops"));
  if (const char* error = register_ops()) fail(error);
  const char* again = register_ops();
  std::printf("again %s\n", again != nullptr ? again : "");
  if (count > 3) return 0;

  Word stack[8];
  add_rms_norm(3, stack);
  print("out", stack[0]);
  print("residual_out", stack[1]);

  stack[0] = of(tensor_of({2, 8}, -2.0f, 0.5f));
  stack[1] = stack[2] = stack[3] = 0;
  must("aoti_torch_call_dispatcher", "tiercel::silu_and_mul", "", stack);
  print("silu_and_mul", stack[0]);

  // A weight of the wrong length.
  stack[0] = of(tensor_of({2, 8}, 1.0f, 1.0f));
  stack[1] = some(tensor_of({7}, 1.0f, 0.0f));
  stack[2] = 0;
  stack[3] = of(1e-6);
  stack[4] = 0;
  std::printf("refused %d\n", call("aoti_torch_call_dispatcher", "tiercel::rms_norm", "", stack));
  const auto what = reinterpret_cast<const char* (*)()>(
      dlsym(torch_library, "torch_exception_get_what_without_backtrace"));
  if (what != nullptr) std::printf("error %s\n", what());

  // Without rows nothing is launched: what is left is the way to the launch.
  constexpr int kCalls = 20000;
  std::chrono::nanoseconds spent{0};
  for (int i = 0; i < kCalls; ++i) {
    void* const x = tensor_of({0, 8}, 0, 0);
    void* const residual = tensor_of({0, 8}, 0, 0);
    void* const weight = tensor_of({8}, 1.0f, 0.5f);
    const Word all[] = {of(x), of(residual), some(weight), 0, of(1e-6), 0};
    std::memcpy(stack, all, sizeof all);
    const auto start = std::chrono::steady_clock::now();
    must("aoti_torch_call_dispatcher", "tiercel::add_rms_norm", "", stack);
    spent += std::chrono::steady_clock::now() - start;
    must("aoti_torch_delete_tensor_object", reinterpret_cast<void*>(stack[0]));
    must("aoti_torch_delete_tensor_object", reinterpret_cast<void*>(stack[1]));
  }
  std::printf("nanoseconds %lld\n", static_cast<long long>(spent.count() / kCalls));
  return 0;
}
