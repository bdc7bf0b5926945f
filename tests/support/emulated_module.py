# SPDX-License-Identifier: Apache-2.0
"""tiercel._C linked for the emulator (docs/emulator.md), as it is: it takes a GPU's tensors."""

import importlib.machinery
import importlib.util
import os


def load():
    """The module, which the caller makes known before tiercel is imported."""
    loader = importlib.machinery.ExtensionFileLoader(
        "tiercel._C", os.environ["TIERCEL_EMULATED_MODULE"]
    )
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tiercel._C", loader))
    loader.exec_module(module)
    return module
