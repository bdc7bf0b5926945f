// SPDX-License-Identifier: Apache-2.0
// A CUDA driver library of one device that is this process. TIERCEL_LIBCUDA names it,
// TIERCEL_EMULATOR_PTX the PTX of the kernels. Memory is the host's: tests register what kernels
// may touch (emulator_register).
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "tools/emulator/program.h"
#include "tools/emulator/tensor/tensor_map.h"

using tiercel::emulator::EmulatorError;
using tiercel::emulator::Kernel;
using tiercel::emulator::Launch;
using tiercel::emulator::Options;
using tiercel::emulator::Program;

namespace {

constexpr uint32_t kSharedLimit = 227 * 1024, kSharedDefault = 48 * 1024;
constexpr uint32_t kClusterLimit = 16, kClusterDefault = 8;  // blocks
constexpr uint32_t kMultiprocessors = 132;

struct KernelHandle {
  std::string name;
  uint32_t max_dynamic_shared = kSharedDefault;
  uint32_t max_cluster = kClusterDefault;
};

std::mutex g_lock;
Options g_options;
uint32_t g_multiprocessors = kMultiprocessors;
bool g_share = false;  // of a GPU: no cooperative launches, clusters of 8 at most
std::string g_error;   // the last one's text
uint64_t g_instructions = 0;
int g_context;  // its address stands for the context
thread_local int g_depth = 0;

Program& program() {
  static auto* const only = new Program;
  return *only;
}

// An H200's memory, unless the environment says otherwise: launchers may ask once a process.
bool is_h100() {
  const char* gpu = std::getenv("TIERCEL_EMULATOR_GPU");
  if (gpu == nullptr || std::strcmp(gpu, "H200") == 0) return false;
  if (std::strcmp(gpu, "H100") == 0) return true;
  std::fprintf(stderr, "emulator: TIERCEL_EMULATOR_GPU must be H100 or H200, got %s\n", gpu);
  std::abort();
}

CUresult report(CUresult result, const std::string& text) {
  g_error = text;
  std::fprintf(stderr, "emulator: %s\n", text.c_str());
  return result;
}

template <typename F>
CUresult guarded(CUresult failure, F&& f) {
  std::lock_guard<std::mutex> lock(g_lock);
  try {
    return f();
  } catch (const std::exception& error) {
    return report(failure, error.what());
  }
}

uint32_t up_to(uint32_t value, uint32_t align) { return (value + align - 1) / align * align; }

// What the driver refuses before anything runs.
std::string wrong_with(const Launch& launch, const KernelHandle& handle) {
  const auto text = [](const tiercel::emulator::Dim& dim) {
    return std::to_string(dim.x) + " x " + std::to_string(dim.y) + " x " + std::to_string(dim.z);
  };
  if (launch.grid.count() == 0 || launch.grid.x > 0x7fffffffu || launch.grid.y > 65535 ||
      launch.grid.z > 65535) {
    return "a grid of " + text(launch.grid) + " blocks";
  }
  if (launch.block.count() == 0 || launch.block.count() > 1024 || launch.block.z > 64) {
    return "blocks of " + text(launch.block) + " threads";
  }
  const uint32_t most = g_share ? kClusterDefault : handle.max_cluster;
  if (launch.cluster.count() > most || launch.grid.x % launch.cluster.x != 0 ||
      launch.grid.y % launch.cluster.y != 0 || launch.grid.z % launch.cluster.z != 0) {
    return "clusters of " + text(launch.cluster) + " in a grid of " + text(launch.grid);
  }
  if (launch.dynamic_shared > handle.max_dynamic_shared || launch.shared_bytes > kSharedLimit) {
    return std::to_string(launch.dynamic_shared) + " bytes of dynamic shared memory besides " +
           std::to_string(launch.kernel->static_shared) + " static ones, with " +
           std::to_string(handle.max_dynamic_shared) + " allowed";
  }
  const auto& limit = launch.kernel->ptx->max_threads;
  if (limit != 0 && launch.block.count() > limit) {
    return "blocks of " + text(launch.block) + " threads, compiled for " + std::to_string(limit);
  }
  return "";
}

CUresult launch(const CUlaunchConfig& config, const KernelHandle& handle, void** arguments) {
  const Kernel& kernel = program().kernel(handle.name);
  Launch made;
  made.kernel = &kernel;
  made.grid = {config.gridDimX, config.gridDimY, config.gridDimZ};
  made.block = {config.blockDimX, config.blockDimY, config.blockDimZ};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      made.cooperative = config.attrs[i].value.cooperative != 0;
    }
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      made.dependent = config.attrs[i].value.programmaticStreamSerializationAllowed != 0;
    }
    if (config.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    const auto& dim = config.attrs[i].value.clusterDim;
    made.cluster = {dim.x, dim.y, dim.z};
  }
  if (made.cooperative && (g_share || made.grid.count() > g_multiprocessors)) {
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;  // a block a multiprocessor is what kernels ask
  }
  made.dynamic_shared = config.sharedMemBytes;
  made.shared_bytes = up_to(kernel.static_shared + config.sharedMemBytes, 16);
  made.options = g_options;
  made.allocations = &program().allocations();
  const std::string wrong = wrong_with(made, handle);
  if (!wrong.empty()) {
    return report(CUDA_ERROR_INVALID_VALUE, "kernel " + kernel.name + " launched with " + wrong);
  }
  made.parameters.resize(kernel.parameter_bytes);
  for (size_t i = 0; i < kernel.ptx->parameters.size(); ++i) {
    const auto& parameter = kernel.ptx->parameters[i];
    std::memcpy(made.parameters.data() + parameter.offset, arguments[i], parameter.size);
  }
  tiercel::emulator::run_launch(made);
  g_instructions += made.instructions;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT CUresult cuInit(unsigned) {
  return guarded(CUDA_ERROR_INVALID_SOURCE, [] {
    static bool loaded = false;
    if (loaded) return CUDA_SUCCESS;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
      throw EmulatorError("the emulator needs a processor with AVX2 and FMA");
    }
    const char* paths = std::getenv("TIERCEL_EMULATOR_PTX");
    program().load(paths == nullptr ? "" : paths);
    loaded = true;
    return CUDA_SUCCESS;
  });
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
          : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
          : error == CUDA_ERROR_NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
                                              : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> lock(g_lock);
  copy = g_error;
  *text = copy.c_str();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return index == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = static_cast<int>(g_multiprocessors);
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      *value = is_h100() ? 2'619'000 : 3'201'000;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      *value = is_h100() ? 5120 : 6144;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = kSharedLimit;
      return CUDA_SUCCESS;
    default:
      return report(CUDA_ERROR_INVALID_VALUE, "device attribute " + std::to_string(attribute) +
                                                  " is unknown to the emulator");
  }
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(&g_context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = g_depth > 0 ? reinterpret_cast<CUcontext>(&g_context) : nullptr;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext) {
  ++g_depth;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  --g_depth;
  *context = reinterpret_cast<CUcontext>(&g_context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

EXPORT CUresult cuStreamGetId(CUstream, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                                  unsigned, CUlibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
  return CUDA_SUCCESS;
}

// Kernels are found by name, whatever image they lie in: the image has machine code, not PTX.
EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  std::lock_guard<std::mutex> lock(g_lock);
  if (!program().has(name)) {
    return report(CUDA_ERROR_NOT_FOUND,
                  std::string("no PTX file of TIERCEL_EMULATOR_PTX has ") + name);
  }
  *kernel = reinterpret_cast<CUkernel>(new KernelHandle{name});
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                     CUdevice) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    reinterpret_cast<KernelHandle*>(kernel)->max_dynamic_shared = static_cast<uint32_t>(value);
  } else if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
    reinterpret_cast<KernelHandle*>(kernel)->max_cluster =
        value != 0 ? kClusterLimit : kClusterDefault;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  return guarded(CUDA_ERROR_INVALID_VALUE, [&] {
    const Kernel& found = program().kernel(reinterpret_cast<KernelHandle*>(kernel)->name);
    if (index >= found.ptx->parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = found.ptx->parameters[index].offset - tiercel::emulator::kParamStart;
    *size = found.ptx->parameters[index].size;
    return CUDA_SUCCESS;
  });
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* base, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion l2_promotion,
                                       CUtensorMapFloatOOBfill oob_fill) {
  if (g_depth == 0) return CUDA_ERROR_INVALID_CONTEXT;  // as the driver, in a thread without one
  return guarded(CUDA_ERROR_INVALID_VALUE, [&] {
    const tiercel::emulator::TensorMapArguments arguments{static_cast<uint32_t>(type),
                                                          rank,
                                                          reinterpret_cast<uintptr_t>(base),
                                                          sizes,
                                                          strides,
                                                          box,
                                                          steps,
                                                          static_cast<uint32_t>(interleave),
                                                          static_cast<uint32_t>(swizzle),
                                                          static_cast<uint32_t>(l2_promotion),
                                                          static_cast<uint32_t>(oob_fill)};
    const std::string wrong = tiercel::emulator::encode_tensor_map(arguments, map);
    return wrong.empty() ? CUDA_SUCCESS : report(CUDA_ERROR_INVALID_VALUE, wrong);
  });
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                 void** arguments, void**) {
  return guarded(CUDA_ERROR_LAUNCH_FAILED, [&] {
    return launch(*config, *reinterpret_cast<KernelHandle*>(function), arguments);
  });
}

