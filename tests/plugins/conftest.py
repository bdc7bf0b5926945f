# SPDX-License-Identifier: Apache-2.0
import sys

import pytest


@pytest.fixture(autouse=True)
def _unregistered():
    """No test leaves a backend behind."""
    yield
    registration = sys.modules.get("tiercel.plugins.registration")
    if registration is not None:
        for op, name in list(registration.registered):
            registration.unregister(op, name)
        sys.modules["tiercel.plugins.loading"]._loaded.clear()
