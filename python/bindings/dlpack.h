// SPDX-License-Identifier: Apache-2.0
// The part of the DLPack 1.x binary interface that reading a tensor in place needs: the plain
// tensor description and the C exchange table that a tensor type publishes as
// `__dlpack_c_exchange_api__`. Layouts follow the DLPack specification; the names are ours.
#ifndef PYTHON_BINDINGS_DLPACK_H_
#define PYTHON_BINDINGS_DLPACK_H_

#include <cstddef>
#include <cstdint>

namespace tiercel::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr char kCapsuleName[] = "dlpack_exchange_api";

enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
  kFloat4E2M1FN = 17,
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;  // DeviceCode, or one that we do not name
  int32_t index;
};

struct DataType {
  uint8_t code;  // TypeCode, or one that we do not name
  uint8_t bits;
  uint16_t lanes;
};

// Describes memory, owns nothing. `strides` count elements and may be null before DLPack 1.2.
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeHeader {
  Version version;
  const ExchangeHeader* older;  // the producer's table for an earlier major version, or null
};

// Every function returns 0, or -1 with a Python exception set; all want the GIL.
struct ExchangeApi {
  ExchangeHeader header;
  void (*unused_allocate)();
  void (*unused_managed_from_object)();
  void (*unused_managed_to_object)();
  // Fills `out` with pointers into the object, valid while it lives unchanged. May be null.
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void** stream);
};

static_assert(sizeof(Tensor) == 48, "DLPack 1.x tensor layout");
static_assert(offsetof(Tensor, shape) == 24 && offsetof(Tensor, byte_offset) == 40);
static_assert(sizeof(ExchangeHeader) == 16 && sizeof(ExchangeApi) == 56);

}  // namespace tiercel::dlpack

#endif  // PYTHON_BINDINGS_DLPACK_H_
