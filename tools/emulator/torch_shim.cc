// SPDX-License-Identifier: Apache-2.0
// The part of PyTorch's C interface that differs where torch's CPU tensors stand for CUDA tensors:
// what TIERCEL_LIBTORCH names. Ops are registered for the CPU, tensors say that they are on GPU 0,
// results are allocated on the CPU, and the emulator's kernels may touch a tensor from when its
// address is read until its handle is deleted.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// torch's own function of that type.
template <typename Function>
Function of_torch(const char* name) {
  static void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(library, name));
}

template <typename Function>
Function of_emulator(const char* name) {
  static void* const library = dlopen(std::getenv("TIERCEL_LIBCUDA"), RTLD_LAZY);
  return reinterpret_cast<Function>(dlsym(library, name));
}

using GetPointer = int (*)(void*, void**);
using GetSize = int (*)(void*, int64_t*);

}  // namespace

EXPORT int aoti_torch_library_init_impl(const char* name, const char*, const char* file,
                                        uint32_t line, void** library) {
  using Init = int (*)(const char*, const char*, const char*, uint32_t, void**);
  return of_torch<Init>("aoti_torch_library_init_impl")(name, "CPU", file, line, library);
}

EXPORT int aoti_torch_get_device_type(void*, int32_t* type) {
  static const int32_t cuda = of_torch<int32_t (*)()>("aoti_torch_device_type_cuda")();
  *type = cuda;
  return 0;
}

EXPORT int aoti_torch_get_device_index(void*, int32_t* index) {
  *index = 0;
  return 0;
}

EXPORT int aoti_torch_get_data_ptr(void* tensor, void** data) {
  using Register = void (*)(const void*, uint64_t, const char*);
  static const auto get = of_torch<GetPointer>("aoti_torch_get_data_ptr");
  static const auto get_bytes = of_torch<GetSize>("aoti_torch_get_storage_size");
  static const auto register_memory = of_emulator<Register>("emulator_register");
  int64_t bytes = 0;
  if (get(tensor, data) != 0 || get_bytes(tensor, &bytes) != 0) return 1;
  if (bytes > 0) register_memory(*data, static_cast<uint64_t>(bytes), "tensor");
  return 0;
}

EXPORT int aoti_torch_delete_tensor_object(void* tensor) {
  static const auto get = of_torch<GetPointer>("aoti_torch_get_data_ptr");
  static const auto unregister = of_emulator<void (*)(const void*)>("emulator_unregister");
  static const auto free = of_torch<int (*)(void*)>("aoti_torch_delete_tensor_object");
  void* data = nullptr;
  if (get(tensor, &data) == 0) unregister(data);
  return free(tensor);
}

EXPORT int aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                    int32_t dtype, int32_t, int32_t, void** tensor) {
  using Empty = int (*)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
  static const auto empty = of_torch<Empty>("aoti_torch_empty_strided");
  static const int32_t cpu = of_torch<int32_t (*)()>("aoti_torch_device_type_cpu")();
  return empty(dim, sizes, strides, dtype, cpu, 0, tensor);
}

EXPORT int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
