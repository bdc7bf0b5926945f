# SPDX-License-Identifier: Apache-2.0
"""new_kernel: linear_act in plain PyTorch.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

from torch.nn import functional

import tiercel
from tiercel.plugins.types import Activated, Bias, Features, Weight


@tiercel.backends.register(
    op="linear_act",
    name="new_kernel",
    language="torch",
    description="sums in float32, rounded once",
)
def new_kernel(
    x: Features,  # [M, K] bfloat16 or float16, any strides
    weight: Weight,  # [N, K], the same dtype
    bias: Bias,  # [N] or None
    activation: str,  # none, relu, silu, gelu or gelu_tanh
) -> Activated:  # [M, N], the dtype of x
    sums = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if activation == "relu":
        sums = functional.relu(sums)
    elif activation == "silu":
        sums = functional.silu(sums)
    elif activation != "none":
        sums = functional.gelu(sums, approximate="tanh" if activation == "gelu_tanh" else "none")
    return sums.to(x.dtype)
