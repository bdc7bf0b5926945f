# SPDX-License-Identifier: Apache-2.0
"""The host code of toy_shift, without PyTorch and without a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C


def test_the_plan():
    x, out = ExchangeTensor(3, 100), ExchangeTensor(3, 100)
    assert _C.toy_shift_plan(x, out, 1.0) == {"kernel": "toy_shift", "grid": 2, "block": 256}
    with pytest.raises(ValueError, match="toy_shift: `out` must have x's shape"):
        _C.toy_shift_plan(x, ExchangeTensor(3, 99), 1.0)
