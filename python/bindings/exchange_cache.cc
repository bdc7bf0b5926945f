// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/exchange_cache.h"

#include <dlfcn.h>

#include <cstdint>

namespace tiercel::python {
namespace {

// A program has a handful of tensor types; the oldest entry goes when there are more.
constexpr int kEntries = 8;

struct Entry {
  PyTypeObject* type;              // a strong reference, so that its address is not reused
  const dlpack::ExchangeApi* api;  // null: read its attributes
};

Entry cache[kEntries];
int next_entry = 0;

// The attribute was renamed once, when the plain address in it became a capsule.
constexpr const char* kAttributes[] = {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"};

const dlpack::ExchangeApi* Usable(const void* table) {
  const auto* header = static_cast<const dlpack::ExchangeHeader*>(table);
  while (header != nullptr && header->version.major != dlpack::kMajorVersion) {
    header = header->older;
  }
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  if (api == nullptr || api->tensor_from_object == nullptr || api->current_work_stream == nullptr) {
    return nullptr;
  }
  return api;
}

// An int may be anything: of those, only the address of a static table of a loaded library is used.
const void* TableAt(const void* address) {
  Dl_info library;
  const bool aligned = reinterpret_cast<uintptr_t>(address) % alignof(dlpack::ExchangeApi) == 0;
  return aligned && dladdr(address, &library) != 0 ? address : nullptr;
}

bool LookUp(PyTypeObject* type, const dlpack::ExchangeApi** api) {
  *api = nullptr;
  for (const char* attribute : kAttributes) {
    PyObject* value = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), attribute);
    if (value == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
      PyErr_Clear();
      continue;
    }
    const void* table = nullptr;
    if (PyCapsule_IsValid(value, dlpack::kCapsuleName)) {
      table = PyCapsule_GetPointer(value, dlpack::kCapsuleName);
    } else if (PyLong_Check(value)) {
      table = PyLong_AsVoidPtr(value);
      if (table == nullptr) PyErr_Clear();  // no address at all, such as -1 << 64
      table = TableAt(table);
    }
    Py_DECREF(value);
    *api = Usable(table);
    if (*api != nullptr) return true;
  }
  return true;
}

}  // namespace

bool FindExchangeApi(PyTypeObject* type, const dlpack::ExchangeApi** api) {
  for (const Entry& entry : cache) {
    if (entry.type == type) {
      *api = entry.api;
      return true;
    }
  }
  if (!LookUp(type, api)) return false;
  PyTypeObject* evicted = cache[next_entry].type;
  Py_INCREF(type);
  cache[next_entry] = {type, *api};
  next_entry = (next_entry + 1) % kEntries;
  Py_XDECREF(evicted);  // last: it may run Python code
  return true;
}

void ClearExchangeCache() {
  for (Entry& entry : cache) {
    Py_CLEAR(entry.type);
    entry.api = nullptr;
  }
}

}  // namespace tiercel::python