// The tests' own part.
EXPORT void emulator_register(const void* memory, uint64_t size, const char* name) {
  std::lock_guard<std::mutex> lock(g_lock);
  program().allocations().add(reinterpret_cast<uintptr_t>(memory), size, name);
}

EXPORT void emulator_unregister(const void* memory) {
  std::lock_guard<std::mutex> lock(g_lock);
  program().allocations().remove(reinterpret_cast<uintptr_t>(memory));
}

// More PTX, as in TIERCEL_EMULATOR_PTX.
EXPORT CUresult emulator_load(const char* paths) {
  return guarded(CUDA_ERROR_INVALID_SOURCE, [&] {
    program().load(paths);
    return CUDA_SUCCESS;
  });
}

// seed 0: warps in order. max_instructions 0: as it was.
EXPORT void emulator_set_options(int lazy, uint64_t seed, uint64_t max_instructions) {
  std::lock_guard<std::mutex> lock(g_lock);
  g_options.lazy = lazy != 0;
  g_options.seed = seed;
  if (max_instructions != 0) g_options.max_instructions = max_instructions;
}

EXPORT void emulator_set_short_fp8_adder(int on) {
  std::lock_guard<std::mutex> lock(g_lock);
  g_options.short_fp8_adder = on != 0;
}

// 0: all of a GPU's.
EXPORT void emulator_set_multiprocessors(uint32_t count, int share) {
  std::lock_guard<std::mutex> lock(g_lock);
  g_multiprocessors = count == 0 ? kMultiprocessors : count;
  g_share = share != 0;
}

// Warp instructions of all launches that ended well.
EXPORT uint64_t emulator_instructions() { return g_instructions; }

}  // extern "C"
