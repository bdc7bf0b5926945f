// SPDX-License-Identifier: Apache-2.0
// Finds the DLPack exchange table of a tensor type, once a type.
#ifndef PYTHON_BINDINGS_EXCHANGE_CACHE_H_
#define PYTHON_BINDINGS_EXCHANGE_CACHE_H_

#include <Python.h>

#include "python/bindings/dlpack.h"

namespace tiercel::python {

// Sets `*api` to the type's table, or to null where it publishes none that we understand.
// False with a Python exception when looking it up raised one. Wants the GIL.
bool FindExchangeApi(PyTypeObject* type, const dlpack::ExchangeApi** api);

// Forgets what was found, for tests that change a type.
void ClearExchangeCache();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EXCHANGE_CACHE_H_
